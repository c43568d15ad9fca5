"""Which decode batches run the attention kernel in which short sequences can share a program: those that were timed to gain. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from dragoman_agent.model.config import ModelConfig
from dragoman_agent.pal.decisions import Candidate, Decision
from dragoman_agent.pal.group_timing import MIN_GROUP_BATCH, GroupTimes, group_times
from dragoman_agent.pal.limits import profile_inputs
from dragoman_agent.pal.plan import DecodeAttention, ShortGroups, decode_for
from dragoman_agent.pal.profile import Profile
from dragoman_agent.pal.timings import Timings

SUBJECT = "attention-grouping"
MIN_GAIN = 0.02  # of the attention of a batch, over the kernel without groups
MAX_IDLE_COST = 0.01  # what the kernel that groups may cost while each sequence has a program of its own
_NOT_TIMED = "not timed on this device, which --tune now does; each sequence has a program of its own"


def choose_grouping(
    profile: Profile,
    model: ModelConfig,
    page_size: int,
    attention: Sequence[DecodeAttention],
    max_num_seqs: int,
    timings: Timings | None,
    off: str | None,
) -> tuple[tuple[ShortGroups, ...], Decision]:
    """Batches with as many sequences a program as was quickest, and why; none where nothing gains or was timed.

    Such a batch runs another binary, whose groups a word on the device sets: until something asks for more, each sequence
    has a program of its own there too, which must not be slower.
    """
    if off:
        return (), Decision(SUBJECT, "none", off)
    inputs = profile_inputs(profile, "compute.multiprocessors", "scheduling.phase")
    if max_num_seqs < MIN_GROUP_BATCH:
        reason = f"at most {max_num_seqs} sequences run at once; fewer than {MIN_GROUP_BATCH} do not fill a device"
        return (), Decision(SUBJECT, "none", reason, inputs)
    timed = group_times(timings, model, page_size, attention, max_num_seqs)
    if not timed:
        return (), Decision(SUBJECT, "none", _NOT_TIMED, inputs)
    ends = [*(times.batch - 1 for times in timed[1:]), max_num_seqs]
    groups: list[ShortGroups] = []
    told: list[str] = []
    candidates: list[Candidate] = []
    for times, end in zip(timed, ends, strict=True):
        rows, problem = _quickest(times)
        if not problem:
            last = min(end, decode_for(attention, times.batch).max_batch)
            groups.append(
                ShortGroups(times.batch, last, rows, times.context_tokens, times.ungrouped, times.by_rows[rows])
            )
        told.append(_told(times, rows, problem))
        candidates += _candidates(times, rows, problem)
    chosen = ", ".join(f"{one.rows} a program from {one.min_batch} to {one.max_batch} sequences" for one in groups)
    reason = f"attention of a layer, sequences of {timed[0].context_tokens} tokens, timed: {'; '.join(told)}"
    if groups:
        reason += "; used once compute saturation asks for it and while sequences are as short"
    predicted = groups[0].grouped_seconds if groups else None
    return tuple(groups), Decision(
        SUBJECT, chosen or "none", reason, inputs, tuple(candidates), predicted, unit="s"
    )  # fmt: skip


def _quickest(times: GroupTimes) -> tuple[int, str]:
    """The number of rows that was quickest, and why it is not used: empty where it is."""
    several = {rows: seconds for rows, seconds in times.by_rows.items() if rows > 1}
    if not several:
        return 1, "no groups could be timed"
    rows = min(several, key=lambda each: (several[each], each))
    if several[rows] > (1 - MIN_GAIN) * times.ungrouped:
        return rows, f"under the {MIN_GAIN:.0%} that count"
    if times.by_rows[1] > (1 + MAX_IDLE_COST) * times.ungrouped:
        cost = times.by_rows[1] / times.ungrouped - 1
        return rows, f"but without groups that kernel takes {cost:.1%} longer, and {MAX_IDLE_COST:.0%} is allowed"
    return rows, ""


def _told(times: GroupTimes, rows: int, problem: str) -> str:
    if rows == 1:
        return f"at {times.batch} {problem}"
    gain = 1 - times.by_rows[rows] / times.ungrouped
    seconds = (
        f"{1e6 * times.by_rows[rows]:.1f} us where {rows} share a program, {1e6 * times.ungrouped:.1f} where none do"
    )
    return f"at {times.batch} {seconds}, {gain:+.1%}{f' ({problem})' if problem else ''}"


def _candidates(times: GroupTimes, rows: int, problem: str) -> list[Candidate]:
    """Without groups, then each number of rows."""
    best = times.ungrouped if problem else times.by_rows[rows]

    def entry(name: str, seconds: float, *, is_chosen: bool) -> Candidate:
        return Candidate(f"{name} at {times.batch}", seconds, "" if is_chosen else f"{seconds / best - 1:+.1%}")

    plain = entry("no groups", times.ungrouped, is_chosen=bool(problem))
    grouped = [
        entry(f"{count} a program", seconds, is_chosen=not problem and count == rows)
        for count, seconds in times.by_rows.items()
    ]
    return [plain, *grouped]
