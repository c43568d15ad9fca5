"""The waiting requests of one model: by class, within a class deficit round robin over tenants. Pure.

Deficit round robin (Shreedhar and Varghese, 1995) charged in uncached prompt tokens: over any time two tenants that
always wait differ by at most about one quantum and one request, whatever the sizes of their requests.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from dragoman_controller.requests import Priority

QUANTUM_TOKENS = 2048
# A waiting class is passed over at most this often in a row.
MAX_NUM_BYPASSES = 8
# Of more tenants than this a position is estimated: it is told for each request, and a look at all would cost more than it.
_MAX_NUM_COUNTED = 64

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Entry(Generic[T]):
    """One waiting request; `cost` in uncached tokens."""

    item: T
    priority: Priority
    tenant: str
    cost: int
    removed: bool = False


@dataclass(slots=True, eq=False)
class _Tenant(Generic[T]):
    name: str
    share: int
    entries: deque[Entry[T]] = field(default_factory=deque)
    num_waiting: int = 0
    deficit: float = 0.0
    topped_up: bool = False
    is_held: bool = False

    def purge(self) -> None:
        while self.entries and self.entries[0].removed:
            self.entries.popleft()


class _ClassQueue(Generic[T]):
    """The tenants of one class in turn. Those that are held, and those that left, are not in `_turns` or passed over."""

    def __init__(self) -> None:
        self.tenants: dict[str, _Tenant[T]] = {}
        self.num_bypasses = 0
        self._turns: deque[_Tenant[T]] = deque()
        self._num_gone = 0

    def push(self, entry: Entry[T], share: int) -> None:
        tenant = self.tenants.get(entry.tenant)
        if tenant is None:
            tenant = self.tenants[entry.tenant] = _Tenant(entry.tenant, share)
            self._turns.append(tenant)
        tenant.share = share
        tenant.entries.append(entry)
        tenant.num_waiting += 1

    def select(self) -> Entry[T] | None:
        """The next entry, left in place."""
        turns, num_passed = self._turns, 0
        while turns:
            tenant = turns[0]
            if not tenant.num_waiting:
                turns.popleft()
                self._num_gone -= 1
                continue
            tenant.purge()
            if not tenant.topped_up:
                tenant.deficit += QUANTUM_TOKENS * tenant.share
                tenant.topped_up = True
            if tenant.deficit >= tenant.entries[0].cost:
                return tenant.entries[0]
            tenant.topped_up = False
            turns.rotate(-1)
            num_passed += 1
            if num_passed >= len(turns):
                self._skip_rounds()
                num_passed = 0
        return None

    def take(self, entry: Entry[T]) -> None:
        """Removes a selected entry and charges its tenant."""
        self.tenants[entry.tenant].deficit -= entry.cost
        self.remove(entry)

    def remove(self, entry: Entry[T]) -> None:
        """Takes an entry out, wherever it stands."""
        entry.removed = True
        tenant = self.tenants[entry.tenant]
        tenant.num_waiting -= 1
        tenant.purge()
        if tenant.num_waiting:
            return
        tenant.entries.clear()
        del self.tenants[tenant.name]
        if tenant.is_held:
            return
        # Its place in the turns is passed over when it comes up, or cleared away with others.
        self._num_gone += 1
        if self._num_gone > len(self._turns) // 2:
            self._turns = deque(tenant for tenant in self._turns if tenant.num_waiting)
            self._num_gone = 0

    def hold(self, entry: Entry[T]) -> None:
        """Takes the tenant of the selected entry out of the turns."""
        tenant = self._turns.popleft()
        assert tenant.name == entry.tenant, "only the tenant whose turn it is can be held"
        tenant.is_held = True

    def release(self, name: str) -> None:
        """A held tenant is next again."""
        tenant = self.tenants.get(name)
        if tenant is not None and tenant.is_held:
            tenant.is_held = False
            self._turns.appendleft(tenant)

    def num_ahead(self, entry: Entry[T]) -> int:
        """Requests of the class likely to be served before this one, turn by turn."""
        own = self.tenants[entry.tenant]
        is_last = own.entries[-1] is entry
        index = own.num_waiting - 1 if is_last else sum(not one.removed for one in _before(own.entries, entry))
        if len(self.tenants) > _MAX_NUM_COUNTED:
            return index + (index + 1) * (len(self.tenants) - 1)
        ahead = index
        for tenant in self.tenants.values():
            if tenant is not own:
                ahead += min(tenant.num_waiting, math.ceil((index + 1) * tenant.share / own.share))
        return ahead

    def _skip_rounds(self) -> None:
        """A request of many quanta would take as many rounds: give all but the last of them at once."""
        able = [tenant for tenant in self._turns if tenant.num_waiting]
        rounds = min(
            math.ceil((tenant.entries[0].cost - tenant.deficit) / (QUANTUM_TOKENS * tenant.share)) for tenant in able
        )
        for tenant in able:
            tenant.deficit += max(rounds - 1, 0) * QUANTUM_TOKENS * tenant.share


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
            self._num_waiting[entry.priority] -= 1
            self._classes[entry.priority].remove(entry)

    def select(self) -> Entry[T] | None:
        """The request to be served next, left in place; None when nobody waits but who is held."""
        for priority in self._order():
            entry = self._classes[priority].select()
            if entry is not None:
                return entry
        return None

    def take(self, entry: Entry[T]) -> None:
        """Removes a selected request and charges for it."""
        self._classes[entry.priority].take(entry)
        self._num_waiting[entry.priority] -= 1
        for priority in Priority:
            if priority is entry.priority:
                self._classes[priority].num_bypasses = 0
            elif self._num_waiting[priority]:
                self._classes[priority].num_bypasses += 1

    def hold(self, entry: Entry[T]) -> None:
        """The tenant of a selected request is passed over in this class until it is released. It keeps its credit."""
        self._classes[entry.priority].hold(entry)

    def release(self, tenant: str) -> None:
        """A tenant that was held is next again, in every class."""
        for queue in self._classes.values():
            queue.release(tenant)

    def num_ahead(self, entry: Entry[T]) -> int:
        """Requests likely to be served before this one: higher classes, and in its class turn by turn."""
        ahead = sum(count for priority, count in self._num_waiting.items() if priority < entry.priority)
        return min(ahead + self._classes[entry.priority].num_ahead(entry), len(self) - 1)

    def _order(self) -> list[Priority]:
        waiting = [priority for priority in Priority if self._num_waiting[priority]]
        starved = [p for p in waiting if self._classes[p].num_bypasses >= MAX_NUM_BYPASSES]
        starved.sort(key=lambda priority: -self._classes[priority].num_bypasses)
        return starved + [priority for priority in waiting if priority not in starved]


def _before(entries: deque[Entry[T]], entry: Entry[T]) -> list[Entry[T]]:
    found = []
    for one in entries:
        if one is entry:
            break
        found.append(one)
    return found
