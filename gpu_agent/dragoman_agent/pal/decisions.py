"""Every decision with its inputs, candidates, choice, reason and prediction; later with what was measured."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio


@dataclass(frozen=True, slots=True)
class Input:
    """What a decision was made from."""

    name: str
    value: str
    provenance: str


@dataclass(frozen=True, slots=True)
class Candidate:
    """What could have been chosen; `rejected_because` is empty for the choice."""

    name: str
    predicted: float | None = None
    rejected_because: str = ""


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision. `predicted` and `measured` are in `unit`."""

    subject: str
    chosen: str
    reason: str
    inputs: tuple[Input, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    predicted: float | None = None
    measured: float | None = None
    unit: str = ""
    decision_id: str = ""
    unix_time: float = 0.0


class DecisionLog:
    """The bounded ring of decisions; the one owner of their ids. Not thread-safe: used from one event loop.

    The newest decision on each subject outlives the ring: what is in force can be explained however much came after it.
    """

    def __init__(self, capacity: int = 4096) -> None:
        if capacity < 1:
            raise ValueError(f"a log of {capacity} decisions holds none; 1 or more was expected")
        self._capacity = capacity
        self._ring: deque[Decision] = deque()
        self._outlived: dict[str, Decision] = {}  # by subject: in force, and pushed out of the ring
        self._serial = itertools.count(1)
        self._watchers: set[asyncio.Queue[Decision]] = set()

    def record(self, decision: Decision) -> Decision:
        """Number, date and keep a decision; returns it as kept."""
        kept = dataclasses.replace(
            decision, decision_id=f"{decision.subject}-{next(self._serial)}", unix_time=time.time()
        )
        self._append(kept)
        return kept

    def measured(self, subject: str, value: float) -> Decision | None:
        """Add what happened to the newest decision on `subject`; None when there is none."""
        for index in range(len(self._ring) - 1, -1, -1):
            if self._ring[index].subject == subject:
                self._ring[index] = dataclasses.replace(self._ring[index], measured=value)
                self._tell(self._ring[index])
                return self._ring[index]
        if subject not in self._outlived:
            return None
        self._outlived[subject] = dataclasses.replace(self._outlived[subject], measured=value)
        self._tell(self._outlived[subject])
        return self._outlived[subject]

    def all(self) -> list[Decision]:
        """The decisions held, oldest first."""
        return [*self._outlived.values(), *self._ring]

    async def watch(self) -> AsyncIterator[Decision]:
        """The decisions held, then each new or completed one. A watcher that falls 1,024 behind loses the oldest."""
        import asyncio  # here, for the engine process needs none of it

        queue: asyncio.Queue[Decision] = asyncio.Queue(maxsize=1024)
        held = self.all()
        self._watchers.add(queue)
        try:
            for decision in held:
                yield decision
            while True:
                yield await queue.get()
        finally:
            self._watchers.discard(queue)

    def _append(self, decision: Decision) -> None:
        self._ring.append(decision)
        self._outlived.pop(decision.subject, None)
        if len(self._ring) > self._capacity:
            oldest = self._ring.popleft()
            if all(entry.subject != oldest.subject for entry in self._ring):
                self._outlived[oldest.subject] = oldest
        self._tell(decision)

    def _tell(self, decision: Decision) -> None:
        for queue in self._watchers:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(decision)
