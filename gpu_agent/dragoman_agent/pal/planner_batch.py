"""How many at once on a GPU: sequences, rows of a product, captured graphs. Each with its decision. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from dragoman_agent.model.config import ModelConfig
from dragoman_agent.pal import pal_off, step_cost
from dragoman_agent.pal.candidates import FEW_ROWS, GEMM_ROWS, contexts_of, few_rows_calls
from dragoman_agent.pal.decisions import Candidate, Decision
from dragoman_agent.pal.kernel_times import KernelTimes
from dragoman_agent.pal.limits import Limits, profile_inputs
from dragoman_agent.pal.plan import DecodeAttention, GemmDecode, GemmFixed, decode_for
from dragoman_agent.pal.planner_memory import sequence_bytes, spare_bytes
from dragoman_agent.pal.profile import Profile
from dragoman_kernels.triton.launches import GemmLaunch

LATENCY_TARGET_SECONDS = 0.05  # between two tokens of a stream while others' prompts are computed: a usual objective
STALL_STEPS = 2.0  # where a decode step alone takes longer than that, a step with a prompt may take twice as long
_MIN_GAIN = 0.2  # in tokens a second, for which every stream may get slower by twice the sequences
SHORT_CONTEXT = 256  # at which streams begin
_SEQS = (8, 16, 32, 64, 128, 256, 512)
_MAX_PADDING_COST = 0.01  # of a step, for rows that nobody asked for
GRAPH_NODE_BYTES = 40 << 10  # what was allowed for on an H200; no driver call says what a node takes
_SERVING_SECONDS = 3600.0  # that capturing is spread over when its time is weighed against a step's


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a decode step's time depends on beside batch and context."""

    model: ModelConfig
    times: KernelTimes
    page_size: int
    attention: tuple[DecodeAttention, ...]
    min_gemm_rows: int
    gemm: tuple[GemmDecode, ...] | tuple[GemmFixed, ...] = ()
    dependent_gains: tuple[
        tuple[int, float], ...
    ] = ()  # (batch, seconds a step is shorter) by kernels that start early

    @property
    def fixed(self) -> tuple[GemmFixed, ...]:
        """The products that are in one order for chunks too."""
        return tuple(one for one in self.gemm if isinstance(one, GemmFixed))

    def seconds(self, batch: int, context: int, size: int | None = None) -> float:
        """A step of `batch` sequences run as one of `size`, as a graph of that size does."""
        size = size or batch
        rows = max(size, self.min_gemm_rows)
        config = decode_for(self.attention, size)
        step = step_cost.decode_step_seconds(
            self.times, self.model, self.page_size, config, batch, context, rows, self.gemm
        )
        # The last batch measured at most as large as this one tells.
        gains = [gain for measured, gain in self.dependent_gains if measured <= max(size, 1)]
        return max(step - gains[-1], step / 2) if gains else step


def choose_num_seqs(times: KernelTimes, model: ModelConfig, limits: Limits, profile: Profile, off: str | None) -> tuple[int, Decision]:  # fmt: skip
    """Doubled as long as that brings a fifth more tokens a second within the latency target, at the context of a start.

    Made before anything else is chosen, so a step is taken at its floor: weights and KV once, a phase a kernel. No more
    than have room for a short context each, with what a sequence takes of the workspace.
    """
    if limits.max_num_seqs:
        return limits.max_num_seqs, Decision("max-seqs", f"{limits.max_num_seqs}", "asked for")
    if off:
        return pal_off.MAX_NUM_SEQS, Decision("max-seqs", f"{pal_off.MAX_NUM_SEQS}", off)
    target = limits.latency_target_seconds or LATENCY_TARGET_SECONDS
    seconds = {count: _floor_seconds(times, model, count) for count in _SEQS}
    chosen = _SEQS[0]
    for count in _SEQS[1:]:
        gain = count / seconds[count] * seconds[chosen] / chosen - 1
        if gain < _MIN_GAIN or seconds[count] > max(target, STALL_STEPS * seconds[_SEQS[0]]):
            break
        chosen = count
    with_room = _room_for_seqs(times, model, limits, profile)
    reason_of_room = ""
    if with_room < chosen:
        chosen, reason_of_room = with_room, f"; memory has room for {with_room} of {SHORT_CONTEXT} tokens"
    candidates = tuple(
        Candidate(f"{count}", step, "" if count == chosen else f"{count / step:,.0f} tokens/s")
        for count, step in seconds.items()
    )
    reason = (
        f"the next doubling brings under {_MIN_GAIN:.0%} more tokens a second or passes {1e3 * target:.0f} ms a step "
        f"at {SHORT_CONTEXT} tokens of context{reason_of_room}"
    )
    inputs = profile_inputs(
        profile, "memory.read_bandwidth", "compute.matmul_bfloat16", "scheduling.phase", "memory.free"
    )
    predicted = _floor_seconds(times, model, chosen)
    return chosen, Decision("max-seqs", f"{chosen}", reason, inputs, candidates, predicted, unit="s")


def choose_gemm_rows(times: KernelTimes, model: ModelConfig, profile: Profile, off: str | None) -> tuple[int, Decision]:
    """Rows that small products are padded to. Measured where it was timed; else the short side of a tensor core product,
    as far as it costs next to nothing.
    """
    if off:
        return pal_off.MIN_GEMM_ROWS, Decision("gemm-rows", f"{pal_off.MIN_GEMM_ROWS}", off, unit="rows")
    calls = {rows: [*step_cost.gemm_calls(model, rows), (step_cost.head_call(model, rows), 1)] for rows in GEMM_ROWS}
    seconds = {rows: sum(count * times.seconds(call) for call, count in each) for rows, each in calls.items()}
    timed = all(times.measured(call) is not None for each in calls.values() for call, _ in each)
    if timed:
        chosen = min(seconds, key=lambda rows: seconds[rows])
        reason = "the shortest for the products of one step, measured on the device"
    else:
        least = min(seconds.values())
        chosen = max(rows for rows in GEMM_ROWS if seconds[rows] <= (1 + _MAX_PADDING_COST) * least)
        reason = (
            f"a tensor core product has {chosen} rows at least, so they cost {seconds[chosen] / least - 1:.2%}; library "
            "kernels for one row are up to twice as slow where outputs are few (H200, 1,024 outputs)"
            if chosen > 1
            else f"padding would cost over {_MAX_PADDING_COST:.0%} of the products"
        )
    candidates = tuple(
        Candidate(f"{rows}", cost, "" if rows == chosen else f"{cost / seconds[chosen] - 1:+.2%}") for rows, cost in seconds.items()
    )  # fmt: skip
    inputs = profile_inputs(profile, "memory.read_bandwidth", "compute.matmul_bfloat16", "scheduling.phase_rate")
    return chosen, Decision("gemm-rows", f"{chosen}", reason, inputs, candidates, seconds[chosen], unit="s")


def choose_gemm_decode(
    times: KernelTimes, model: ModelConfig, profile: Profile, off: str | None
) -> tuple[tuple[GemmDecode, ...], Decision]:
    """Which matrices batches of few rows multiply with our own kernel: those where it was measured to be quicker.

    Both read the weights once, so the prediction has no favourite; without a measurement the library stays.
    """
    if off:
        return (), Decision("gemm-decode", "library", off)
    chosen: list[GemmDecode] = []
    candidates: list[Candidate] = []
    library = own = 0.0
    timed = False
    for n, k in dict.fromkeys((*step_cost.matrices(model), (model.vocab_size, model.hidden_size))):
        for rows in FEW_ROWS:
            plain = times.measured(step_cost.gemm_call(rows, n, k))
            options = [
                (found, call) for call in few_rows_calls(rows, n, k) if (found := times.measured(call)) is not None
            ]
            if plain is None or not options:
                continue
            timed = True
            seconds, best = min(options, key=lambda entry: entry[0])
            wins = seconds < plain
            candidates.append(
                Candidate(f"{n}x{k} to {rows} rows", seconds, "" if wins else f"the library takes {1e6 * plain:.1f} us")
            )
            if isinstance(best.config, GemmLaunch) and wins:
                chosen.append(GemmDecode(n=n, k=k, max_rows=rows, **asdict(best.config)))
            if rows == FEW_ROWS[0]:
                library, own = library + plain, own + min(plain, seconds)
    inputs = profile_inputs(profile, "memory.read_bandwidth", "scheduling.phase")
    kept = _library_where_it_wins(chosen)
    words = ", ".join(f"{one.n}x{one.k} to {one.max_rows} rows" for one in kept) or "library"
    reason = (
        f"measured on the device: one of each matrix takes {1e6 * own:.1f} us so, {1e6 * library:.1f} us by the library"
        if timed
        else "not timed on this device: both read the weights once, and the library is known"
    )
    return kept, Decision("gemm-decode", words, reason, inputs, tuple(candidates), own if timed else None, unit="s")


def _library_where_it_wins(chosen: Sequence[GemmDecode]) -> tuple[GemmDecode, ...]:
    """Entries in the order in which the device takes the first that holds its rows; for each matrix only as far as every
    smaller number of rows is quicker too, since an entry serves all of them.
    """
    kept = []
    for one in chosen:
        below = [rows for rows in FEW_ROWS if rows <= one.max_rows]
        mine = {other.max_rows for other in chosen if (other.n, other.k) == (one.n, one.k)}
        if all(rows in mine for rows in below):
            kept.append(one)
    return tuple(kept)


def choose_graphs(
    shape: StepShape, max_num_seqs: int, kv_bytes: float, profile: Profile, off: str | None
) -> tuple[tuple[int, ...], Decision]:
    """The batch sizes to capture: least padding for what each graph takes of memory and of the host's time.

    Small batches weigh as much as large ones (1/n); the best set of sizes is found exactly, by dynamic programming.
    """
    if off:
        fixed = _up_to(pal_off.GRAPH_BATCH_SIZES, max_num_seqs)
        return fixed, Decision("graphs", _list(fixed), off, predicted=graph_bytes(shape.model, fixed), unit="bytes")
    sizes = _up_to((1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 513, 32)), max_num_seqs)
    waste = _padding_waste(shape, sizes)
    price = graph_bytes(shape.model, (1,)) / max(kv_bytes, 1.0) + _capture_seconds(shape) / _SERVING_SECONDS
    # What a single user sees is the step of his own batch: the smallest have a graph each, whatever the average says. So have
    # the doublings: past one a library takes larger tiles, a loss that times of other rows do not show (8 % of a step on an H200).
    doublings = tuple(size for size in sizes if size & (size - 1) == 0 or size == max_num_seqs)
    chosen = tuple(sorted({*doublings, *_best_sizes(sizes, waste, price)}))
    others = {
        "every size": sizes,
        "doublings": doublings,
        "the largest alone": sizes[-1:],
    }
    size_bytes = graph_bytes(shape.model, chosen)
    padding = _mean_waste(sizes, chosen, waste)
    candidates = (
        Candidate(f"{len(chosen)} sizes", float(size_bytes)),
        *(
            Candidate(
                f"{name} ({len(each)})",
                float(graph_bytes(shape.model, each)),
                f"{_mean_waste(sizes, each, waste):.2%} of padding, {_total(sizes, each, waste, price):.2%} with memory and capturing",
            )
            for name, each in others.items()
            if each != chosen
        ),
    )
    reason = (
        f"padding costs {padding:.2%} of a step on average, {len(chosen)} graphs take "
        f"{size_bytes / (1 << 20):.0f} MiB and {len(chosen) * _capture_seconds(shape):.1f} s to capture: "
        f"{_total(sizes, chosen, waste, price):.2%} together, the least of all sets; each doubling has its own in any case"
    )
    inputs = profile_inputs(profile, "memory.free", "scheduling.phase", "memory.read_bandwidth")
    return chosen, Decision("graphs", _list(chosen), reason, inputs, candidates, float(size_bytes), unit="bytes")


def graph_bytes(model: ModelConfig, sizes: tuple[int, ...]) -> int:
    """Memory of captured graphs beside the pool that they share: their nodes, and the logits that each one writes anew."""
    nodes = len(sizes) * step_cost.num_kernels(model, is_split=True) * GRAPH_NODE_BYTES
    return nodes + sum(sizes) * model.vocab_size * 2


def _room_for_seqs(times: KernelTimes, model: ModelConfig, limits: Limits, profile: Profile) -> int:
    """The most of `_SEQS`, and below its first the most, that leave half of the KV memory at a short context each."""
    room = spare_bytes(profile, model, limits, times.rates)
    each = sequence_bytes(model) + 2 * SHORT_CONTEXT * model.kv_bytes_per_token
    fitting = max(int(room // each), 1)
    return max((count for count in _SEQS if count <= fitting), default=fitting)


def _floor_seconds(times: KernelTimes, model: ModelConfig, batch: int) -> float:
    kv = batch * SHORT_CONTEXT * model.kv_bytes_per_token / times.rates.read_bandwidth
    return step_cost.padded_seconds(times, model, batch) + model.num_layers * times.rates.phase_seconds + kv


def _capture_seconds(shape: StepShape) -> float:
    """A step launched kernel by kernel twice: to compile what it needs, and to capture it."""
    return 2 * step_cost.num_kernels(shape.model, is_split=True) * shape.times.rates.python_launch_seconds


def _up_to(sizes: Sequence[int], most: int) -> tuple[int, ...]:
    return (*(size for size in sizes if size < most), most)


def _padding_waste(shape: StepShape, sizes: Sequence[int]) -> list[list[float]]:
    """[low][high]: sum over batches in (sizes[low - 1], sizes[high]] of the extra share of a step run at sizes[high],
    each weighed by 1 / batch. A batch that is one of `sizes` stands for those since the size before.
    """
    contexts = contexts_of(shape.model)
    weights = [
        sum(1 / n for n in range(before + 1, size + 1)) for before, size in zip((0, *sizes), sizes, strict=False)
    ]

    def extra_share(batch: int, size: int) -> float:
        """Mean over the contexts: a size also brings its own launch of attention."""
        shares = (shape.seconds(batch, c, size) / shape.seconds(batch, c) - 1 for c in contexts)
        return max(sum(shares) / len(contexts), 0.0)

    extra = [
        [weights[at] * extra_share(sizes[at], sizes[high]) if high >= at else 0.0 for high in range(len(sizes))]
        for at in range(len(sizes))
    ]
    return [
        [sum(extra[at][high] for at in range(low, high + 1)) for high in range(len(sizes))] for low in range(len(sizes))
    ]


def _best_sizes(sizes: Sequence[int], waste: list[list[float]], price: float) -> tuple[int, ...]:
    """The set that ends with the largest size and minimises mean waste + price * count."""
    total = sum(1 / n for n in range(1, sizes[-1] + 1))
    best: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for high, size in enumerate(sizes):
        options = ((best[low][0] + waste[low][high] / total + price, (*best[low][1], size)) for low in range(high + 1))
        best.append(min(options))
    return best[-1][1]


def _mean_waste(sizes: Sequence[int], chosen: Sequence[int], waste: list[list[float]]) -> float:
    total = sum(1 / n for n in range(1, sizes[-1] + 1))
    places = [sizes.index(size) for size in chosen]
    starts = (0, *(place + 1 for place in places))
    return sum(waste[low][high] for low, high in zip(starts, places, strict=False)) / total


def _total(sizes: Sequence[int], chosen: Sequence[int], waste: list[list[float]], price: float) -> float:
    return _mean_waste(sizes, chosen, waste) + price * len(chosen)


def _list(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes))
