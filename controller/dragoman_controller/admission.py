"""Admits requests: places them at once where an agent has room, else lets them wait their turn.

Owns the waiting requests and the answers given. Synchronous: an answer goes to the listener of the request, at once
or from a later call.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from dragoman.errors import DragomanError
from dragoman.v1 import error_pb2
from dragoman_controller.granted import Granted
from dragoman_controller.placer import Placer
from dragoman_controller.poison import VERDICT_SECONDS, PoisonGuard
from dragoman_controller.policy import Policy, PolicyStore
from dragoman_controller.queue import Entry, FairQueue
from dragoman_controller.quote import Quote
from dragoman_controller.refusals import MIN_RETRY_SECONDS, SETTLE_SECONDS, check_served
from dragoman_controller.requests import AdmissionRequest, Priority, validate
from dragoman_controller.shares import Shares

MAX_RETRY_SECONDS = 60.0
# So many waiting requests that fit nowhere are tried before those behind them; then what frees up is left to gather for them.
MAX_NUM_MISFITS = 16
MAX_NUM_OVER_SHARE = 256


@dataclass(frozen=True, slots=True)
class Queued:
    """Waiting; another answer follows. `position` 0 is next."""

    position: int
    predicted_wait_seconds: float


Answer = Granted | Queued | DragomanError
Listener = Callable[[Answer], None]
Key = tuple[str, str, int]


class Observer(Protocol):
    """Counts what happens."""

    def ticket(self, result: str) -> None:
        """One answer: "granted", or the name of the reason it was refused for."""

    def waited(self, priority: Priority, seconds: float) -> None:
        """A request left the queue with a ticket."""

    def quoted(self, priority: Priority, quote: Quote, policy: Policy) -> None:
        """A quote was given with a ticket."""


@dataclass(slots=True, eq=False)
class _Ask:
    request: AdmissionRequest
    arrived_at: float
    listeners: list[Listener] = field(default_factory=list)
    entry: Entry[_Ask] | None = None
    granted: Granted | None = None


class Admission:
    """The door. `clock` is monotonic, in seconds."""

    def __init__(
        self,
        placer: Placer,
        policy: PolicyStore,
        observer: Observer,
        clock: Callable[[], float],
        guard: PoisonGuard,
        on_queued: Callable[[AdmissionRequest], None],
    ) -> None:
        """`on_queued` hears of each request that has to wait."""
        self._guard = guard
        self._on_queued = on_queued
        self._held: deque[tuple[float, _Ask]] = deque()  # resumes that wait for the verdict on an agent
        self._placer = placer
        self._policy = policy
        self._observer = observer
        self._clock = clock
        self._started_at = clock()
        self._asks: dict[Key, _Ask] = {}
        self._keys: dict[str, list[Key]] = {}
        """Keys of the asks by request id: mostly one."""
        self._queues: dict[str, FairQueue[_Ask]] = {}
        self._queued_of_tenant: Counter[str] = Counter()
        self._waits: list[tuple[float, int, _Ask]] = []
        # Grants in the order in which their tickets run out: all have the same time.
        self._unused: deque[tuple[float, Key]] = deque()
        # Tenants at their limit of running requests, and the models whose queues hold them.
        self._limited: dict[str, set[str]] = {}
        self._limited_under: Policy | None = None
        self._shares = Shares(placer, policy, clock)
        self._sequence = itertools.count()
        self._closed: DragomanError | None = None

    def num_waiting(self, priority: Priority) -> int:
        """Requests of a class in the queue."""
        return sum(queue.num_waiting(priority) for queue in self._queues.values())

    def submit(self, request: AdmissionRequest, listener: Listener) -> None:
        """Answers through `listener`, maybe before this returns. Asking again gives the same answer."""
        try:
            validate(request)
            ask = self._same_ask(request)
            if ask is not None:
                self._answer_again(ask, listener)
                return
            if self._closed is not None:
                raise self._closed
            ask = _Ask(request, self._clock(), [listener])
            self._shares.note(request.tenant, ask.arrived_at)
            if self._guard.check(request):
                self._admit(ask)
            else:
                self._held.append((self._clock() + VERDICT_SECONDS, ask))
        except DragomanError as error:
            self._observer.ticket(error.reason_name)
            listener(error)

    def quote(self, request: AdmissionRequest) -> tuple[Quote, str]:
        """The quote and the agent of a request, without a grant. Raises DragomanError where it would be refused."""
        validate(request, needs_id=False)
        check_served(self._placer, request, self._is_settled)
        quoted = self._placer.quote(request)
        if quoted is None:
            wait = self.predicted_wait(request.model, self._num_waiting(request.model))
            raise DragomanError(
                error_pb2.ERROR_REASON_QUEUE_FULL,
                f"no agent of {request.model!r} has room now: ask again in {_retry_delay(wait):.0f} s",
                retry_delay=_retry_delay(wait),
            )
        return quoted

    def abandon(self, request_id: str, tenant: str | None = None) -> None:
        """The caller no longer wants it: out of the queue, or its ticket is returned."""
        for key in [key for key in self._keys.get(request_id, ()) if tenant in (None, key[0])]:
            self._drop(self._asks[key])

    def detach(self, request: AdmissionRequest, listener: Listener) -> None:
        """The caller is gone. A waiting request that nobody else waits for leaves the queue."""
        ask = self._asks.get(request.key)
        if ask is None or listener not in ask.listeners:
            return
        ask.listeners.remove(listener)
        if not ask.listeners and ask.granted is None:
            self._drop(ask)

    def forget(self, key: Key) -> None:
        """The request ended: asking for its id again is a new request."""
        self._release_tenant(key[0])
        ask = self._asks.get(key)
        if ask is not None and ask.granted is not None:
            self._unlist(key)

    def dispatch(self, models: Iterable[str]) -> None:
        """Gives waiting requests of these models the room that has come free."""
        for model in models:
            queue = self._queues.get(model)
            if queue:
                self._dispatch(queue, model)

    def tick(self) -> None:
        """Refuses requests that waited too long and forgets tickets past their use."""
        now = self._clock()
        self._judge_held(now)
        while self._unused and self._unused[0][0] <= now:
            key = self._unused.popleft()[1]
            ask = self._asks.get(key)
            if ask is not None and ask.granted is not None and ask.granted.usable_until <= now:
                self._unlist(key)
        while self._waits and self._waits[0][0] <= now:
            ask = heapq.heappop(self._waits)[2]
            if ask.granted is None and self._asks.get(ask.request.key) is ask:
                self._refuse(ask, self._waited_too_long(ask, now))

    def _judge_held(self, now: float) -> None:
        for _ in range(len(self._held)):
            until, ask = self._held.popleft()
            try:
                if not self._guard.check(ask.request) and now < until:
                    self._held.append((until, ask))
                elif (same := self._same_ask(ask.request)) is not None:
                    self._answer_again(same, ask.listeners[0])
                else:
                    self._admit(ask)
            except DragomanError as error:
                self._observer.ticket(error.reason_name)
                ask.listeners[0](error)

    def close(self, error: DragomanError) -> None:
        """Refuses every new request with `error` from now on. Waiting ones go on waiting."""
        self._closed = error

    @property
    def _is_settled(self) -> bool:
        return self._clock() - self._started_at >= SETTLE_SECONDS

    @property
    def has_waiting(self) -> bool:
        """Whether any request waits."""
        return any(self._queues.values())

    def refuse_all(self, error: DragomanError) -> None:
        """Ends every wait."""
        for ask in list(self._asks.values()):
            if ask.granted is None:
                self._refuse(ask, error)

    def predicted_wait(self, model: str, num_ahead: int) -> float:
        """Seconds until `num_ahead` requests of the queue and one more have found room."""
        rate = self._placer.completions_per_second(model)
        return (num_ahead + 1) / rate if rate > 0 else MAX_RETRY_SECONDS

    def _same_ask(self, request: AdmissionRequest) -> _Ask | None:
        ask = self._asks.get(request.key)
        if ask is None:
            return None
        if ask.request.prompt_digest != request.prompt_digest or ask.request.model != request.model:
            raise DragomanError(
                error_pb2.ERROR_REASON_DUPLICATE_REQUEST,
                f"request {request.request_id!r} is under way with another prompt or model: use a new request id",
                metadata={"param": "request_id"},
            )
        if ask.granted is not None and ask.granted.usable_until <= self._clock():
            self._unlist(request.key)
            return None
        return ask

    def _answer_again(self, ask: _Ask, listener: Listener) -> None:
        if ask.granted is not None:
            listener(ask.granted.aged(self._clock()))
            return
        ask.listeners.append(listener)
        listener(self._queued_answer(ask))

    def _admit(self, ask: _Ask) -> None:
        request = ask.request
        check_served(self._placer, request, self._is_settled)
        queue = self._queues.get(request.model)
        if not queue and self._grant_now(ask):
            return
        self._enqueue(ask)
        if ask.entry is not None and ask.granted is None:
            self._dispatch(self._queues[request.model], request.model)
        if ask.granted is None:
            self._on_queued(ask.request)
            for listener in list(ask.listeners):
                listener(self._queued_answer(ask))

    def _grant_now(self, ask: _Ask) -> bool:
        """Grants where an agent has room and the tenant is within its limit."""
        request = ask.request
        if self._is_at_limit(request.tenant) or self._shares.must_leave_room(request.tenant, request.model):
            return False
        now = self._clock()
        granted = self._placer.grant(request, now - ask.arrived_at)
        if granted is None:
            return False
        ask.granted = granted
        self._list(ask)
        self._unused.append((granted.usable_until, request.key))
        request.block_hashes = ()  # they were placed by; nothing else of a request is as large
        self._observer.ticket("granted")
        self._observer.waited(request.priority, now - ask.arrived_at)
        self._observer.quoted(request.priority, granted.quote, self._policy.current)
        listeners, ask.listeners = ask.listeners, []
        for listener in listeners:
            listener(granted)
        return True

    def _enqueue(self, ask: _Ask) -> None:
        request, policy = ask.request, self._policy.current
        tenant = policy.tenant(request.tenant)
        wait = request.max_queue_wait_seconds
        wait = policy.max_queue_wait_seconds if wait is None else min(wait, policy.max_queue_wait_seconds)
        num_queued = sum(len(queue) for queue in self._queues.values())
        if num_queued >= policy.max_queued_requests:
            raise self._queue_full(request, f"the queue holds {num_queued} requests, its limit")
        if tenant.max_queued_requests and self._queued_of_tenant[request.tenant] >= tenant.max_queued_requests:
            raise self._queue_full(
                request, f"tenant {request.tenant!r} has {tenant.max_queued_requests} requests waiting, its limit"
            )
        if wait <= 0:
            raise self._queue_full(request, "every agent's slots are taken, and the request may not wait")
        queue = self._queues.setdefault(request.model, FairQueue())
        cost = self._placer.uncached_tokens(request)
        ask.entry = queue.push(ask, request.priority, request.tenant, cost, tenant.share)
        self._queued_of_tenant[request.tenant] += 1
        self._list(ask)
        heapq.heappush(self._waits, (ask.arrived_at + wait, next(self._sequence), ask))

    def _dispatch(self, queue: FairQueue[_Ask], model: str) -> None:
        if self._limited_under is not self._policy.current:
            self._limited_under = self._policy.current
            for tenant in list(self._limited):
                self._release_tenant(tenant)
        misfits: list[str] = []
        over_share: list[str] = []
        while (
            queue
            and len(misfits) < MAX_NUM_MISFITS
            and len(over_share) < MAX_NUM_OVER_SHARE
            and self._placer.has_room(model)
        ):
            entry = queue.select()
            if entry is None:
                break
            if self._is_at_limit(entry.tenant):
                queue.hold(entry)
                self._limited.setdefault(entry.tenant, set()).add(model)
            elif self._shares.must_leave_room(entry.tenant, model):
                queue.hold(entry)
                over_share.append(entry.tenant)
            elif self._grant_now(entry.item):
                queue.take(entry)
                self._left_queue(entry.item)
            else:
                queue.hold(entry)
                misfits.append(entry.tenant)
        for tenant in reversed([*over_share, *misfits]):
            queue.release(tenant)

    def _is_at_limit(self, tenant: str) -> bool:
        limit = self._policy.current.tenant(tenant).max_running_requests
        return limit > 0 and self._placer.num_running(tenant) >= limit

    def _release_tenant(self, tenant: str) -> None:
        """A tenant at its limit is not asked about again until one of its requests has ended, or the policy is new."""
        for model in self._limited.pop(tenant, ()):
            self._queues[model].release(tenant)

    def _list(self, ask: _Ask) -> None:
        key = ask.request.key
        if key not in self._asks:
            self._keys.setdefault(key[1], []).append(key)
        self._asks[key] = ask

    def _unlist(self, key: Key) -> None:
        if self._asks.pop(key, None) is not None:
            keys = self._keys[key[1]]
            keys.remove(key)
            if not keys:
                del self._keys[key[1]]

    def _left_queue(self, ask: _Ask) -> None:
        ask.entry = None
        tenant = ask.request.tenant
        self._queued_of_tenant[tenant] -= 1
        if not self._queued_of_tenant[tenant]:
            del self._queued_of_tenant[tenant]

    def _drop(self, ask: _Ask) -> None:
        self._unlist(ask.request.key)
        if ask.entry is not None:
            self._queues[ask.request.model].remove(ask.entry)
            self._left_queue(ask)
            self._observer.ticket("abandoned")
        elif ask.granted is not None:
            self._placer.release(ask.granted)
            self._release_tenant(ask.request.tenant)
            self._observer.ticket("released")
            self.dispatch([ask.request.model])

    def _refuse(self, ask: _Ask, error: DragomanError) -> None:
        self._unlist(ask.request.key)
        if ask.entry is not None:
            self._queues[ask.request.model].remove(ask.entry)
            self._left_queue(ask)
        self._observer.ticket(error.reason_name)
        for listener in ask.listeners:
            listener(error)

    def _num_waiting(self, model: str) -> int:
        queue = self._queues.get(model)
        return len(queue) if queue else 0

    def _queued_answer(self, ask: _Ask) -> Queued:
        assert ask.entry is not None
        position = self._queues[ask.request.model].num_ahead(ask.entry)
        return Queued(position, self.predicted_wait(ask.request.model, position))

    def _queue_full(self, request: AdmissionRequest, why: str) -> DragomanError:
        delay = _retry_delay(self.predicted_wait(request.model, self._num_waiting(request.model)))
        return DragomanError(error_pb2.ERROR_REASON_QUEUE_FULL, f"{why}: ask again in {delay:.0f} s", retry_delay=delay)

    def _waited_too_long(self, ask: _Ask, now: float) -> DragomanError:
        try:
            check_served(self._placer, ask.request, self._is_settled)
        except DragomanError as error:
            return error
        return self._queue_full(ask.request, f"no agent had room within {now - ask.arrived_at:.1f} s")


def _retry_delay(predicted_wait: float) -> float:
    return min(max(predicted_wait, MIN_RETRY_SECONDS), MAX_RETRY_SECONDS)
