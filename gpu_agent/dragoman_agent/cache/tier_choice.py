"""Whether KV blocks are brought back from a lower tier or computed again. Pure, but for the rates that it learns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

TierName = Literal["host", "disk"]

_NEWEST_WEIGHT = 0.3
MEMORY_SECONDS = 60.0  # a rate that was not seen for so long is tried again: it may have been a busy moment's


@dataclass(frozen=True, slots=True)
class TierSizes:
    """How large the tiers are; 0 is none."""

    host_bytes: int = 0
    disk_bytes: int = 0
    disk_dir: str = ""
    link_rate: float = 0.0  # bytes/s from host to device, as planned with; 0 is not known

    @property
    def has_any(self) -> bool:
        """Whether there is a tier below the device."""
        return self.host_bytes > 0 or (self.disk_bytes > 0 and bool(self.disk_dir))


@dataclass(slots=True)
class TierRate:
    """Bytes a second from a tier to the device: planned, then as measured, the newest weighing most. 0 is not known."""

    planned: float = 0.0
    measured: float = 0.0
    seen: float = 0.0  # when it was measured last

    def learn(self, num_bytes: int, seconds: float, now: float) -> None:
        """Some blocks came in `seconds`."""
        if num_bytes <= 0 or seconds <= 0:
            return
        rate = num_bytes / seconds
        self.measured += (_NEWEST_WEIGHT if self.measured else 1.0) * (rate - self.measured)
        self.seen = now

    def at(self, now: float) -> float:
        """The rate to count with."""
        return self.measured if self.measured and now - self.seen < MEMORY_SECONDS else self.planned


def num_worth_bringing(
    tiers: Sequence[TierName],
    rates: Mapping[TierName, float],
    block_bytes: int,
    block_tokens: int,
    num_tail_tokens: int,
    prefill_seconds: Callable[[float], float],
) -> int:
    """Of blocks that continue a prefix, `tiers` saying where each lies: how many from the first on are brought back.

    The number that saves the most time, of those at which the tier changes: each brought block takes its bytes / rate, what is
    left is computed with the `num_tail_tokens` behind it. A rate in bytes/s that is not known (0) is tried. 0 where computing all
    of them is quicker.
    """
    total = prefill_seconds(len(tiers) * block_tokens + num_tail_tokens)
    best, best_saved, moved = 0, 0.0, 0.0
    for index, tier in enumerate(tiers):
        rate = rates[tier]
        moved += block_bytes / rate if rate > 0 else 0.0
        if index + 1 < len(tiers) and tiers[index + 1] == tier:
            continue
        num_left = (len(tiers) - index - 1) * block_tokens + num_tail_tokens
        saved = total - prefill_seconds(num_left) - moved
        if saved > best_saved:
            best, best_saved = index + 1, saved
    return best
