"""The agent's own admission, which has the last word: who may start now, with which ticket, and how each request ended."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial

from dragoman.durations import duration_of
from dragoman.errors import DragomanError
from dragoman.v1 import agent_registry_service_pb2, error_pb2
from dragoman_agent.engine.messages import Embedded, Failed, Finished, Start, StartEmbed
from dragoman_agent.metrics import AgentMetrics
from dragoman_agent.rpc.engine_client import EngineClient, Event, EventSink
from dragoman_agent.tickets import OPEN_GRANT, Grant, Presented, TicketVerifier

MAX_RETRY_DELAY_SECONDS = 60.0
LOADING_RETRY_SECONDS = 1.0
DRAINING_RETRY_SECONDS = 1.0


class Phase(Enum):
    """Life of the agent as its callers meet it."""

    LOADING = "loading"
    SERVING = "serving"
    DRAINING = "draining"  # announced: not ready, still taking requests
    CLOSED = "closed"  # refuses new requests


@dataclass(frozen=True, slots=True)
class Capacity:
    """What may be live at once, from the plan."""

    max_num_seqs: int
    max_num_waiting: int


class Gate:
    """Admits requests to the engine and keeps account of their ends. One owner of the phase and of the outcomes."""

    def __init__(
        self,
        engine: EngineClient,
        capacity: Capacity,
        verifier: TicketVerifier | None,
        metrics: AgentMetrics,
        step_seconds: Callable[[], float],
    ) -> None:
        """`verifier` None is an open agent. `step_seconds`: mean time of a step now, for the retry hint."""
        self.phase = Phase.LOADING
        self.cordoned = (
            ""  # why the device may finish what runs and takes nothing new; not undone by taking back a drain
        )
        self._engine = engine
        self._capacity = capacity
        self._verifier = verifier
        self._metrics = metrics
        self._step_seconds = step_seconds
        self._grant_of: dict[str, Grant] = {}  # by request id, where there is a ticket
        self._running_jti: Counter[bytes] = Counter()  # engine requests a ticket: one, or an embedding's inputs
        self.on_outcome: Callable[[agent_registry_service_pb2.RequestOutcome], None] = _ignore

    @property
    def is_open(self) -> bool:
        """Whether new requests are taken, as far as phase and device go."""
        return self.phase is Phase.SERVING and not self.cordoned

    def verify_ticket(self, token: bytes, presented: Callable[[], Presented]) -> Grant:
        """The grant of a request's ticket; on an open agent everything is granted and tickets are not looked at."""
        if self._verifier is None:
            return OPEN_GRANT
        try:
            grant = self._verifier.verify(token, presented())
        except DragomanError as error:
            self._metrics.tickets.labels(error.reason_name.removeprefix("ticket_")).inc()
            raise
        return grant

    def check_open(self) -> None:
        """Raises DragomanError while no request can be taken."""
        if self.phase is Phase.LOADING:
            raise DragomanError(
                error_pb2.ERROR_REASON_MODEL_LOADING,
                "the agent is still loading its model; retry in a moment",
                retry_delay=LOADING_RETRY_SECONDS,
            )
        if self.phase is Phase.CLOSED:
            raise DragomanError(
                error_pb2.ERROR_REASON_AGENT_DRAINING,
                "the agent is finishing its requests and takes no new ones; another agent will",
                retry_delay=DRAINING_RETRY_SECONDS,
            )
        if self.cordoned:
            raise DragomanError(
                error_pb2.ERROR_REASON_AGENT_DRAINING,
                f"the agent's device is cordoned and takes no new requests; another agent will. {self.cordoned}",
                retry_delay=DRAINING_RETRY_SECONDS,
            )
        if not self._engine.is_serving:
            raise DragomanError(
                error_pb2.ERROR_REASON_AGENT_LOST,
                f"the engine has not finished a step for {self._engine.step_age:.1f} s; use another agent",
                retry_delay=LOADING_RETRY_SECONDS,
            )

    def check_new(self, request_id: str, num_seqs: int) -> None:
        """Raises DragomanError for an id under way, or when slots and queue are full.

        Sequences take slots and queue places alike; a request wider than all of them is taken when a slot is free.
        """
        if request_id in self._engine.live:
            raise DragomanError(
                error_pb2.ERROR_REASON_DUPLICATE_REQUEST,
                f"request {request_id} is already under way here; use a new request id",
                metadata={"param": "request_id"},
            )
        live = self._engine.num_live_seqs
        places = self._capacity.max_num_seqs + self._capacity.max_num_waiting
        if live >= self._capacity.max_num_seqs and live + num_seqs > places:
            raise DragomanError(
                error_pb2.ERROR_REASON_QUEUE_FULL,
                f"the agent runs {self._capacity.max_num_seqs} sequences and queues {self._capacity.max_num_waiting} more, "
                f"and {live} are there; retry after the delay",
                retry_delay=self.retry_delay(),
            )

    def retry_delay(self) -> float:
        """Seconds until the request nearest to its end should have freed its place, by the present step time."""
        remaining = [entry.max_output_tokens - entry.num_emitted for entry in self._engine.live.values()]
        nearest = max(min(remaining, default=1), 1)
        return min(max(nearest * self._step_seconds(), 0.05), MAX_RETRY_DELAY_SECONDS)

    def admit(self, command: Start | StartEmbed, grant: Grant, sink: EventSink) -> None:
        """Check everything again that may have changed, use up the ticket, and hand the request to the engine."""
        self.check_open()
        self.check_new(command.request_id, command.num_choices if isinstance(command, Start) else 1)
        self.use_ticket(grant)
        self._count_running(grant, 1)
        self._submit(command, grant, sink)

    def admit_inputs(self, commands: list[StartEmbed], grant: Grant) -> int:
        """Admit the inputs of one embedding under one ticket, all or none; how many may be in the engine at once.

        The caller hands each to `submit_input`, and tells `drop_inputs` of those that will not come. So that others find a
        place beside them, they take at most half of the queue.
        """
        self.check_open()
        capacity = self._capacity
        room = capacity.max_num_seqs + capacity.max_num_waiting // 2 - self._engine.num_live_seqs
        at_once = min(len(commands), 2 * capacity.max_num_seqs, max(room, 1))
        for command in commands:
            self.check_new(command.request_id, at_once)
        self.use_ticket(grant)
        self._count_running(grant, len(commands))
        return at_once

    def submit_input(self, command: StartEmbed, grant: Grant, sink: EventSink) -> None:
        """Hand one admitted input to the engine."""
        self._submit(command, grant, sink)

    def drop_inputs(self, num_inputs: int, grant: Grant) -> None:
        """Inputs that were admitted and will not be submitted."""
        if grant.jti and num_inputs:
            self._running_jti[grant.jti] -= num_inputs - 1
            self._end_one(grant, agent_registry_service_pb2.RequestOutcome(jti=grant.jti, incomplete=True))

    def use_ticket(self, grant: Grant) -> None:
        """Consume the ticket. Raises DragomanError when it was used meanwhile."""
        if self._verifier is None:
            return
        try:
            self._verifier.consume(grant)
        except DragomanError as error:
            self._metrics.tickets.labels(error.reason_name.removeprefix("ticket_")).inc()
            raise
        self._metrics.tickets.labels("accepted").inc()

    def _count_running(self, grant: Grant, num_requests: int) -> None:
        if grant.jti:
            self._running_jti[grant.jti] += num_requests

    def _submit(self, command: Start | StartEmbed, grant: Grant, sink: EventSink) -> None:
        if grant.jti:
            self._grant_of[command.request_id] = grant
        if isinstance(command, Start) and command.delivered:
            self._metrics.resumes.labels("accepted").inc()
        self._engine.submit(command, sink, partial(self._ended, len(command.prompt_ids)))

    def count_refusal(self, error: DragomanError, grant: Grant, *, is_resume: bool = False) -> None:
        """A request that was refused. The controller hears of its ticket, so that it stops counting on the request."""
        self._metrics.requests.labels(error.reason_name).inc()
        if is_resume:
            self._metrics.resumes.labels("refused").inc()
        if grant.jti and error.reason != error_pb2.ERROR_REASON_TICKET_REPLAYED:
            self.on_outcome(agent_registry_service_pb2.RequestOutcome(jti=grant.jti, incomplete=True))

    def revoke(self, jti: bytes) -> bool:
        """Stop the request that runs with this ticket and refuse the ticket from now on. False when none runs."""
        if self._verifier is not None:
            self._verifier.revoke(jti)
        running = [request_id for request_id, held in self._grant_of.items() if held.jti == jti] if jti else []
        for request_id in running:
            self._engine.cancel(request_id)
        return bool(running)

    def tell_lost(self, request_id: str) -> None:
        """The engine hangs on this request, and its caller goes elsewhere: the controllers hear of it before him."""
        if grant := self._grant_of.get(request_id):
            outcome = agent_registry_service_pb2.RequestOutcome(
                jti=grant.jti, incomplete=True, engine_lost=True, prompt_digest=grant.prompt_digest
            )
            self.on_outcome(outcome)

    def waiting_by_class(self) -> tuple[int, int, int]:
        """Live requests without a token so far, by class."""
        counts = [0, 0, 0]
        for entry in self._engine.live.values():
            if not entry.num_emitted and not entry.cancelled:
                counts[entry.priority] += 1
        return counts[0], counts[1], counts[2]

    def _ended(self, prompt_tokens: int, event: Event, num_emitted: int) -> None:
        match event:
            case Finished():
                self._metrics.request_finished(event, longest_choice_tokens=num_emitted)
            case Failed():
                self._metrics.request_failed(event)
            case Embedded():
                self._metrics.embedding_finished(prompt_tokens)
        grant = self._grant_of.pop(event.request_id, None)
        if grant is None:
            return
        outcome = _outcome(grant.jti, event)
        outcome.engine_lost = isinstance(event, Failed) and (
            self._engine.was_lost or event.reason == error_pb2.ERROR_REASON_DEVICE_FAULT
        )
        self._end_one(grant, outcome)

    def _end_one(self, grant: Grant, outcome: agent_registry_service_pb2.RequestOutcome) -> None:
        """One engine request of a ticket has ended; `outcome` is the ticket's if it was the last."""
        jti = grant.jti
        self._running_jti[jti] -= 1
        if not self._running_jti[jti]:
            del self._running_jti[jti]
            outcome.prompt_digest = grant.prompt_digest
            self.on_outcome(outcome)


def _ignore(outcome: agent_registry_service_pb2.RequestOutcome) -> None:
    """Nobody asks for outcomes before the agent has registered."""


def _outcome(jti: bytes, event: Event) -> agent_registry_service_pb2.RequestOutcome:
    """How a ticket's request ended. Only an undisturbed generation has times that teach something."""
    outcome = agent_registry_service_pb2.RequestOutcome(jti=jti, incomplete=True)
    if isinstance(event, Finished | Failed):
        outcome.output_tokens = event.output_tokens
        outcome.cached_tokens = event.cached_tokens
        outcome.prompt_tokens = event.prompt_tokens
    if isinstance(event, Finished):
        outcome.incomplete = event.cancelled
        outcome.time_to_first_token.CopyFrom(duration_of(event.first_token_seconds))
        outcome.total_time.CopyFrom(duration_of(event.total_seconds))
    return outcome


class StepClock:
    """Mean step time over the last second: what the load report and the retry hint are made of."""

    def __init__(self, idle_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`idle_seconds`: the predicted step time, used while nothing has run lately."""
        self._idle_seconds = idle_seconds
        self._clock = clock
        self._recent: deque[tuple[float, float]] = deque()

    def add(self, seconds: float) -> None:
        """One step that computed something."""
        self._recent.append((self._clock(), seconds))
        self._forget()

    def mean(self) -> float:
        """Seconds; 0 when nothing ran in the last second."""
        self._forget()
        return sum(seconds for _, seconds in self._recent) / len(self._recent) if self._recent else 0.0

    def mean_or_predicted(self) -> float:
        """Seconds; the prediction when nothing ran in the last second."""
        return self.mean() or self._idle_seconds

    def _forget(self) -> None:
        horizon = self._clock() - 1.0
        while self._recent and self._recent[0][0] < horizon:
            self._recent.popleft()
