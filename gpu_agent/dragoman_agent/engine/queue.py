"""The waiting sequences: priority classes with aging, fair shares by tenant inside a class, earliest due first inside a tenant.

Fairness is deficit round robin charged in tokens that were computed (Shreedhar and Varghese, 1995), in the form that charges
after service: what the cache saves is known only when a sequence starts, and how much it writes only when it ends.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from dataclasses import dataclass, field

from dragoman_agent.engine.request import AGING_SECONDS, Sequence

NUM_CLASSES = 3
QUANTUM_TOKENS = 1024  # what a tenant may start each round
MIN_CHARGE_TOKENS = 64  # of a start: a place in the batch is worth something, else tiny prompts had rounds without end
_PATIENCE_SECONDS = 60.0  # a sequence without a deadline is due this long after it came


@dataclass(slots=True)
class _Tenant:
    heap: list[tuple[float, int, Sequence]] = field(default_factory=list)  # (due, order of arrival, sequence)
    balance: float = 0.0  # tokens it may still start this round; negative is debt


class WaitingQueue:
    """Holds waiting sequences and says which is next. `peek` changes nothing but the rounds of service."""

    def __init__(self) -> None:
        self._classes: list[OrderedDict[str, _Tenant]] = [OrderedDict() for _ in range(NUM_CLASSES)]
        self._class_of: dict[int, int] = {}  # id(sequence) -> class; the members
        self._by_age: list[tuple[float, int, Sequence]] = []  # heap of (when it rises a class, order, sequence)
        self._order = itertools.count()
        self.num_tokens = 0  # of all members

    def __len__(self) -> int:
        return len(self._class_of)

    def __contains__(self, sequence: Sequence) -> bool:
        return id(sequence) in self._class_of

    def push(self, sequence: Sequence, now: float) -> None:
        """Add a sequence. One that ran before waits anew."""
        sequence.queued = now if sequence.num_charged else None
        self._insert(sequence, sequence.class_at(now), now)
        self.num_tokens += len(sequence.token_ids)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it stands. Its heap entries are dropped when they come up."""
        del self._class_of[id(sequence)]
        self.num_tokens -= len(sequence.token_ids)
        if not self._class_of:
            # Nothing waits, so nobody is kept waiting by anyone: debts are void.
            self._classes = [OrderedDict() for _ in range(NUM_CLASSES)]
            self._by_age = []

    def peek(self, now: float) -> Sequence | None:
        """The sequence to start next, or None. It stays in the queue until `take`."""
        self._age(now)
        for index in range(NUM_CLASSES):
            tenant = self._next_tenant(index)
            if tenant is not None:
                return tenant.heap[0][2]
        return None

    def take(self, sequence: Sequence, uncached_tokens: int) -> None:
        """Start what `peek` returned, charging its tenant `uncached_tokens`, but nothing where it has paid before."""
        index = self._class_of[id(sequence)]
        tenant = self._classes[index][sequence.request.tenant]
        heapq.heappop(tenant.heap)
        if not sequence.num_charged:
            tenant.balance -= max(uncached_tokens, MIN_CHARGE_TOKENS)
            sequence.num_charged = len(sequence.token_ids)
        if tenant.balance <= 0:
            self._classes[index].move_to_end(sequence.request.tenant)
        sequence.effective_class = index
        self.remove(sequence)

    def charge_output(self, sequence: Sequence) -> None:
        """Charge the tenant of a sequence that ends what it wrote. Where nobody waits there is nobody to share with."""
        if self._class_of and sequence.num_charged:
            tenant = self._classes[sequence.effective_class].setdefault(sequence.request.tenant, _Tenant())
            tenant.balance -= len(sequence.token_ids) - sequence.num_charged

    def _insert(self, sequence: Sequence, index: int, now: float) -> None:
        self._class_of[id(sequence)] = index
        tenant = self._classes[index].setdefault(sequence.request.tenant, _Tenant())
        request = sequence.request
        due = request.arrived + _PATIENCE_SECONDS
        if request.deadline is not None:
            due = min(due, request.deadline)
        heapq.heappush(tenant.heap, (due, next(self._order), sequence))
        if index > 0:
            rises = max(now, sequence.waits_since + (request.priority - index + 1) * AGING_SECONDS)
            heapq.heappush(self._by_age, (rises, next(self._order), sequence))

    def _age(self, now: float) -> None:
        while self._by_age and self._by_age[0][0] <= now:
            _, _, sequence = heapq.heappop(self._by_age)
            index = self._class_of.get(id(sequence))
            if index is None or index == 0:
                continue
            self._insert(sequence, index - 1, now)

    def _next_tenant(self, index: int) -> _Tenant | None:
        tenants = self._classes[index]
        self._drop_stale(index)
        backlogged = [name for name, tenant in tenants.items() if tenant.heap]
        if not backlogged:
            return None
        if all(tenants[name].balance <= 0 for name in backlogged):
            # Rounds in which nobody could start anything are played at once.
            rounds = min(int(-tenants[name].balance // QUANTUM_TOKENS) + 1 for name in backlogged)
            for name in backlogged:
                tenants[name].balance += rounds * QUANTUM_TOKENS
        for name in backlogged:
            if tenants[name].balance > 0:
                return tenants[name]
            tenants.move_to_end(name)
        raise AssertionError("a round left no tenant with a balance")

    def _drop_stale(self, index: int) -> None:
        """Forget entries of sequences that left or rose, and idle tenants that owe nothing."""
        tenants = self._classes[index]
        for name in list(tenants):
            tenant = tenants[name]
            while tenant.heap and self._class_of.get(id(tenant.heap[0][2])) != index:
                heapq.heappop(tenant.heap)
            if not tenant.heap and tenant.balance >= 0:
                del tenants[name]
