"""One cell in virtual time: the real Cell, simulated agents, and clients that ask, retry and resume as the Python client does."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from random import Random
from typing import Any

from dragoman.errors import DragomanError
from dragoman.pursuit import Pursuit
from dragoman.retry import RetryPolicy, Step
from dragoman.v1 import error_pb2
from dragoman_controller.admission import Answer, Queued
from dragoman_controller.agent_view import Shape
from dragoman_controller.cell import HEARTBEAT_INTERVAL_SECONDS, TICK_SECONDS, Cell, Outcome
from dragoman_controller.commands import Drain
from dragoman_controller.granted import Granted, Ticket
from dragoman_controller.native.library import Library
from dragoman_controller.policy import Policy
from dragoman_controller.requests import AdmissionRequest, Priority, Resume
from dragoman_controller.simulate.agent import SimulatedAgent
from dragoman_controller.simulate.choosers import CHOOSERS, OURS, forecast, oracle
from dragoman_controller.simulate.faults import Fault
from dragoman_controller.simulate.profiles import AgentProfile
from dragoman_controller.simulate.seat import Seat, full_agent
from dragoman_controller.simulate.streams import End, Stream
from dragoman_controller.simulate.tally import Tally
from dragoman_controller.simulate.workload import NO_PREFIX, Workload, prefix_units
from dragoman_controller.tickets import CellKey

MODEL = "simulated"
# A controller that is started anew is away for this long: less than a gateway waits before it turns requests away.
RESTART_SECONDS = 1.0
# An agent to which nothing came and of which nothing ended is heard this often: its beat would say nothing new.
QUIET_BEAT_SECONDS = 1.0
_DRAIN_GRACE_SECONDS = 180.0
_HORIZON_SECONDS = 3600.0
_CLIENT = RetryPolicy()
_KEY = CellKey(1, bytes(32))
_PRIORITIES = {int(priority): priority for priority in Priority}
_Event = Callable[[Any], None]


def _lost(agent_id: str) -> DragomanError:
    return DragomanError(error_pb2.ERROR_REASON_AGENT_LOST, f"{agent_id} is gone")


def _busy(agent_id: str) -> DragomanError:
    return DragomanError(error_pb2.ERROR_REASON_QUEUE_FULL, f"{agent_id} is full: ask again", retry_delay=0.05)


@dataclass(frozen=True, slots=True)
class CellSettings:
    """How a cell is run. `sample_every`: of so many placements one is held against the oracle; 0 is none."""

    policy: Policy = field(default_factory=Policy)
    chooser: str = OURS
    seed: int = 1
    beat_seconds: float = HEARTBEAT_INTERVAL_SECONDS
    network_seconds: float = 0.001
    sample_every: int = 10
    faults: tuple[Fault, ...] = ()


class CellRun:
    """Owns the virtual time of one cell. `agents`: (id, profile) of each; `numbers`: which requests of the workload it gets."""

    def __init__(
        self,
        settings: CellSettings,
        agents: Sequence[tuple[str, AgentProfile]],
        workload: Workload,
        numbers: Sequence[int],
        name: str = "cell",
        library: Library | None = None,
    ) -> None:
        self.now = 0.0
        self.tally = Tally()
        self._settings, self._workload, self._numbers = settings, workload, numbers
        self._rng = Random(f"{settings.seed} {name}")
        self._library = library
        self._seats = {agent_id: Seat(full_agent(agent_id, profile, MODEL), profile) for agent_id, profile in agents}
        self._agents = {agent_id: seat.agent for agent_id, seat in self._seats.items()}
        self._units: dict[tuple[int, int], tuple[int, ...]] = {}
        self._events: list[tuple[float, int, _Event, Any]] = []
        self._sequence = 0
        self._num_running = self._num_queued = 0
        self._unanswered: dict[int, Stream] = {}
        self._restarts = 0
        self._cell: Cell | None = None
        self._start_controller()
        spacing = settings.beat_seconds / len(self._seats)
        self._beats = deque((index * spacing, seat) for index, seat in enumerate(self._seats.values()))
        for seat in self._seats.values():
            seat.join(self._controller, self.now)
        for fault in settings.faults:
            if fault.kind == "restart" or fault.agent_id in self._seats:
                self._at(fault.seconds, self._fault, fault)

    @property
    def _controller(self) -> Cell:
        assert self._cell is not None
        return self._cell

    def run(self) -> Tally:
        """Until every request has ended, or an hour after the last one came."""
        seconds, numbers, events, beats = self._workload.seconds, self._numbers, self._events, self._beats
        total, index = len(numbers), 0
        tick_at = TICK_SECONDS
        horizon = (seconds[numbers[-1]] if total else 0.0) + _HORIZON_SECONDS
        arrival_at = seconds[numbers[0]] if total else math.inf
        ended = self.tally.end
        while len(ended) < total and self.now < horizon:
            event_at = events[0][0] if events else math.inf
            beat_at = beats[0][0]
            if event_at <= arrival_at and event_at <= beat_at and event_at <= tick_at:
                self.now = event_at
                _, _, act, subject = heappop(events)
                act(subject)
            elif arrival_at <= beat_at and arrival_at <= tick_at:
                self.now = arrival_at
                self._ask(self._arrive(numbers[index]))
                index += 1
                arrival_at = seconds[numbers[index]] if index < total else math.inf
            elif beat_at <= tick_at:
                self.now = beat_at
                seat = beats.popleft()[1]
                self._beat(seat)
                beats.append((beat_at + self._settings.beat_seconds, seat))
            else:
                self.now = tick_at
                tick_at += TICK_SECONDS
                if self._cell is not None:
                    self._cell.tick()
        self._count_unfinished(total)
        return self.tally

    def _count_unfinished(self, total: int) -> None:
        counts = self.tally.counts
        counts["unfinished"] += total - len(self.tally)
        counts["preemptions"] += sum(seat.num_preemptions + seat.agent.num_preemptions for seat in self._seats.values())

    def _at(self, seconds: float, act: _Event, subject: Any) -> None:
        self._sequence += 1
        heappush(self._events, (seconds, self._sequence, act, subject))

    # The client.

    def _arrive(self, number: int) -> Stream:
        workload = self._workload
        prefix, prefix_tokens = workload.prefix[number], workload.prefix_tokens[number]
        units: tuple[int, ...] = ()
        if prefix != NO_PREFIX:
            key = prefix, prefix_tokens
            known = self._units.get(key)
            if known is None:
                known = self._units[key] = prefix_units(workload.prefixes[prefix], prefix_tokens)
            units = known
        return Stream(
            number, self.now, workload.tenant[number], workload.priority[number], workload.prompt_tokens[number],
            workload.output_tokens[number], prefix, prefix_tokens, units,
        )  # fmt: skip

    def _ask(self, stream: Stream) -> None:
        if self._cell is None:
            # As a gateway does: the request is held until a controller is there again.
            self._unanswered[stream.number] = stream
            return
        resume = None
        if stream.origin is not None:
            resume = Resume(*stream.origin, stream.attempt, stream.delivered)
        request = AdmissionRequest(
            request_id=str(stream.number),
            model=MODEL,
            prompt_tokens=stream.prompt_tokens,
            prompt_bytes=0,
            prompt_digest=stream.number.to_bytes(32, "little"),
            max_output_tokens=stream.output_tokens,
            block_hashes=stream.units,
            priority=_PRIORITIES[stream.priority],
            tenant=self._workload.tenants[stream.tenant],
            resume=resume,
        )
        self._unanswered[stream.number] = stream
        self._cell.admission.submit(request, partial(self._answered, stream, self._restarts))

    def _answered(self, stream: Stream, restarts: int, answer: Answer) -> None:
        if restarts != self._restarts:
            return  # from a controller that is gone: nobody listens there any more
        if isinstance(answer, Granted):
            self._left_queue(stream)
            stream.granted = answer
            self._sample_regret(stream, answer.ticket.agent_id)
            self._at(self.now + self._settings.network_seconds, self._accept, (stream, answer.ticket))
        elif isinstance(answer, Queued):
            if not stream.queued:
                stream.queued = True
                self._num_queued += 1
                self.tally.counts["queued"] += 1
                self.tally.max_num_queued = max(self.tally.max_num_queued, self._num_queued)
        else:
            self._left_queue(stream)
            self._failed(stream, answer)

    def _left_queue(self, stream: Stream) -> None:
        self._unanswered.pop(stream.number, None)
        if stream.queued:
            stream.queued = False
            self._num_queued -= 1

    def _failed(self, stream: Stream, error: DragomanError, *, accepted: bool = False) -> None:
        """Asks again or goes on elsewhere where the client would; `accepted`: an agent had taken it."""
        pursuit = stream.pursuit
        if pursuit is None:
            pursuit = stream.pursuit = Pursuit(_CLIENT, self._rng)
        if accepted:
            pursuit.started()
        decision = pursuit.failed(error, accepted=accepted, has_origin=stream.origin is not None, now=self.now)
        if decision.step is Step.GIVE_UP:
            self._end(stream, End.LOST if stream.origin is not None else End.REFUSED)
            return
        if decision.step is Step.RESUME:
            stream.attempt += 1
            self.tally.counts["resumes"] += 1
        else:
            self.tally.counts["retries"] += 1
        self._at(self.now + decision.delay_seconds, self._ask, stream)

    def _accept(self, going: tuple[Stream, Ticket]) -> None:
        """The request reaches the agent of a ticket, which has the final word."""
        stream, ticket = going
        seat = self._seats[ticket.agent_id]
        agent = seat.agent
        # The ticket allows no more tokens than the agent's context has room for.
        stream.output_tokens = min(stream.output_tokens, seat.profile.max_context_tokens - stream.prompt_tokens)
        if agent.epoch == ticket.epoch and agent.offer(stream, self.now):
            stream.jti = ticket.jti
            seat.has_news = True
            self._num_running += 1
            if self._num_running > self.tally.max_num_running:
                self.tally.max_num_running = self._num_running
            self._schedule(agent)
            return
        self.tally.counts["refused by agent"] += 1
        if agent.is_alive:
            seat.outcomes.append(Outcome(ticket.jti, 0.0, 0.0, 0, True))
        fallback = stream.granted.fallback if stream.granted is not None else None
        if fallback is not None and fallback is not ticket:
            self._at(self.now + 2 * self._settings.network_seconds, self._accept, (stream, fallback))
        elif not agent.is_alive:
            stream.origin = agent.agent_id, agent.epoch
            self._failed(stream, _lost(agent.agent_id))
        else:
            self._failed(stream, _busy(ticket.agent_id))

    def _cut(self, stream: Stream, agent: SimulatedAgent, delivered: int) -> None:
        """Its agent is gone: the client goes on at another, from what it has."""
        if stream.pursuit is not None and delivered > stream.delivered:
            stream.pursuit.flowed()
        stream.delivered, stream.origin = delivered, (agent.agent_id, agent.epoch)
        self._failed(stream, _lost(agent.agent_id), accepted=True)

    def _end(self, stream: Stream, end: End) -> None:
        stream.end = end
        self.tally.ended(stream, self.now)

    # The agents.

    def _schedule(self, agent: SimulatedAgent) -> None:
        if agent.next_at < math.inf and agent.next_at != agent.scheduled_at:
            agent.scheduled_at = agent.next_at
            self._at(agent.next_at, self._step, agent)

    def _step(self, agent: SimulatedAgent) -> None:
        if agent.next_at != self.now:
            return  # it was cut short, or is gone
        ended = agent.step()
        if ended:
            seat = self._seats[agent.agent_id]
            seat.has_news = True
            self._num_running -= len(ended)
            counts = self.tally.counts
            for stream in ended:
                accepted_at = stream.accepted_at
                seat.outcomes.append(
                    Outcome(
                        stream.jti,
                        stream.run_first_at - accepted_at,
                        self.now - accepted_at,
                        stream.output_tokens - stream.delivered,
                        False,
                    )
                )
                counts["prompt tokens"] += stream.prompt_tokens
                counts["cached tokens"] += stream.cached_tokens
                counts["shared tokens"] += stream.prefix_tokens
                self._end(stream, End.FINISHED)
        self._schedule(agent)

    def _beat(self, seat: Seat) -> None:
        """A Heartbeat reaches the controller, with outcomes and KV events; nothing while the controller is away."""
        if self._cell is None or not seat.agent.is_alive:
            return
        if not seat.is_member and not seat.join(self._cell, self.now):
            return
        if not seat.has_news and self.now - seat.beat_at < QUIET_BEAT_SECONDS:
            return
        seat.beat(self._cell, self.now)

    def _sample_regret(self, stream: Stream, chosen: str) -> None:
        every = self._settings.sample_every
        if not every or stream.number % every:
            return
        shape = Shape(stream.prompt_tokens + stream.delivered, max(stream.output_tokens - stream.delivered, 1))
        seconds = {
            agent_id: forecast(agent, shape, {agent_id: agent.held_units(stream.prefix, stream.units) * 64}, self.now)
            for agent_id, agent in self._agents.items()
            if agent_id == chosen or (agent.takes_requests and agent.profile.max_context_tokens > shape.prompt_tokens)
        }
        self.tally.regrets.append(seconds[chosen] / min(seconds.values()) - 1.0)

    # What goes wrong.

    def _fault(self, fault: Fault) -> None:
        self.tally.counts[f"fault {fault.kind}"] += 1
        if fault.kind == "restart":
            self._stop_controller()
            return
        seat = self._seats[fault.agent_id]
        if fault.kind == "kill" and seat.agent.is_alive:
            lost = seat.agent.kill(self.now)
            seat.disconnect(self._cell)
            self._num_running -= len(lost)
            for stream, delivered in lost:
                self._cut(stream, seat.agent, delivered)
        elif fault.kind == "join" and not seat.agent.is_alive:
            seat.revive()
            self._agents[fault.agent_id] = seat.agent
        elif fault.kind == "drain" and seat.is_member and self._cell is not None:
            seat.drain(self._cell, Drain(_DRAIN_GRACE_SECONDS))
            self._at(self.now + _DRAIN_GRACE_SECONDS, self._hand_over, seat)

    def _hand_over(self, seat: Seat) -> None:
        """The grace is over: what still runs goes on elsewhere."""
        for stream, delivered in seat.agent.kill(self.now):
            self._num_running -= 1
            self._cut(stream, seat.agent, delivered)
        if self._cell is not None and seat.is_member:
            seat.leave(self._cell)

    def _stop_controller(self) -> None:
        """Grants and queue are lost with it; streams go on. Who waits for an answer asks the next one."""
        self._restarts += 1
        self._cell = None
        for seat in self._seats.values():
            seat.forget_controller()
        self._at(self.now + RESTART_SECONDS, self._come_back, None)

    def _come_back(self, _: None) -> None:
        self._start_controller()
        waiting = list(self._unanswered.values())
        for stream in waiting:
            self._left_queue(stream)
        for stream in waiting:
            self._ask(stream)

    def _start_controller(self) -> None:
        settings = self._settings
        choose = CHOOSERS[settings.chooser] or oracle(self._agents, lambda: self.now)
        rng = Random(f"{settings.seed} {self._rng.random()}")
        self._cell = Cell((_KEY,), settings.policy, self.tally, lambda: self.now, rng, choose, self._library)
