"""The controller's whole state and every event that changes it. No network, no tasks: the servicers and a timer call it."""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple, Protocol

from dragoman.errors import DragomanError
from dragoman.v1 import error_pb2
from dragoman_controller.admission import Admission, Observer
from dragoman_controller.commands import Command, Drain, Outbox, RotateKeys, Undrain
from dragoman_controller.explain import Placements
from dragoman_controller.fleet import AgentSpec, AgentState, Change, Fleet, Load, Member
from dragoman_controller.hints import Hints, Parts
from dragoman_controller.ledger import Grant, Ledger
from dragoman_controller.native.learning import Learning
from dragoman_controller.native.library import Library
from dragoman_controller.placement import Choose, place
from dragoman_controller.placer import Placer
from dragoman_controller.poison import Life, PoisonGuard
from dragoman_controller.policy import Policy, PolicyStore
from dragoman_controller.prefix_index import Applied, PrefixIndex
from dragoman_controller.quote import Judgement, Quotes, Went
from dragoman_controller.tickets import CellKey, TicketMinter
from dragoman_controller.tuples import new

HEARTBEAT_INTERVAL_SECONDS = 0.2
TICK_SECONDS = 0.05
_MAX_LOST_LIVES = 4096


class Outcome(NamedTuple):
    """How a request ended at its agent; times in seconds from acceptance."""

    jti: bytes
    ttft_seconds: float
    total_seconds: float
    output_tokens: int
    incomplete: bool
    engine_lost: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prompt_digest: bytes = b""


@dataclass(frozen=True, slots=True)
class CommandResult:
    """What became of a command; `code` 0 is success. `hint_outcome` is None for all but prefetches."""

    command_id: str
    code: int
    message: str
    hint_outcome: str | None = None


@dataclass(frozen=True, slots=True)
class Controller:
    """One controller of the cell; its id is drawn at its start."""

    controller_id: str
    address: str


class CellObserver(Observer, Protocol):
    """Counts what happens in a cell."""

    def judged(self, judgements: Sequence[Judgement]) -> None:
        """A quote met its outcome."""

    def hinted(self, outcome: str) -> None:
        """A prefetch hint ended."""


class Cell:
    """One cell of agents under this controller."""

    def __init__(
        self,
        keys: tuple[CellKey, ...],
        policy: Policy,
        observer: CellObserver,
        clock: Callable[[], float] = time.monotonic,
        rng: Random | None = None,
        choose: Choose = place,
        library: Library | None = None,
    ) -> None:
        """`choose` picks the agent of each request; a simulator compares others with `place`. `library`: native code that searches and learns."""
        self.clock = clock
        self._observer = observer
        self.fleet = Fleet(self._on_change)
        self.ledger, self.index = Ledger(), PrefixIndex()
        self.quotes = Quotes(make=Learning(library).make) if library is not None else Quotes()
        self.minter = TicketMinter(keys)
        self.placements = Placements()
        self.policy = PolicyStore(policy, lambda _: self._notify())
        self.placer = Placer(
            self.fleet,
            self.ledger,
            self.index,
            self.quotes,
            self.minter,
            self.placements,
            clock,
            rng or Random(),
            choose,
            library,
        )
        self._lost_lives: OrderedDict[Life, None] = OrderedDict()
        self.poison = PoisonGuard(self._is_lost, clock)
        self.hints = Hints(
            Parts(
                fleet=self.fleet,
                placer=self.placer,
                ledger=self.ledger,
                index=self.index,
                minter=self.minter,
                send=self.send,
                remaining_seconds=self.remaining_seconds,
                count=observer.hinted,
                clock=clock,
            )
        )
        self.admission = Admission(self.placer, self.policy, observer, clock, self.poison, self.hints.queued)
        self.controllers: tuple[Controller, ...] = ()
        self._outboxes: dict[str, Outbox] = {}
        self._watchers: set[Callable[[], None]] = set()
        self._streams: dict[str, int] = {}
        self._command_ids = itertools.count(1)

    def watch(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Calls back, without details, after each change of fleet or policy. Returns what ends the watch."""
        self._watchers.add(callback)
        return lambda: self._watchers.discard(callback)

    def take_controllers(self, controllers: tuple[Controller, ...]) -> None:
        """Takes the list of the cell's controllers; agents hear of it with their next beat."""
        self.controllers = controllers

    def register(self, spec: AgentSpec, epoch: int, agent_monotonic_ms: int) -> Member:
        """Makes an agent a member. Raises DragomanError."""
        present = self.fleet.get(spec.agent_id)
        if present is not None and present.epoch == epoch:
            self.placer.remove(present)
        member = self.fleet.register(spec, epoch, agent_monotonic_ms, self.clock())
        member.confirmed_key_ids = self.minter.key_ids
        self._outboxes.setdefault(member.lease_id, Outbox())
        self.placer.remember_plan(member)
        self.placer.refresh(member)
        return member

    def connect(self, member: Member) -> int:
        """A Heartbeat stream of a member begins; returns its number."""
        self._streams[member.lease_id] = number = next(self._command_ids)
        return number

    def disconnect(self, member: Member, stream: int) -> None:
        """A Heartbeat stream ended. Only the member's latest one counts."""
        if self._streams.get(member.lease_id) == stream:
            self.fleet.disconnect(member, self.clock())

    def beat(
        self,
        member: Member,
        reported: AgentState,
        load: Load,
        agent_monotonic_ms: int,
        outcomes: Iterable[Outcome] = (),
        results: Iterable[CommandResult] = (),
    ) -> None:
        """Takes one beat; waiting requests get the room it shows."""
        now = self.clock()
        for outcome in outcomes:
            self._take_outcome(member, outcome)
        for result in results:
            self._take_result(member, result)
        self.fleet.beat(member, reported, load, agent_monotonic_ms, now)
        for grant in self.ledger.sweep(member.agent_id, member.epoch, load, now):
            self._ended(grant, "expired")
        self.placer.refresh(member)
        self.admission.dispatch([model.name for model in member.spec.models])

    def deregister(self, lease_id: str, outcomes: Iterable[Outcome] = ()) -> None:
        """An agent leaves, and tells its last outcomes. An unknown lease is none of ours, so that is done already."""
        member = self.fleet.holder(lease_id)
        if member is not None:
            for outcome in outcomes:
                self._take_outcome(member, outcome)
            member.left = True
            self.fleet.deregister(lease_id)

    def outbox(self, member: Member) -> Outbox:
        """The commands for a member."""
        return self._outboxes[member.lease_id]

    def send(self, member: Member, command: Command) -> str:
        """Puts a command on its way with the next beat; returns its id."""
        command_id = f"{member.lease_id}-{next(self._command_ids)}"
        self.outbox(member).put(command_id, command)
        return command_id

    def drain(self, member: Member, command: Drain) -> str:
        """No new grants to this member from now on, and tells it to drain."""
        self.fleet.drain(member, self.clock())
        return self.send(member, command)

    def undrain(self, member: Member) -> str:
        """Tells a member to take requests again; it gets some once it says that it does."""
        return self.send(member, Undrain())

    def remaining_seconds(self, grant: Grant) -> float:
        """Predicted time until the last token a request may have, as such predictions came true at its agent lately."""
        finish = grant.finish_seconds(grant.output_tokens)
        quotes = self.quotes.of(grant.agent_id)
        expected = quotes.quote(grant.ttft_seconds, grant.tpot_seconds, finish, grant.lengths).finish.expected
        # One that is late has at least a token to go.
        return max(grant.granted_at + expected - self.clock(), grant.tpot_seconds)

    def apply_kv_events(
        self,
        member: Member,
        sequence: int,
        stored: Iterable[int],
        removed: Iterable[int],
        snapshot: bool,
        *,
        stored_below: Iterable[int] = (),
        removed_below: Iterable[int] = (),
    ) -> Applied:
        """Takes one message of KV events of a member; `below` is what lies in tiers below its device."""
        return self.index.apply(
            member.agent_id, member.epoch, sequence, stored, removed, snapshot,
            stored_below=stored_below, removed_below=removed_below,
        )  # fmt: skip

    def release_ticket(self, token: bytes) -> None:
        """Takes back an unused ticket. One that ended already is taken back too. Raises TICKET_INVALID."""
        grant = self.ledger.end(self.minter.open(token).jti)
        if grant is not None:
            self._ended(grant, "released")
            member = self.fleet.get(grant.agent_id)
            if member is not None:
                self.placer.refresh(member)
            self.admission.dispatch([grant.model])

    def rotate_keys(self, keys: tuple[CellKey, ...]) -> None:
        """Takes new cell keys. An agent's tickets carry the newest key only once it has confirmed it."""
        self.minter.rotate(keys)
        for member in self.fleet:
            self.send(member, RotateKeys(self.minter.agent_keys(member.agent_id, member.epoch)))

    def tick(self) -> None:
        """Lets time pass: silence, waits, unused tickets."""
        self.fleet.tick(self.clock())
        self.admission.tick()

    def member(self, agent_id: str) -> Member:
        """The member with this id. Raises INVALID_REQUEST that names those there are."""
        member = self.fleet.get(agent_id)
        if member is None:
            names = ", ".join(sorted(repr(one.agent_id) for one in self.fleet)) or "none"
            raise DragomanError(
                error_pb2.ERROR_REASON_INVALID_REQUEST,
                f"there is no agent {agent_id!r}: members are {names}",
                metadata={"param": "agent_id"},
            )
        return member

    def _is_lost(self, life: Life) -> bool:
        """Whether a life of an agent was lost, or looks so. One that left by itself was not."""
        member = self.fleet.get(life[0])
        if member is not None and member.epoch == life[1]:
            return member.state in (AgentState.SUSPECT, AgentState.DEAD)
        return life in self._lost_lives

    def _on_change(self, change: Change) -> None:
        member = change.member
        if change.removed:
            if not member.left:
                self._lost_lives[member.agent_id, member.epoch] = None
                if len(self._lost_lives) > _MAX_LOST_LIVES:
                    self._lost_lives.popitem(last=False)
            for grant in self.ledger.drop_life(member.agent_id, member.epoch):
                self._ended(grant, "lost")
            self.placer.remove(member)
            self.index.remove_agent(member.agent_id)
            self._outboxes.pop(member.lease_id, None)
            self._streams.pop(member.lease_id, None)
        else:
            self.placer.refresh(member)
        self._notify()

    def _notify(self) -> None:
        for callback in list(self._watchers):
            callback()

    def _take_outcome(self, member: Member, outcome: Outcome) -> None:
        if outcome.engine_lost:
            self.poison.lost(outcome.prompt_digest, (member.agent_id, member.epoch))
        elif not outcome.incomplete:
            self.poison.finished(outcome.prompt_digest)
        grant = self.ledger.end(outcome.jti)
        if grant is None:
            return
        self.admission.forget(grant.key)
        # The fallback's agent was not the one the prediction was made for.
        if outcome.incomplete or grant.agent_id != member.agent_id or not outcome.output_tokens:
            return
        num_tokens = -(-outcome.output_tokens // grant.num_slots)
        went = new(Went, (outcome.ttft_seconds, outcome.total_seconds, num_tokens))
        self._observer.judged(self.placer.learn(grant, went, outcome.prompt_tokens, outcome.cached_tokens))

    def _take_result(self, member: Member, result: CommandResult) -> None:
        command = self.outbox(member).acknowledge(result.command_id)
        if isinstance(command, RotateKeys) and result.code == 0:
            member.confirmed_key_ids = tuple(key_id for key_id, _ in command.keys)
        if isinstance(command, Drain) and result.code != 0:
            self.fleet.refuse_drain(member, result.message or f"code {result.code}", self.clock())
        if isinstance(command, Undrain):
            if result.code == 0:
                self.fleet.undrain(member, self.clock())
            else:
                member.undrain_refused_because = result.message or f"code {result.code}"
        if result.hint_outcome is not None and command is not None:
            self._observer.hinted(result.hint_outcome)

    def _ended(self, grant: Grant, result: str) -> None:
        self.admission.forget(grant.key)
        self._observer.ticket(result)
