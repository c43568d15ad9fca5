"""The waiting requests of one model: by class, within a class deficit round robin over tenants. Pure.

Deficit round robin (Shreedhar and Varghese, 1995) charged in uncached prompt tokens: over any time two tenants that
always wait differ by at most about one quantum and one request, whatever the sizes of their requests.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from dragoman_controller.requests import Priority

QUANTUM_TOKENS = 2048
# A waiting class is passed over at most this often in a row.
MAX_NUM_BYPASSES = 8

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Entry(Generic[T]):
    """One waiting request; `cost` in uncached tokens."""

    item: T
    priority: Priority
    tenant: str
    cost: int
    removed: bool = False


@dataclass(slots=True)
class _Tenant(Generic[T]):
    name: str
    share: int
    entries: deque[Entry[T]] = field(default_factory=deque)
    deficit: float = 0.0
    topped_up: bool = False

    def purge(self) -> None:
        while self.entries and self.entries[0].removed:
            self.entries.popleft()


class _ClassQueue(Generic[T]):
    """The tenants of one class in turn."""

    def __init__(self) -> None:
        self.tenants: dict[str, _Tenant[T]] = {}
        self.turns: deque[_Tenant[T]] = deque()
        self.num_bypasses = 0

    def push(self, entry: Entry[T], share: int) -> None:
        tenant = self.tenants.get(entry.tenant)
        if tenant is None:
            tenant = self.tenants[entry.tenant] = _Tenant(entry.tenant, share)
            self.turns.append(tenant)
        tenant.share = share
        tenant.entries.append(entry)

    def select(self, blocked: Container[str]) -> Entry[T] | None:
        """The next entry, left in place; `blocked` tenants are passed over without losing their turn's credit."""
        self._drop_empty()
        able = [tenant for tenant in self.turns if tenant.name not in blocked]
        if not able:
            return None
        while True:
            for tenant in list(able):
                if not tenant.topped_up:
                    tenant.deficit += QUANTUM_TOKENS * tenant.share
                    tenant.topped_up = True
                if tenant.deficit >= tenant.entries[0].cost:
                    return tenant.entries[0]
                tenant.topped_up = False
                self._to_the_end(tenant)
            self._skip_rounds(able)

    def take(self, entry: Entry[T]) -> None:
        """Removes a selected entry and charges its tenant."""
        tenant = self.tenants[entry.tenant]
        tenant.entries.remove(entry)
        tenant.deficit -= entry.cost
        tenant.purge()
        if not tenant.entries:
            self._drop_empty()

    def _to_the_end(self, tenant: _Tenant[T]) -> None:
        self.turns.remove(tenant)
        self.turns.append(tenant)

    def _skip_rounds(self, able: list[_Tenant[T]]) -> None:
        """A request of many quanta would take as many rounds: give all but the last of them at once."""
        rounds = min(
            math.ceil((tenant.entries[0].cost - tenant.deficit) / (QUANTUM_TOKENS * tenant.share)) for tenant in able
        )
        for tenant in able:
            tenant.deficit += max(rounds - 1, 0) * QUANTUM_TOKENS * tenant.share

    def _drop_empty(self) -> None:
        for tenant in list(self.turns):
            tenant.purge()
            if not tenant.entries:
                self.turns.remove(tenant)
                del self.tenants[tenant.name]


class FairQueue(Generic[T]):
    """Waiting requests. A higher class goes first, but a lower one that waits is passed over at most 8 times in a row."""

    def __init__(self) -> None:
        self._classes: dict[Priority, _ClassQueue[T]] = {priority: _ClassQueue() for priority in Priority}
        self._num_waiting = dict.fromkeys(Priority, 0)

    def __len__(self) -> int:
        return sum(self._num_waiting.values())

    def num_waiting(self, priority: Priority) -> int:
        """Waiting requests of a class."""
        return self._num_waiting[priority]

    def push(self, item: T, priority: Priority, tenant: str, cost: int, share: int) -> Entry[T]:
        """Puts a request at the end of its tenant's line. `cost` >= 1, `share` >= 1."""
        queue = self._classes[priority]
        if not self._num_waiting[priority]:
            queue.num_bypasses = 0
        entry = Entry(item, priority, tenant, max(cost, 1))
        queue.push(entry, max(share, 1))
        self._num_waiting[priority] += 1
        return entry

    def remove(self, entry: Entry[T]) -> None:
        """Takes a request out, wherever it stands."""
        if not entry.removed:
            entry.removed = True
            self._num_waiting[entry.priority] -= 1

    def select(self, blocked: Container[tuple[Priority, str]]) -> Entry[T] | None:
        """The request to be served next, left in place. `blocked`: (class, tenant) that cannot be served now."""
        for priority in self._order():
            entry = self._classes[priority].select(_Blocked(priority, blocked))
            if entry is not None:
                return entry
        return None

    def take(self, entry: Entry[T]) -> None:
        """Removes a selected request and charges for it."""
        self._classes[entry.priority].take(entry)
        entry.removed = True
        self._num_waiting[entry.priority] -= 1
        for priority in Priority:
            if priority is entry.priority:
                self._classes[priority].num_bypasses = 0
            elif self._num_waiting[priority]:
                self._classes[priority].num_bypasses += 1

    def num_ahead(self, entry: Entry[T]) -> int:
        """Requests likely to be served before this one: higher classes, and in its class turn by turn."""
        ahead = sum(count for priority, count in self._num_waiting.items() if priority < entry.priority)
        tenants = self._classes[entry.priority].tenants
        own = tenants[entry.tenant]
        index = own.entries.index(entry)
        for tenant in tenants.values():
            waiting = len(tenant.entries)
            ahead += index if tenant is own else min(waiting, math.ceil((index + 1) * tenant.share / own.share))
        return ahead

    def _order(self) -> list[Priority]:
        waiting = [priority for priority in Priority if self._num_waiting[priority]]
        starved = [p for p in waiting if self._classes[p].num_bypasses >= MAX_NUM_BYPASSES]
        starved.sort(key=lambda priority: -self._classes[priority].num_bypasses)
        return starved + [priority for priority in waiting if priority not in starved]


class _Blocked(Container[str]):
    """The blocked tenants of one class."""

    def __init__(self, priority: Priority, blocked: Container[tuple[Priority, str]]) -> None:
        self._priority, self._blocked = priority, blocked

    def __contains__(self, tenant: object) -> bool:
        return (self._priority, tenant) in self._blocked
