"""What must hold after every fault."""

from __future__ import annotations

import statistics

from benchmarks.cell import Cell
from benchmarks.streams import Stream

MAX_GROWTH = 0.05
# A descriptor or two may be a metrics scrape under way. The allocator keeps and returns some 20 MiB from one round to the
# next with no trend over eight rounds; a slow leak is what `make soak` looks for.
FREE_DESCRIPTORS = 4
FREE_BYTES = 24 << 20


def check_streams(streams: list[Stream], expected: dict[str, list[int]]) -> None:
    """Each stream ended once and holds exactly the tokens of the undisturbed run."""
    for stream in streams:
        assert not stream.error, (stream.prompt, stream.error)
        assert stream.ends == 1, (stream.prompt, stream.ends)
        assert stream.num_gaps == 0, stream.prompt
        assert stream.token_ids == expected[stream.prompt], (stream.prompt, len(stream.token_ids))


def check_footprint(before: dict[int, tuple[str, int, int]], after: dict[int, tuple[str, int, int]]) -> None:
    """Descriptors and memory of the processes that lived through it are within 5 %."""
    for pid in before.keys() & after.keys():
        name, fds, rss = before[pid]
        _, fds_now, rss_now = after[pid]
        assert fds_now <= fds * (1 + MAX_GROWTH) + FREE_DESCRIPTORS, (name, fds, fds_now)
        assert rss_now <= rss * (1 + MAX_GROWTH) + FREE_BYTES, (name, rss, rss_now)


def num_lost(streams: list[Stream], expected: dict[str, list[int]]) -> int:
    """Streams that failed or lack tokens at their end."""
    return sum(bool(stream.error) or len(stream.token_ids) < len(expected[stream.prompt]) for stream in streams)


def num_duplicated(streams: list[Stream], expected: dict[str, list[int]]) -> int:
    """Streams with more tokens than there are, or a cursor that came twice."""
    return sum(stream.num_gaps > 0 or len(stream.token_ids) > len(expected[stream.prompt]) for stream in streams)


def stalls(streams: list[Stream]) -> dict[str, float]:
    """Median and 99th percentile of the longest wait of each stream."""
    waits = sorted(stream.stall() for stream in streams)
    return {"stall_p50": statistics.median(waits), "stall_p99": waits[min(len(waits) - 1, int(0.99 * len(waits)))]}


def settle(cell: Cell, before: dict[int, tuple[str, int, int]]) -> None:
    """Nothing is left over, and the processes have not grown."""
    cell.quiesce()
    check_footprint(before, cell.footprint())
