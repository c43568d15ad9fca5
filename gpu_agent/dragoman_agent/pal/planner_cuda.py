"""The plan of a CUDA device, put together from its choices. Pure, needs no device."""

from __future__ import annotations

from dataclasses import dataclass

from dragoman.step_model import StepModel
from dragoman_agent.model.config import ModelConfig
from dragoman_agent.pal import step_cost
from dragoman_agent.pal.candidates import PROMPT_TOKENS
from dragoman_agent.pal.decisions import Candidate, Decision
from dragoman_agent.pal.kernel_times import KernelTimes
from dragoman_agent.pal.limits import Limits, PlanError, choose_context, need, profile_inputs
from dragoman_agent.pal.plan import GemmDecode, Plan, PrefillAttention
from dragoman_agent.pal.planner_attention import (
    DecodeChoice,
    Maker,
    choose_decode,
    choose_page,
    choose_prefill,
    shared_bytes,
)
from dragoman_agent.pal.planner_batch import (
    StepShape,
    choose_chunk,
    choose_gemm_decode,
    choose_gemm_rows,
    choose_graphs,
    choose_num_seqs,
    graph_bytes,
)
from dragoman_agent.pal.planner_memory import (
    Sizes,
    choose_blocks,
    choose_prefetch,
    context_bytes,
    workspace_bytes,
)
from dragoman_agent.pal.profile import Profile
from dragoman_agent.pal.rates import rates_of
from dragoman_agent.pal.switches import Switches
from dragoman_agent.pal.timings import Timings
from dragoman_kernels.triton.launches import DEPENDENT_KERNELS

_ROAD = "triton-bfloat16"
_DEPENDENT_IN_LAYER = [
    name
    for name in DEPENDENT_KERNELS
    if name in ("triton.rms_norm", "triton.silu_mul", "triton.rope_cache", "triton.decode_split")
]  # two norms a layer, but the library's products between them wait for the end
_GRID_CONTEXTS = (128, 1024, 4096, 16384)
_GRID_BATCHES = (1, 2, 4, 8)
_MAX_GRID_BATCHES = 16  # graph sizes in the step model that is sent to a controller
_ALONE_CONTEXT = 200  # of the step that is compared with what the first user sees


@dataclass(frozen=True, slots=True)
class _Chosen:
    """Everything chosen so far."""

    page_size: int
    context: int
    num_seqs: int
    gemm_rows: int
    gemm: tuple[GemmDecode, ...]
    dependent: bool
    decode: DecodeChoice
    prefill: PrefillAttention
    chunk: int
    graphs: tuple[int, ...]


def plan_cuda(
    profile: Profile,
    model: ModelConfig,
    limits: Limits,
    switches: Switches | None = None,
    timings: Timings | None = None,
) -> tuple[Plan, list[Decision]]:
    """The plan in bfloat16. Raises PlanError where there is none, naming what is missing."""
    switches = switches or Switches()
    times = KernelTimes(rates_of(profile), timings)
    chosen, shape, decisions = _choose(profile, model, limits, switches, times)
    shared, shared_decision = _shared_memory(profile, model, chosen)
    sizes = _sizes(model, times, chosen)
    num_blocks, memory, blocks = choose_blocks(
        profile, model, limits, switches, sizes, chosen.page_size, chosen.context, chosen.num_seqs
    )
    step_model = predict_cuda(shape, chosen.prefill, chosen.graphs, chosen.chunk)
    prefetch, moving = choose_prefetch(profile, model, step_model.prefill_tokens_per_second, switches)
    plan = Plan(
        device_kind="cuda",
        model_name=model.name,
        page_size=chosen.page_size,
        num_blocks=num_blocks,
        max_context_tokens=min(chosen.context, (num_blocks - 1) * chosen.page_size),
        max_batch_tokens=chosen.chunk,
        max_num_seqs=chosen.num_seqs,
        max_num_waiting=limits.max_num_waiting,
        num_threads=1,
        road=_ROAD,
        kv_dtype="bfloat16",
        memory=memory,
        step_model=step_model,
        graph_batch_sizes=chosen.graphs,
        device_index=profile.device.index,
        decode_attention=chosen.decode.attention,
        prefill_attention=chosen.prefill,
        min_gemm_rows=chosen.gemm_rows,
        gemm_decode=chosen.gemm,
        dependent_launch=chosen.dependent,
        burst=chosen.decode.burst,
        reduction=chosen.decode.reduction,
        shared_memory_bytes=shared,
        prefetch=prefetch,
    )
    step = _step_decision(profile, times, step_model, plan)
    return plan, [*decisions, shared_decision, blocks, *moving, step]


def predict_cuda(shape: StepShape, prefill: PrefillAttention, graphs: tuple[int, ...], chunk: int) -> StepModel:
    """t = sum over the kernels of a step of phase + max(bytes / rate, operations / rate), over batch and context.

    Batches are those with a graph, since others are padded to one. Where whole steps were timed, the sum is corrected
    by their ratio.
    """
    model, times = shape.model, shape.times
    contexts = tuple(
        dict.fromkeys(min(c, model.max_context_tokens) for c in (*_GRID_CONTEXTS, model.max_context_tokens))
    )
    batches = tuple(sorted({*(size for size in _GRID_BATCHES if size < graphs[0]), *_thin(graphs)}))

    def padded(batch: int, context: int) -> float:
        return shape.seconds(batch, context, next((size for size in graphs if size >= batch), batch))

    timed = [(b, c, padded(b, c)) for b, c in times.timed_steps(model.name)]

    def decode(batch: int, context: int) -> float:
        return padded(batch, context) * times.step_ratio(model.name, timed, batch, context)

    def prompts(tokens: int) -> float:
        on_device = step_cost.prefill_step_seconds(times, model, shape.page_size, prefill, tokens, PROMPT_TOKENS)
        # Outside a graph the host launches kernel by kernel, and a small step waits for it.
        return max(on_device, step_cost.num_kernels(model) * times.rates.python_launch_seconds)

    return StepModel(
        batch_sizes=batches,
        context_tokens=contexts,
        decode_seconds_grid=tuple(decode(batch, context) for batch in batches for context in contexts),
        prefill_tokens_per_second=chunk / prompts(chunk),
        prefill_base_seconds=prompts(min(64, chunk)),
    )


def _choose(
    profile: Profile, model: ModelConfig, limits: Limits, switches: Switches, times: KernelTimes
) -> tuple[_Chosen, StepShape, list[Decision]]:
    """Every choice but memory, in the order in which each needs the ones before."""
    off, tuning_off = switches.reason("pal") if not switches.pal else None, switches.reason("launch_tuning")
    context, context_decision = choose_context(model, limits)
    num_seqs, seqs_decision = choose_num_seqs(times, model, limits, profile, off)
    kv_bytes = max(need(profile, "memory.free") - 2 * model.num_parameters, 1.0)
    demand = num_seqs * min(PROMPT_TOKENS, model.max_context_tokens) * model.kv_bytes_per_token / kv_bytes
    maker = Maker(profile, model, times, num_seqs, demand)
    page_size, page_decision = choose_page(maker, off)
    decode, decode_decisions = choose_decode(maker, page_size, tuning_off)
    prefill, prefill_decision = choose_prefill(maker, page_size, tuning_off)
    rows, rows_decision = choose_gemm_rows(times, model, profile, tuning_off)
    gemm, gemm_decision = choose_gemm_decode(times, model, profile, tuning_off)
    dependent, gain, dependent_decision = _choose_dependent_launch(profile, model, tuning_off)
    shape = StepShape(model, times, page_size, decode.attention, rows, gemm, gain)
    chunk, chunk_decision = choose_chunk(shape, prefill, num_seqs, limits, profile, off)
    graphs, graphs_decision = choose_graphs(shape, num_seqs, kv_bytes, profile, tuning_off)
    decisions = [
        Decision("road", _ROAD, "our Triton kernels and the library's matrix products, weights and KV in bfloat16"),
        page_decision, context_decision, seqs_decision, *decode_decisions, prefill_decision, rows_decision, gemm_decision,
        dependent_decision, chunk_decision, graphs_decision,
    ]  # fmt: skip
    return (
        _Chosen(page_size, context, num_seqs, rows, gemm, dependent, decode, prefill, chunk, graphs),
        shape,
        decisions,
    )


def _sizes(model: ModelConfig, times: KernelTimes, chosen: _Chosen) -> Sizes:
    return Sizes(
        weights=2 * model.num_parameters,
        graphs=graph_bytes(model, len(chosen.graphs)),
        workspace=workspace_bytes(
            model, chosen.decode.attention, chosen.chunk, chosen.num_seqs, chosen.context, chosen.page_size
        ),
        context=context_bytes(times.rates),
    )


def _choose_dependent_launch(profile: Profile, model: ModelConfig, off: str | None) -> tuple[bool, float, Decision]:
    """On where the device has it and it was not measured to cost. Also the seconds a step that it saves as measured."""
    if off:
        return False, 0.0, Decision("dependent-launch", "no", off)
    capable = profile.values.get("compute.dependent_launch")
    has_it = bool(capable.value) if capable is not None else rates_of(profile).capability >= (9, 0)
    gain = profile.values.get("scheduling.dependent_launch_gain")
    seconds = float(gain.value) if gain is not None and isinstance(gain.value, int | float) else None
    count = model.num_layers * len(_DEPENDENT_IN_LAYER) + 1
    saved = 0.0 if seconds is None else count * seconds
    candidates = (Candidate("no", 0.0), Candidate("yes", None if seconds is None else -saved))
    inputs = profile_inputs(
        profile, "compute.dependent_launch", "compute.capability", "scheduling.dependent_launch_gain"
    )
    if not has_it:
        reason = "the device has no programmatic dependent launch (compute capability 9.0 and later)"
    elif seconds is not None and seconds <= 0:
        reason = "it was measured to cost more than it saves"
    else:
        each = "" if seconds is None else f"; {1e6 * seconds:.2f} us each as measured between empty ones"
        reason = (
            f"{count} kernels of a step wait for the one before by themselves, so they may start while it ends{each}"
        )
        return (
            True,
            saved,
            Decision("dependent-launch", "yes", reason, inputs, candidates, -saved if saved else None, unit="s"),
        )
    return False, 0.0, Decision("dependent-launch", "no", reason, inputs, candidates, unit="s")


def _shared_memory(profile: Profile, model: ModelConfig, chosen: _Chosen) -> tuple[int, Decision]:
    """Shared memory of the largest block. Raises PlanError where a fixed configuration needs more than the device has."""
    rates = rates_of(profile)
    used = shared_bytes(model, chosen.decode, chosen.prefill, chosen.page_size, rates.capability)
    if used > rates.shared_per_block:
        raise PlanError(
            f"the fixed launches need {used} bytes of shared memory a block, {profile.name} has "
            f"{rates.shared_per_block} (memory.shared_per_block); leave out --pal off and --pal-launch-tuning off"
        )
    reason = f"the largest block of attention; {rates.shared_per_block} may be used"
    inputs = profile_inputs(profile, "memory.shared_per_block", "memory.shared_per_multiprocessor")
    return used, Decision("shared-memory", f"{used}", reason, inputs, predicted=float(used), unit="bytes")


def _step_decision(profile: Profile, times: KernelTimes, step_model: StepModel, plan: Plan) -> Decision:
    alone = step_model.decode_step_seconds(1, _ALONE_CONTEXT)
    how = "each kernel as timed on the device where it was" if times.has_measurements else "each kernel predicted"
    names = ("memory.read_bandwidth", "compute.matmul_bfloat16", "scheduling.phase", "scheduling.phase_rate", "scheduling.graph_node")  # fmt: skip
    return Decision(
        "step-model",
        f"{1e3 * alone:.2f} ms a token alone",
        f"sum over the kernels of a step of phase + max(bytes / rate, operations / rate); {how}",
        profile_inputs(profile, *names),
        predicted=alone,
        unit="s",
    )


def _thin(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """At most 16 of the sizes, both ends kept."""
    if len(sizes) <= _MAX_GRID_BATCHES:
        return sizes
    last = len(sizes) - 1
    return tuple(dict.fromkeys(sizes[round(i * last / (_MAX_GRID_BATCHES - 1))] for i in range(_MAX_GRID_BATCHES)))
