"""Which decode batches have their contexts cut by a work list of the step: those that were timed to gain. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence

from dragoman_agent.model.config import ModelConfig
from dragoman_agent.pal.decisions import Candidate, Decision
from dragoman_agent.pal.limits import profile_inputs
from dragoman_agent.pal.list_timing import (
    EVEN,
    LAYOUTS,
    LONG,
    MIN_LIST_BATCH,
    MIN_TILES,
    NO_LIST,
    SPREAD,
    ListTimes,
    list_batches,
    list_times,
    list_tokens,
)
from dragoman_agent.pal.plan import DecodeAttention, DecodeList, ShortGroups, groups_for
from dragoman_agent.pal.profile import Profile
from dragoman_agent.pal.timings import Timings

SUBJECT = "decode-work-list"
MAX_EVEN_COST = 0.01  # of a step whose contexts are alike, where a list can gain nothing
MIN_GAIN = 0.02  # of the attention of uneven steps, mean of both kinds
_NOT_TIMED = "not timed on this device, which --tune now does; each context is cut into a fixed number of parts"
_GROUPED = "short sequences share programs there"
_LAYOUT_WORDS = {EVEN: "alike", LONG: "one long", SPREAD: "spread"}


def choose_lists(
    profile: Profile,
    model: ModelConfig,
    page_size: int,
    attention: Sequence[DecodeAttention],
    max_num_seqs: int,
    groups: Sequence[ShortGroups],
    timings: Timings | None,
    step_seconds: Callable[[int, int], float],
    off: str | None,
) -> tuple[tuple[DecodeList, ...], Decision]:
    """Batches with the number of items that gained most, and why; none where nothing gains, was timed, or where `groups` are.

    A launch cuts each context into as many parts, so that a step lasts as long as its longest context; items of a list are of
    about equal length, whichever context they are of. `step_seconds` of a decode step of so many sequences and tokens of each.
    """
    if off:
        return (), Decision(SUBJECT, "none", off)
    inputs = profile_inputs(profile, "compute.multiprocessors", "scheduling.phase")
    timed = {one.batch: one for one in list_times(timings, model, page_size, attention, max_num_seqs, step_seconds)}
    tokens = list_tokens(model)
    if tokens is None or not timed:
        return (), Decision(SUBJECT, "none", _nothing_timed(model, max_num_seqs), inputs)
    lists: list[DecodeList] = []
    told: list[str] = []
    candidates: list[Candidate] = []
    predicted = None
    ranges = [(first, batch) for first, batch in list_batches(max_num_seqs) if batch in timed]
    for first, batch in ranges:
        times, apart = timed[batch], _apart(groups, first, batch)
        items, problem = _best(times)
        if apart is None:
            problem = _GROUPED
        elif not problem:
            lists.append(DecodeList(*apart, items, MIN_TILES))
            predicted = predicted or times.by_layout[LONG][items]
        told.append(_told(times, items, problem))
        candidates += _candidates(times, items, problem)
    usual, longest = tokens
    reason = (
        f"attention of a layer, contexts of {usual} tokens alike, one of them {longest} long, or spread, timed: "
        f"{'; '.join(told)}{_left_out(ranges, max_num_seqs)}"
    )
    chosen = ", ".join(f"{one.num_items} items from {one.min_batch} to {one.max_batch} sequences" for one in lists)
    return tuple(lists), Decision(
        SUBJECT, chosen or "none", reason, inputs, tuple(candidates), predicted, unit="s"
    )  # fmt: skip


def _nothing_timed(model: ModelConfig, max_num_seqs: int) -> str:
    """Why there are no times."""
    if max_num_seqs < MIN_LIST_BATCH:
        return f"at most {max_num_seqs} sequences run at once; fewer than {MIN_LIST_BATCH} are cut into more parts each"
    if list_tokens(model) is None:
        return f"contexts of {model.max_context_tokens} tokens at most differ too little for one to hold the others up"
    return _NOT_TIMED


def _apart(groups: Sequence[ShortGroups], first: int, batch: int) -> tuple[int, int] | None:
    """The range up to `batch` without what groups have of it; None where they have the batch that was timed."""
    if groups_for(groups, batch) is not None:
        return None
    below = [one.max_batch for one in groups if first <= one.max_batch < batch]
    return max(first, *(last + 1 for last in below), 0), batch


def _gain(times: ListTimes, items: int) -> float:
    """Share of the time of uneven steps that a list of `items` saves, mean of both kinds."""
    uneven = (times.by_layout[layout] for layout in (LONG, SPREAD))
    return statistics.fmean(1 - seconds[items] / seconds[NO_LIST] for seconds in uneven)


def _problem(times: ListTimes, items: int) -> str:
    """Why a list of `items` is not used; empty where it may be."""
    if _gain(times, items) < MIN_GAIN:
        return f"under the {MIN_GAIN:.0%} that count"
    even = times.by_layout[EVEN]
    cost = (even[items] - even[NO_LIST]) / times.layer_seconds
    if cost > MAX_EVEN_COST:
        return f"but a step of contexts alike takes {cost:.1%} longer, and {MAX_EVEN_COST:.0%} is allowed"
    return ""


def _best(times: ListTimes) -> tuple[int, str]:
    """The number of items that gains most of those that may be used; else that which comes nearest, and why it is not used."""
    allowed = [items for items in times.items if not _problem(times, items)]
    if allowed:
        return max(allowed, key=lambda each: (_gain(times, each), -each)), ""
    gaining = [items for items in times.items if _gain(times, items) >= MIN_GAIN]
    if gaining:
        items = min(gaining, key=lambda each: times.by_layout[EVEN][each])
    else:
        items = max(times.items, key=lambda each: (_gain(times, each), -each))
    return items, _problem(times, items)


def _told(times: ListTimes, items: int, problem: str) -> str:
    pairs = ", ".join(
        f"{_LAYOUT_WORDS[layout]} {1e6 * times.by_layout[layout][items]:.1f} us by a list and "
        f"{1e6 * times.by_layout[layout][NO_LIST]:.1f} without"
        for layout in LAYOUTS
    )
    why = f" ({problem})" if problem else ""
    return f"at {times.batch} with {items} items {pairs}, {_gain(times, items):+.1%} where contexts differ{why}"


def _candidates(times: ListTimes, items: int, problem: str) -> Iterator[Candidate]:
    """Without a list, then each number of items, with the mean seconds of all layouts."""
    chosen = NO_LIST if problem else items
    mean = {
        count: statistics.fmean(times.by_layout[layout][count] for layout in LAYOUTS)
        for count in (NO_LIST, *times.items)
    }
    for count, seconds in mean.items():
        name = f"{f'{count} items' if count else 'no list'} at {times.batch}"
        own = _GROUPED if problem == _GROUPED else _problem(times, count) if count else ""
        why = f"{seconds / mean[chosen] - 1:+.1%}{f' ({own})' if own else ''}"
        yield Candidate(name, seconds, "" if count == chosen else why)


def _left_out(ranges: Sequence[tuple[int, int]], max_num_seqs: int) -> str:
    """Batches of the buckets that were not timed, so as not to time too many or because it failed."""
    lasts = [list_batches(max_num_seqs)[0][0] - 1, *(batch for _, batch in ranges)]
    firsts = [*(first for first, _ in ranges), max_num_seqs + 1]
    gaps = [f"{last + 1} to {first - 1}" for last, first in zip(lasts, firsts, strict=True) if last + 1 < first]
    return f"; not timed and without a list: {', '.join(gaps)} sequences" if gaps else ""
