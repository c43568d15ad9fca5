"""How long a CUDA device's steps take by its plan, from the kernels' times, and the decision that says so. Pure."""

from __future__ import annotations

from dragoman.step_model import StepModel
from dragoman_agent.pal import step_cost
from dragoman_agent.pal.candidates import PROMPT_TOKENS
from dragoman_agent.pal.decisions import Decision
from dragoman_agent.pal.kernel_times import KernelTimes
from dragoman_agent.pal.limits import profile_inputs
from dragoman_agent.pal.plan import MIXED_TIMED_TOKENS, LibraryPrefill, PrefillForms
from dragoman_agent.pal.planner_batch import StepShape
from dragoman_agent.pal.planner_mixed import MixedGraphs, mixed_graph_seconds
from dragoman_agent.pal.profile import Profile

_GRID_CONTEXTS = (128, 1024, 4096, 16384)
_GRID_BATCHES = (1, 2, 4, 8)
_MAX_GRID_BATCHES = 16  # graph sizes in the step model that is sent to a controller
_NO_GRAPHS = MixedGraphs()
_ALONE_CONTEXT = 200  # of the step that is compared with what the first user sees


def predict_cuda(
    shape: StepShape,
    prefill: PrefillForms,
    graphs: tuple[int, ...],
    chunk: int,
    library: LibraryPrefill | None = None,
    mixed_graphs: MixedGraphs = _NO_GRAPHS,
) -> StepModel:
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
        on_device = step_cost.prefill_step_seconds(
            times, model, shape.page_size, prefill, tokens, PROMPT_TOKENS, library, shape.fixed
        )
        size = next((size for size in mixed_graphs.tokens if size >= tokens), None)
        if size is not None:
            return mixed_graph_seconds(shape, prefill, size)
        if tokens in mixed_graphs.full:
            return mixed_graph_seconds(shape, prefill, tokens, library, PROMPT_TOKENS)
        # Outside a graph the host launches kernel by kernel, and a small step waits for it.
        return max(on_device, step_cost.handover_seconds(times.rates, model))

    return StepModel(
        batch_sizes=batches,
        context_tokens=contexts,
        decode_seconds_grid=tuple(decode(batch, context) for batch in batches for context in contexts),
        prefill_tokens_per_second=chunk / prompts(chunk),
        prefill_base_seconds=prompts(min(MIXED_TIMED_TOKENS, chunk)),
    )


def step_decision(profile: Profile, times: KernelTimes, step_model: StepModel) -> Decision:
    """The step model in words. Predicted: seconds of a token of one sequence."""
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
