"""How a GPU's attention runs: page, launches by batch, bursts, where parts are merged. Each choice with its decision. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dragoman_agent.model.config import ModelConfig
from dragoman_agent.pal import pal_off, step_cost
from dragoman_agent.pal.attention_cost import AttentionShape, long_decode_seconds
from dragoman_agent.pal.candidates import (
    DECODE_BATCHES,
    PAGE_SIZES,
    PROMPT_TOKENS,
    contexts_of,
    decode_shortlist,
    page_batches,
)
from dragoman_agent.pal.decisions import Candidate, Decision
from dragoman_agent.pal.kernel_times import KernelTimes
from dragoman_agent.pal.limits import PlanError, profile_inputs
from dragoman_agent.pal.plan import DecodeAttention, PrefillAttention, PrefillForms, Reduction, decode_for
from dragoman_agent.pal.profile import Profile
from dragoman_kernels.triton.launches import (
    DECODE_SPLITS,
    DecodeLaunch,
    PrefillLaunch,
    decode_resources,
    prefill_resources,
)

INPUTS = (
    "compute.multiprocessors",
    "memory.read_bandwidth",
    "memory.shared_per_block",
    "memory.shared_per_multiprocessor",
    "scheduling.phase",
)
_LONG_TOKENS = 16384  # of one sequence among usual ones, in the question of bursts
_LONG_SHARE = 1 / 16  # of the steps have such a sequence
_MAX_USUAL_COST = 0.01  # of a usual step, for the launches and merges of a burst
_FEW_SEQS = 8  # a burst is for batches in which one sequence can end last
_TELLS_APART = 0.02  # pages whose steps differ by less are taken as equal
_USUAL_PAGE = 64  # a unit of prefix sharing: the choice among equals


@dataclass(frozen=True, slots=True)
class Maker:
    """What every choice of one plan is made from."""

    profile: Profile
    model: ModelConfig
    times: KernelTimes
    max_num_seqs: int
    kv_demand: float  # share of the KV memory that a full batch of usual requests wants


@dataclass(frozen=True, slots=True)
class DecodeChoice:
    """Decode attention with what follows from it."""

    attention: tuple[DecodeAttention, ...]
    burst: bool


def choose_page(maker: Maker, off: str | None) -> tuple[int, Decision]:
    """The page with the shortest step, counting what the host does a page and the memory in half-filled last pages."""
    if off:
        return pal_off.PAGE_SIZE, Decision("page-size", f"{pal_off.PAGE_SIZE}", off, unit="tokens")
    costs = {page: _page_cost(maker, page) for page in PAGE_SIZES}
    best = min(costs.values())
    chosen = min(costs, key=lambda page: costs[page])
    if costs[_USUAL_PAGE] <= (1 + _TELLS_APART) * best:
        chosen = _USUAL_PAGE
    if costs[chosen] == float("inf"):
        raise PlanError(no_launch(maker, "decode"))
    candidates = tuple(
        Candidate(f"{page}", cost if cost < float("inf") else None, "" if page == chosen else _page_reason(cost, costs[chosen]))
        for page, cost in costs.items()
    )  # fmt: skip
    reason = (
        "shortest mean step with the host's work for each page, and with the memory that half-filled last pages take "
        f"counted by how scarce it is ({min(maker.kv_demand, 1.0):.0%} of KV wanted); within {_TELLS_APART:.0%} the unit of "
        f"prefix sharing, {_USUAL_PAGE}"
    )
    inputs = profile_inputs(maker.profile, "memory.free", *INPUTS)
    return chosen, Decision("page-size", f"{chosen}", reason, inputs, candidates, costs[chosen], unit="s")


def choose_decode(maker: Maker, page_size: int, off: str | None) -> tuple[DecodeChoice, list[Decision]]:
    """A launch for each batch bucket."""
    if off:
        fixed = _merge(pal_off.decode_attention(maker.model.num_kv_heads, maker.times.rates.num_multiprocessors))
        context = contexts_of(maker.model)[0]
        calls = (
            step_cost.decode_attention_call(maker.model, page_size, each, each.max_batch, context) for each in fixed
        )
        if any(maker.times.seconds(call) == float("inf") for call in calls):
            raise PlanError(no_launch(maker, "decode"))
        subjects = (("decode-attention", _words(fixed)), ("burst", "no"))
        return DecodeChoice(fixed, burst=False), [Decision(subject, chosen, off) for subject, chosen in subjects]
    batches = [batch for batch in DECODE_BATCHES if batch < 2 * maker.max_num_seqs]
    lists = {batch: _judged(maker, page_size, batch) for batch in batches}
    if not all(lists.values()):
        raise PlanError(no_launch(maker, "decode"))
    even = [lists[batch][0] for batch in batches]
    burst, burst_decision = _choose_burst(maker, page_size, lists)
    buckets = [burst.get(option.max_batch, option) for option, _ in even]
    merged = _merge(buckets)
    first = lists[batches[0]]
    reason = (
        f"the shortest of {len(first)} launches a batch size over contexts of {_list(contexts_of(maker.model))} tokens"
    )
    candidates = tuple(
        Candidate(_word(option), seconds, "" if option == first[0][0] else f"{seconds / first[0][1] - 1:+.1%} alone")
        for option, seconds in first
    )
    decision = Decision(
        "decode-attention", _words(merged), f"{reason}, {_source(maker, page_size, buckets)}",
        profile_inputs(maker.profile, *INPUTS), candidates, first[0][1], unit="s",
    )  # fmt: skip
    return DecodeChoice(merged, bool(burst)), [decision, burst_decision]


def fit_to_graphs(
    choice: DecodeChoice, graphs: Sequence[int], decisions: Sequence[Decision]
) -> tuple[DecodeChoice, list[Decision]]:
    """Only launches that a graph has, each up to the sizes of its graphs: a sequence is then computed in the same way in a
    graph and beside prompts, and every launch is compiled before the first request.
    """
    kept = _merge([replace(decode_for(choice.attention, size), max_batch=size) for size in graphs])
    told = [
        replace(decision, chosen=_words(kept)) if decision.subject == "decode-attention" else decision
        for decision in decisions
    ]
    return replace(choice, attention=kept), told


def shared_bytes(model: ModelConfig, choice: DecodeChoice, prefill: PrefillForms, page_size: int, capability: tuple[int, int]) -> int:  # fmt: skip
    """Shared memory of the largest block that the plan launches."""
    group = model.num_heads // model.num_kv_heads
    decode = (
        decode_resources(DecodeLaunch(one.block_n, one.num_warps, one.num_stages), group, model.head_dim, page_size)
        for one in choice.attention
    )
    prompts = (prefill_resources(launch_of(one), model.head_dim, page_size, capability) for one in prefill.all)
    return max(one.shared_bytes for one in (*prompts, *decode))


def prefill_word(option: PrefillAttention) -> str:
    """Short, for a decision."""
    tma = "-tma" if option.tma else ""
    return f"m{option.block_m}-n{option.block_n}-w{option.num_warps}-g{option.num_stages}{tma}"


def launch_of(option: PrefillAttention) -> PrefillLaunch:
    """What of it makes a binary."""
    return PrefillLaunch(option.block_m, option.block_n, option.num_warps, option.num_stages, option.tma)


def _judged(maker: Maker, page_size: int, batch: int) -> list[tuple[DecodeAttention, float]]:
    """The shortlist with mean seconds over the contexts, best first: only those that were timed, where any was."""
    contexts = contexts_of(maker.model)
    options = decode_shortlist(maker.times, maker.model, page_size, batch)
    calls = {
        option: [step_cost.decode_attention_call(maker.model, page_size, option, batch, c) for c in contexts]
        for option in options
    }
    timed = {
        option: [
            context for context, call in zip(contexts, each, strict=True) if maker.times.measured(call) is not None
        ]
        for option, each in calls.items()
    }
    most = max((len(found) for found in timed.values()), default=0)
    if most:
        options = [option for option in options if len(timed[option]) == most]
    seconds = {option: [maker.times.seconds(call) for call in calls[option]] for option in options}
    shortest = [min(column) for column in zip(*seconds.values(), strict=True)]
    ranked = sorted(options, key=lambda one: sum(s / t for s, t in zip(seconds[one], shortest, strict=True)))
    return [(option, sum(seconds[option]) / len(contexts)) for option in ranked]


def _choose_burst(
    maker: Maker, page_size: int, lists: dict[int, list[tuple[DecodeAttention, float]]]
) -> tuple[dict[int, DecodeAttention], Decision]:
    """Whether few sequences get more, smaller blocks, so that one long one among them is not read by a few programs only.

    Weighed by how often a long one is there, where the launch and merge of more parts costs usual steps next to nothing.
    """
    model = maker.model
    longest = min(_LONG_TOKENS, model.max_context_tokens)
    usual = contexts_of(model)[min(1, len(contexts_of(model)) - 1)]
    chosen: dict[int, DecodeAttention] = {}
    plain_seconds = burst_seconds = 0.0
    for batch in (size for size in lists if size <= _FEW_SEQS):
        plain = lists[batch][0][0]
        allowed = _MAX_USUAL_COST * step_cost.decode_step_seconds(
            maker.times, model, page_size, plain, batch, usual, batch
        )
        more = (replace(plain, num_splits=splits) for splits in DECODE_SPLITS if splits > plain.num_splits)
        if _is_timed(maker, page_size, plain, usual):
            # What more parts cost is known: a prediction is no ground to leave the launch that was measured best.
            more = (one for one in more if _is_timed(maker, page_size, one, usual))
        options = [plain, *(one for one in more if _extra_seconds(maker, page_size, one, plain, usual) <= allowed)]
        costs = [_mixed_seconds(maker, page_size, option, batch, usual, longest) for option in options]
        best = min(range(len(options)), key=lambda index: costs[index])
        plain_seconds += costs[0]
        burst_seconds += costs[best]
        if best:
            chosen[batch] = options[best]
    what = (
        f"1 to {_FEW_SEQS} sequences of {usual} tokens, one of them {longest} long at one step in {1 / _LONG_SHARE:.0f}"
    )
    candidates = (
        Candidate("no", plain_seconds, "the long sequence ends last" if chosen else ""),
        Candidate("yes", burst_seconds, "" if chosen else "more parts cost usual steps too much, or gain nothing"),
    )
    reason = (
        f"{what}: more parts {'win' if chosen else 'do not win'} within {_MAX_USUAL_COST:.0%} of a usual step for their "
        "launch and merge"
    )
    return chosen, Decision(
        "burst", "yes" if chosen else "no", reason,
        profile_inputs(maker.profile, "scheduling.phase", "compute.multiprocessors", "memory.read_bandwidth"),
        candidates, burst_seconds if chosen else plain_seconds, unit="s",
    )  # fmt: skip


def _is_timed(maker: Maker, page_size: int, option: DecodeAttention, context: int) -> bool:
    call = step_cost.decode_attention_call(maker.model, page_size, option, option.max_batch, context)
    return maker.times.measured(call) is not None


def _extra_seconds(
    maker: Maker, page_size: int, option: DecodeAttention, plain: DecodeAttention, context: int
) -> float:
    """By how much `option` makes a step of sequences alike longer."""
    batch = plain.max_batch
    longer, usual = (
        maker.times.seconds(step_cost.decode_attention_call(maker.model, page_size, one, batch, context))
        for one in (option, plain)
    )
    return maker.model.num_layers * (longer - usual)


def _mixed_seconds(
    maker: Maker, page_size: int, option: DecodeAttention, batch: int, usual: int, longest: int
) -> float:
    model, rates = maker.model, maker.times.rates
    shape = AttentionShape(model.num_heads, model.num_kv_heads, model.head_dim, page_size)
    launch = DecodeLaunch(option.block_n, option.num_warps, option.num_stages)
    call = step_cost.decode_attention_call(model, page_size, option, batch, usual)
    corrected = maker.times.ratio(call)
    long_one = long_decode_seconds(rates, shape, launch, option.num_splits, batch, usual, longest)
    return (1 - _LONG_SHARE) * maker.times.seconds(call) + _LONG_SHARE * corrected * long_one


def choose_reduction(
    maker: Maker, page_size: int, alone: DecodeAttention, off: str | None
) -> tuple[Reduction, Decision]:
    """Where the parts of one context meet: in L2 after several blocks, or in the shared memory of one block. `alone` is
    how one sequence runs.
    """
    if off:
        return "l2", Decision("reduction", "l2", off)
    model = maker.model
    context = contexts_of(model)[min(1, len(contexts_of(model)) - 1)]
    seconds = {
        splits: maker.times.seconds(
            step_cost.decode_attention_call(model, page_size, replace(alone, num_splits=splits), 1, context)
        )
        for splits in dict.fromkeys((1, max(alone.num_splits, 2)))
    }
    one, several = seconds.values()
    chosen: Reduction = "l2" if alone.num_splits > 1 else "shared"
    candidates = (
        Candidate("shared", one, "" if chosen == "shared" else "one block a KV head leaves multiprocessors idle"),
        Candidate("l2", several, "" if chosen == "l2" else "the merge costs more than the parts gain"),
    )
    reason = f"follows from the splits of one sequence ({alone.num_splits}), compared at {context} tokens"
    inputs = profile_inputs(maker.profile, "memory.l2_size", "memory.l2_bandwidth", "scheduling.phase")
    return chosen, Decision("reduction", chosen, reason, inputs, candidates, min(one, several), unit="s")


def _page_cost(maker: Maker, page_size: int) -> float:
    """Mean seconds of a step over the batches: attention, the rest of the step, the host's work for new pages; times
    the memory that half a page a sequence takes away, as far as memory is short.
    """
    model, times = maker.model, maker.times
    context = contexts_of(model)[min(1, len(contexts_of(model)) - 1)]
    seconds = []
    for batch in page_batches(maker.max_num_seqs):
        options = decode_shortlist(times, model, page_size, batch)
        if not options:
            return float("inf")
        calls = [step_cost.decode_attention_call(model, page_size, option, batch, context) for option in options]
        timed = [found for call in calls if (found := times.measured(call)) is not None]
        attention = min(timed or [times.seconds(call) for call in calls])
        rest = step_cost.padded_seconds(times, model, batch)
        host = batch / page_size * times.rates.python_launch_seconds  # a page is taken, named and written to a table
        seconds.append(model.num_layers * attention + rest + host)
    wasted = page_size / 2 / PROMPT_TOKENS * min(maker.kv_demand, 1.0)
    return sum(seconds) / len(seconds) * (1 + wasted)


def _page_reason(cost: float, best: float) -> str:
    return "no launch fits the device" if cost == float("inf") else f"{cost / best - 1:+.1%} a step"


def _merge(buckets: Sequence[DecodeAttention]) -> tuple[DecodeAttention, ...]:
    """Neighbours with the same launch become one bucket."""
    kept: list[DecodeAttention] = []
    for bucket in buckets:
        if kept and replace(kept[-1], max_batch=bucket.max_batch) == bucket:
            kept.pop()
        kept.append(bucket)
    return tuple(kept)


def _source(maker: Maker, page_size: int, buckets: Sequence[DecodeAttention]) -> str:
    contexts = contexts_of(maker.model)
    calls = (
        step_cost.decode_attention_call(maker.model, page_size, bucket, bucket.max_batch, context)
        for bucket, context in itertools.product(buckets, contexts)
    )
    timed = sum(maker.times.measured(call) is not None for call in calls)
    total = len(buckets) * len(contexts)
    return (
        f"{timed} of {total} times measured on the device" if timed else "predicted from bytes under way and occupancy"
    )


def no_launch(maker: Maker, kind: str) -> str:
    """Why there is no plan, and what to do."""
    rates = maker.times.rates
    return (
        f"no launch of {kind} attention for head size {maker.model.head_dim} fits the profile {maker.profile.name}: "
        f"a block may use {rates.shared_per_block} bytes of shared memory (memory.shared_per_block) and a multiprocessor "
        f"{rates.shared_per_multiprocessor}; use --device cpu, or another profile"
    )


def _word(option: DecodeAttention) -> str:
    return f"s{option.num_splits}-n{option.block_n}-w{option.num_warps}-g{option.num_stages}"


def _words(buckets: Sequence[DecodeAttention]) -> str:
    return ", ".join(f"to {bucket.max_batch}: {_word(bucket)}" for bucket in buckets)


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(f"{number:,}" for number in numbers)
