"""Sequences that let others go first while blocks of a lower tier come for them. Pure but for the tiers that it asks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from dragoman_agent.cache.hashing import Pages
from dragoman_agent.engine.queue import WaitingQueue
from dragoman_agent.engine.request import Sequence, Status

MAX_NUM_WAITS = 2  # of a sequence: what went again meanwhile is computed


class LowerTiers(Protocol):
    """What lies below the pool's blocks; see tiers.py."""

    def bring(self, pages: Pages, cached: list[int], num_tail_tokens: int, waiter: Callable[[float], None]) -> bool:
        """Whether blocks that continue `cached` are on their way; `waiter` then hears when to go on."""

    def forget(self, digest: bytes) -> None:
        """Drop a block and all that continue it."""

    @property
    def held_blocks(self) -> set[int]:
        """Blocks of the pool that are being copied or filled, and those they continue."""


class TierWaits:
    """Moves sequences between the queue and the set of the blocked ones, both of which are the scheduler's."""

    def __init__(self, tiers: LowerTiers, waiting: WaitingQueue, blocked: set[Sequence], page_size: int) -> None:
        self.tiers = tiers
        self._waiting = waiting
        self._blocked = blocked
        self._page_size = page_size

    def begin(self, sequence: Sequence, pages: Pages, cached: list[int]) -> bool:
        """Whether `sequence`, next in line, now waits for blocks that continue `cached`, those of the first of `pages`."""
        if sequence.num_waits >= MAX_NUM_WAITS:
            return False
        if not self._bring(sequence, pages, cached, partial(self._came, sequence)):
            return False
        sequence.num_waits += 1
        self._waiting.remove(sequence)
        sequence.move_to(Status.BLOCKED)
        self._blocked.add(sequence)
        return True

    def look_ahead(self, sequence: Sequence, pages: Pages, cached: list[int]) -> None:
        """Let its blocks come while it waits for something else."""
        self._bring(sequence, pages, cached, lambda now: None)

    def forget(self, sequence: Sequence) -> None:
        """Drop every block of a sequence from the tiers: its contents are not to be trusted."""
        if sequence.hasher.pages:
            self.tiers.forget(sequence.hasher.pages[0].digest)

    def _bring(self, sequence: Sequence, pages: Pages, cached: list[int], waiter: Callable[[float], None]) -> bool:
        num_tail = len(sequence.token_ids) - len(pages) * self._page_size
        return self.tiers.bring(pages, cached, num_tail, waiter)

    def _came(self, sequence: Sequence, now: float) -> None:
        """What a sequence waited for is there, or will not come: it starts from what is cached."""
        if sequence in self._blocked:
            self._blocked.discard(sequence)
            sequence.move_to(Status.WAITING)
            self._waiting.push(sequence, now)
