"""Which steps with prompts have a graph: those that the device computes sooner than the host hands them over. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dragoman_agent.model.config import ModelConfig
from dragoman_agent.pal import step_cost
from dragoman_agent.pal.decisions import Candidate, Decision
from dragoman_agent.pal.limits import profile_inputs
from dragoman_agent.pal.plan import PrefillAttention, mixed_graph_sizes, mixed_timed
from dragoman_agent.pal.planner_batch import GRAPH_NODE_BYTES, StepShape
from dragoman_agent.pal.planner_memory import token_bytes
from dragoman_agent.pal.profile import Profile

_SIZES = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
_MAX_PADDING = 0.1  # of a step's time, for which no graph of its own is worth it
# Of the host's time, below which the device's is surely shorter: what a launch takes the host varied by a third between
# probes of one H200, and a step there took half of what they let expect.
_CERTAIN = 0.5
_KV_SHARE = 0.02  # of the memory for KV, at most, that such graphs take


def choose_mixed_graphs(
    shape: StepShape,
    prefill: PrefillAttention,
    chunk: int,
    max_num_seqs: int,
    kv_bytes: float,
    profile: Profile,
    off: str | None,
) -> tuple[tuple[int, ...], Decision]:
    """Tokens that steps with prompts are padded to, rising; longer ones run kernel by kernel."""
    subject, model = "mixed-graphs", shape.model
    if off:
        return (), Decision(subject, "none", off)
    handover = step_cost.handover_seconds(shape.times.rates, model)
    seconds = {size: mixed_graph_seconds(shape, prefill, size) for size in _SIZES if size <= chunk}
    apart = _far_apart({size: step for size, step in seconds.items() if step <= _CERTAIN * handover})
    memory = [mixed_graph_bytes(model, apart[:nth], max_num_seqs) for nth in range(len(apart) + 1)]
    sizes = tuple(size for nth, size in enumerate(apart, 1) if memory[nth] <= _KV_SHARE * kv_bytes)

    def why_not(size: int, step: float) -> str:
        if step > _CERTAIN * handover:
            return "the device may take longer than the host"
        return (
            "takes more memory than it is worth" if size in apart else f"the next takes under {_MAX_PADDING:.0%} more"
        )

    candidates = tuple(
        Candidate(f"{size}", step, "" if size in sizes else why_not(size, step)) for size, step in seconds.items()
    )
    reason = (
        f"the host takes {1e3 * handover:.1f} ms to hand a step over kernel by kernel; up to {sizes[-1]:,} tokens the device "
        f"surely takes less, so a graph hands them over at once ({memory[len(sizes)] / (1 << 20):.0f} MiB)"
        if sizes
        else f"no step is both surely shorter than the {1e3 * handover:.1f} ms in which the host hands it over and small enough to keep"
    )
    names = ("scheduling.host_launch", "memory.read_bandwidth", "scheduling.phase", "memory.free")
    timed = mixed_timed(sizes)
    words = ", ".join(map(str, sizes)) or "none"
    predicted = seconds[timed] if timed else None
    return sizes, Decision(subject, words, reason, profile_inputs(profile, *names), candidates, predicted, unit="s")


def mixed_graph_seconds(shape: StepShape, prefill: PrefillAttention, num_tokens: int) -> float:
    """A step of `num_tokens` as its graph runs it: one prompt, and decode attention that finds nothing to do."""
    model, times = shape.model, shape.times
    step = step_cost.prefill_step_seconds(
        times, model, shape.page_size, prefill, num_tokens, num_tokens, None, shape.gemm, in_graph=True
    )
    return step + 2 * model.num_layers * times.rates.phase_seconds


def mixed_graph_bytes(model: ModelConfig, tokens: Sequence[int], max_num_seqs: int) -> int:
    """Nodes of all graphs for steps of `tokens`, the hidden states that each one writes anew, activations of the largest."""
    graphs = mixed_graph_sizes(tokens, max_num_seqs)
    nodes = len(graphs) * step_cost.num_kernels(model, is_split=True) * GRAPH_NODE_BYTES
    hidden = 2 * sum(num for num, _ in graphs) * model.hidden_size
    return nodes + hidden + max(tokens, default=0) * token_bytes(model)


def _far_apart(seconds: Mapping[int, float]) -> list[int]:
    """The sizes whose step is shorter by more than `_MAX_PADDING` than that of the next one kept; the largest is kept."""
    kept: list[int] = []
    for size in sorted(seconds, reverse=True):
        if not kept or seconds[kept[-1]] > (1 + _MAX_PADDING) * seconds[size]:
            kept.append(size)
    return sorted(kept)
