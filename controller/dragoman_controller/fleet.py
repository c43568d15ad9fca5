"""Who is a member, in which life, and how alive: a state machine over registrations, beats and silence.

A member is what its live Heartbeat says. Nothing here reads a clock: `now` is the controller's monotonic time in seconds.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from dragoman.errors import DragomanError
from dragoman.limits import MAX_AGENT_ID_BYTES
from dragoman.v1 import error_pb2
from dragoman_controller.steps import StepTable

# Within 3 s: the timer that sees it ticks every 50 ms.
SUSPECT_SECONDS = 2.95
DEAD_SECONDS = 6.0
REMOVE_SECONDS = 15.0
# The timer ticks every 50 ms; when it comes this late it is the controller that was away.
STALL_SECONDS = 1.0
_MAX_FENCED_EPOCHS = 16
_MAX_FENCED_AGENTS = 4096


class AgentState(IntEnum):
    """Life of an agent; the numbers are those of dragoman.v1.AgentState."""

    STARTING = 1
    SERVING = 2
    DRAINING = 3
    SUSPECT = 4
    DEAD = 5

    @property
    def label(self) -> str:
        """Such as "serving"."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class KvTerms:
    """How an agent keeps K and V; blocks pass between agents of equal terms and model."""

    kv_type: str
    layout: str
    block_tokens: int
    bytes_per_token: int


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model as an agent serves it."""

    name: str
    digest: bytes
    max_context_tokens: int
    max_running_requests: int
    max_waiting_requests: int
    steps: StepTable
    plan_digest: bytes = b""
    kv: KvTerms | None = None
    """None: the agent exchanges no KV blocks."""

    @property
    def num_slots(self) -> int:
        """Requests the agent takes at once, running or waiting."""
        return self.max_running_requests + self.max_waiting_requests


@dataclass(frozen=True, slots=True)
class AgentSpec:
    """What an agent says of itself at registration. `description` is its message, kept only to be shown."""

    agent_id: str
    data_address: str
    models: tuple[ModelSpec, ...]
    architecture: str = ""
    description: bytes = b""


class Load(NamedTuple):
    """Load of an agent at one instant; ages in seconds, as of when it was sent."""

    waiting_requests: int = 0
    running_requests: int = 0
    pending_prefill_tokens: int = 0
    running_context_tokens: int = 0
    free_kv_blocks: int = 0
    age_seconds: float = 0.0
    step_age_seconds: float = 0.0
    step_count: int = 0
    step_seconds: float = 0.0
    kv_fetch_bytes_per_second: float = 0.0
    kv_fetch_base_seconds: float = 0.0
    kv_tier_bytes_per_second: float = 0.0

    @property
    def num_requests(self) -> int:
        """Requests at the agent."""
        return self.waiting_requests + self.running_requests


@dataclass(slots=True)
class Member:
    """One life of one agent. Written by its Fleet alone."""

    spec: AgentSpec
    epoch: int
    lease_id: str
    heard_at: float
    agent_monotonic_ms: int
    reported: AgentState = AgentState.STARTING
    state: AgentState = AgentState.STARTING
    load: Load = field(default_factory=Load)
    connected: bool = True
    draining: bool = False
    drain_refused_because: str = ""
    undrain_refused_because: str = ""
    left: bool = False
    """Whether it said goodbye; a member that did not was lost."""
    confirmed_key_ids: tuple[int, ...] = ()
    unheard_seconds: float = 0.0
    """Time since its last beat in which the controller itself did not run, and could hear nobody."""
    agent_id: str = field(init=False)
    """Its identifier, the same in every `spec` of it."""

    def __post_init__(self) -> None:
        self.agent_id = self.spec.agent_id

    def agent_clock_ms(self, now: float) -> int:
        """The agent's monotonic clock as it should stand now."""
        return self.agent_monotonic_ms + int((now - self.heard_at) * 1000)

    def silence_seconds(self, now: float) -> float:
        """Time since the last sign that its engine steps. A serving agent whose engine is stuck counts as silent."""
        silence = now - self.heard_at - self.unheard_seconds
        if self.reported in (AgentState.SERVING, AgentState.DRAINING):
            silence += self.load.step_age_seconds
        return silence


def observed_state(member: Member, now: float) -> AgentState:
    """The state of a member: what it reports, unless it is silent or was told to drain."""
    silence = member.silence_seconds(now)
    if silence >= DEAD_SECONDS:
        return AgentState.DEAD
    if silence >= SUSPECT_SECONDS or not member.connected:
        return AgentState.SUSPECT
    if member.draining and member.reported is AgentState.SERVING:
        return AgentState.DRAINING
    return member.reported


@dataclass(frozen=True, slots=True)
class Change:
    """A member that is new, changed its state, or left. `removed`: it is no longer a member."""

    member: Member
    removed: bool = False


class Fleet:
    """Owns the members. Every change of membership or state goes to `on_change`, in order."""

    def __init__(self, on_change: Callable[[Change], None]) -> None:
        self._on_change = on_change
        self._members: dict[str, Member] = {}
        self._by_lease: dict[str, Member] = {}
        self._fenced: dict[str, deque[int]] = {}
        self._ticked_at: float | None = None

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Member]:
        return iter(list(self._members.values()))

    def get(self, agent_id: str) -> Member | None:
        """The member with this id, in whatever state."""
        return self._members.get(agent_id)

    def register(self, spec: AgentSpec, epoch: int, agent_monotonic_ms: int, now: float) -> Member:
        """The member, new or the same again. Raises DUPLICATE_AGENT, EPOCH_STALE or INVALID_REQUEST."""
        check_spec(spec, epoch)
        if epoch in self._fenced.get(spec.agent_id, ()):
            raise DragomanError(
                error_pb2.ERROR_REASON_EPOCH_STALE,
                f"agent {spec.agent_id!r} was replaced by a newer life of it: start it again, it then has a new epoch",
            )
        present = self._members.get(spec.agent_id)
        if present is not None and present.epoch != epoch:
            if observed_state(present, now) not in (AgentState.SUSPECT, AgentState.DEAD):
                raise DragomanError(
                    error_pb2.ERROR_REASON_DUPLICATE_AGENT,
                    f"an agent {spec.agent_id!r} is live at {present.spec.data_address}: "
                    "give each agent its own --agent-id",
                    metadata={"agent_id": spec.agent_id, "data_address": present.spec.data_address},
                )
            self._fence(present)
            self._remove(present)
            present = None
        if present is None:
            present = Member(spec, epoch, secrets.token_hex(8), now, agent_monotonic_ms)
            self._members[spec.agent_id] = present
            self._by_lease[present.lease_id] = present
        else:
            present.spec, present.heard_at, present.agent_monotonic_ms = spec, now, agent_monotonic_ms
            present.connected, present.unheard_seconds = True, 0.0
        present.state = observed_state(present, now)
        self._on_change(Change(present))
        return present

    def member_of(self, lease_id: str, epoch: int) -> Member:
        """The member that holds the lease. Raises LEASE_EXPIRED or EPOCH_STALE."""
        member = self._by_lease.get(lease_id)
        if member is None:
            raise DragomanError(
                error_pb2.ERROR_REASON_LEASE_EXPIRED, "this controller does not hold the lease: register again"
            )
        if member.epoch != epoch:
            raise DragomanError(
                error_pb2.ERROR_REASON_EPOCH_STALE, "the lease belongs to another life of the agent: register again"
            )
        return member

    def beat(self, member: Member, reported: AgentState, load: Load, agent_monotonic_ms: int, now: float) -> None:
        """Takes one beat of a member."""
        member.heard_at, member.agent_monotonic_ms = now, agent_monotonic_ms
        member.reported, member.load, member.connected, member.unheard_seconds = reported, load, True, 0.0
        self._observe(member, now)

    def disconnect(self, member: Member, now: float) -> None:
        """Its Heartbeat broke: no new grants from now on, until it beats again."""
        if self._by_lease.get(member.lease_id) is member:
            member.connected = False
            self._observe(member, now)

    def drain(self, member: Member, now: float) -> None:
        """It was told to drain: no new grants, whether it knows yet or not."""
        member.draining, member.drain_refused_because = True, ""
        self._observe(member, now)

    def undrain(self, member: Member, now: float) -> None:
        """It takes requests again."""
        member.draining, member.undrain_refused_because = False, ""
        self._observe(member, now)

    def refuse_drain(self, member: Member, why: str, now: float) -> None:
        """It said that it will not drain: it takes requests again."""
        member.draining, member.drain_refused_because = False, why
        self._observe(member, now)

    def holder(self, lease_id: str) -> Member | None:
        """The member that holds the lease, in whatever state."""
        return self._by_lease.get(lease_id)

    def deregister(self, lease_id: str) -> None:
        """Ends a membership at once. An unknown lease is none of ours, so that is done already."""
        member = self._by_lease.get(lease_id)
        if member is not None:
            self._remove(member)

    def tick(self, now: float) -> None:
        """Lets silence take effect: suspect, dead, removed.

        A gap between two ticks is time in which this process was stopped or the machine slept: beats may lie unread,
        so it is not held against the agents.
        """
        gap = now - self._ticked_at if self._ticked_at is not None else 0.0
        self._ticked_at = now
        for member in list(self._members.values()):
            if gap >= STALL_SECONDS:
                member.unheard_seconds += min(gap, now - member.heard_at)
            silence = now - member.heard_at - member.unheard_seconds
            if silence >= REMOVE_SECONDS:
                self._remove(member)
            elif silence + member.load.step_age_seconds < SUSPECT_SECONDS and member.state is member.reported:
                continue  # what observed_state would say of nearly all of them, in a tenth of the time
            else:
                self._observe(member, now)

    def _observe(self, member: Member, now: float) -> None:
        state = observed_state(member, now)
        if state is not member.state:
            member.state = state
            self._on_change(Change(member))

    def _remove(self, member: Member) -> None:
        del self._members[member.agent_id]
        del self._by_lease[member.lease_id]
        self._on_change(Change(member, removed=True))

    def _fence(self, member: Member) -> None:
        if len(self._fenced) >= _MAX_FENCED_AGENTS:
            del self._fenced[next(iter(self._fenced))]
        self._fenced.setdefault(member.agent_id, deque(maxlen=_MAX_FENCED_EPOCHS)).append(member.epoch)


def check_spec(spec: AgentSpec, epoch: int) -> None:
    """Raises INVALID_REQUEST for an agent that could never be given a request."""
    if not spec.agent_id or len(spec.agent_id.encode()) > MAX_AGENT_ID_BYTES:
        raise _invalid(
            "agent.agent_id",
            f"agent id {spec.agent_id!r} has {len(spec.agent_id.encode())} bytes, must have 1 to {MAX_AGENT_ID_BYTES}: "
            "set a shorter --agent-id",
        )
    if not epoch:
        raise _invalid("epoch", "epoch is 0: an agent draws a random one at its start")
    if not spec.data_address:
        raise _invalid("agent.data_address", "data_address is empty: clients need one to dial")
    if not spec.models:
        raise _invalid("agent.models", "the agent serves no model: register once one is loaded")
    for model in spec.models:
        if not model.name or not model.digest:
            raise _invalid("agent.models", f"model {model.name!r} lacks its name or digest")
        if model.max_context_tokens < 2 or model.max_running_requests < 1:
            raise _invalid(
                "agent.models",
                f"model {model.name!r} has a context of {model.max_context_tokens} tokens and "
                f"{model.max_running_requests} running requests: at least 2 and 1 are needed",
            )


def _invalid(param: str, message: str) -> DragomanError:
    return DragomanError(error_pb2.ERROR_REASON_INVALID_REQUEST, message, metadata={"param": param})
