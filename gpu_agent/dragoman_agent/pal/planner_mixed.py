"""Which steps with prompts have a graph: those that the device computes sooner than the host hands them over, and full ones. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dragoman_agent.model.config import ModelConfig
from dragoman_agent.pal import step_cost
from dragoman_agent.pal.decisions import Candidate, Decision
from dragoman_agent.pal.limits import profile_inputs
from dragoman_agent.pal.plan import (
    LibraryPrefill,
    LongPrefill,
    PrefillForms,
    captured_tokens,
    mixed_graph_sizes,
    mixed_timed,
)
from dragoman_agent.pal.planner_batch import GRAPH_NODE_BYTES, StepShape
from dragoman_agent.pal.planner_chunk import Chunk
from dragoman_agent.pal.planner_memory import token_bytes
from dragoman_agent.pal.profile import Profile

_SIZES = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1280, 1536, 1792, 2048, 2560, 3072, 3584, 4096)
_MAX_PADDING = 0.1  # of a step's time, for which no graph of its own is worth it
# Of the host's time, up to which the device's is no longer: on an H200 steps took the host 0.8 to 2.5 times what probes of one
# launch let expect, as long as nothing else ran beside them and when something did.
_CERTAIN = 0.9
_WORTH_A_CHUNK = 0.02  # of a full step, that handing it over takes the host at least where it has a graph
_KV_SHARE = 0.02  # of the memory for KV, at most, that such graphs take


@dataclass(frozen=True, slots=True)
class MixedGraphs:
    """The graphs of steps with prompts."""

    tokens: tuple[int, ...] = ()  # that any shorter step is padded to, rising
    full: tuple[int, ...] = ()  # tokens of full steps, where they have one too, rising

    @property
    def captured(self) -> tuple[int, ...]:
        """Tokens of all of them."""
        return captured_tokens(self.tokens, self.full)


def choose_mixed_graphs(
    shape: StepShape,
    prefill: PrefillForms,
    library: LibraryPrefill | None,
    chunk: Chunk,
    max_num_seqs: int,
    kv_bytes: float,
    profile: Profile,
    off: str | None,
) -> tuple[MixedGraphs, Decision]:
    """Steps that the device computes sooner than the host hands them over, and those that fill the chunk, which spare the
    host the work; what lies between runs kernel by kernel.
    """
    subject, model = "mixed-graphs", shape.model
    if off:
        return MixedGraphs(), Decision(subject, "none", off)
    handover = step_cost.handover_seconds(shape.times.rates, model)
    seconds = {size: mixed_graph_seconds(shape, prefill, size) for size in _SIZES if size <= chunk.alone}
    apart = _far_apart({size: step for size, step in seconds.items() if step <= _CERTAIN * handover})

    def taken(tokens: Sequence[int]) -> int:
        return mixed_graph_bytes(model, tokens, max_num_seqs, library, prefill.long)

    memory = [taken(apart[:nth]) for nth in range(len(apart) + 1)]
    sizes = tuple(size for nth, size in enumerate(apart, 1) if memory[nth] <= _KV_SHARE * kv_bytes)
    full = {tokens: mixed_graph_seconds(shape, prefill, tokens, library) for tokens in chunk.full}
    fills = tuple(full) if not full.keys() <= {*sizes} else ()
    if taken(captured_tokens(sizes, fills)) > _KV_SHARE * kv_bytes or handover < _WORTH_A_CHUNK * min(full.values()):
        fills = ()
    chosen = MixedGraphs(sizes, fills)

    def why_not(size: int, step: float) -> str:
        if step > _CERTAIN * handover:
            return "the device may take longer than the host"
        return (
            "takes more memory than it is worth" if size in apart else f"the next takes under {_MAX_PADDING:.0%} more"
        )

    candidates = tuple(
        Candidate(f"{size}", step, "" if size in chosen.captured else why_not(size, step))
        for size, step in sorted({**seconds, **full}.items())
    )
    reason = (
        f"the host takes {1e3 * handover:.1f} ms to hand a step over kernel by kernel; up to {sizes[-1]:,} tokens the device "
        f"takes no longer, so a graph hands them over at once"
        if sizes
        else f"no step is both shorter than the {1e3 * handover:.1f} ms in which the host hands it over and small enough to keep"
    )
    if fills:
        words = " and ".join(f"{tokens:,}" for tokens in fills)
        reason += f"; steps of {words} tokens, which fill a chunk, spare the host that work"
    if chosen.captured:
        reason += f" ({taken(chosen.captured) / (1 << 20):.0f} MiB)"
    names = ("scheduling.host_launch", "memory.read_bandwidth", "scheduling.phase", "memory.free")
    timed = mixed_timed(sizes)
    words = ", ".join(map(str, chosen.captured)) or "none"
    predicted = seconds[timed] if timed else None
    return chosen, Decision(subject, words, reason, profile_inputs(profile, *names), candidates, predicted, unit="s")


def mixed_graph_seconds(
    shape: StepShape,
    prefill: PrefillForms,
    num_tokens: int,
    library: LibraryPrefill | None = None,
    prompt: int | None = None,
) -> float:
    """A step of `num_tokens` as its graph runs it: prompts of `prompt` tokens (None: one), and decode attention that finds
    nothing to do.
    """
    model, times = shape.model, shape.times
    step = step_cost.prefill_step_seconds(
        times, model, shape.page_size, prefill, num_tokens, prompt or num_tokens, library, shape.gemm, in_graph=True
    )
    return step + 2 * model.num_layers * times.rates.phase_seconds


def mixed_graph_bytes(
    model: ModelConfig,
    tokens: Sequence[int],
    max_num_seqs: int,
    library: LibraryPrefill | None = None,
    long: LongPrefill | None = None,
) -> int:
    """Nodes of all graphs for steps of `tokens`, the hidden states that each one writes anew, activations of the largest,
    and logits of a full batch, which they share. Those that a library attends are there again for steps that it cannot run,
    and those that may be attended by the launch of long contexts for steps that it is not for.
    """
    sizes = mixed_graph_sizes(tokens, max_num_seqs)
    again = [library.min_tokens] if library is not None else []
    again += [long.fewest_tokens] if long is not None else []
    graphs = [*sizes, *((num, seqs) for least in again for num, seqs in sizes if num >= least)]
    nodes = len(graphs) * step_cost.num_kernels(model, is_split=True) * GRAPH_NODE_BYTES
    hidden = 2 * sum(num for num, _ in graphs) * model.hidden_size
    logits = 2 * model.vocab_size * max_num_seqs if tokens else 0
    return nodes + hidden + max(tokens, default=0) * token_bytes(model) + logits


def _far_apart(seconds: Mapping[int, float]) -> list[int]:
    """The sizes whose step is shorter by more than `_MAX_PADDING` than that of the next one kept; the largest is kept."""
    kept: list[int] = []
    for size in sorted(seconds, reverse=True):
        if not kept or seconds[kept[-1]] > (1 + _MAX_PADDING) * seconds[size]:
            kept.append(size)
    return sorted(kept)
