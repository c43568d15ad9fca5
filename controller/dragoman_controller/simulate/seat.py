"""The place of one agent in a cell: its present life, and what it has still to tell the controller."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from dragoman.errors import DragomanError
from dragoman_controller.cell import Cell, CommandResult, Outcome
from dragoman_controller.commands import Drain
from dragoman_controller.fleet import AgentSpec, AgentState, Member, ModelSpec
from dragoman_controller.simulate.agent import SimulatedAgent
from dragoman_controller.simulate.profiles import AgentProfile


def full_agent(agent_id: str, profile: AgentProfile, model: str) -> AgentSpec:
    """What an agent of this profile says of itself at registration."""
    served = ModelSpec(
        name=model,
        digest=hashlib.sha256(model.encode()).digest(),
        max_context_tokens=profile.max_context_tokens,
        max_running_requests=profile.max_running_requests,
        max_waiting_requests=profile.max_waiting_requests,
        steps=profile.steps,
        plan_digest=hashlib.sha256(profile.name.encode()).digest(),
    )
    return AgentSpec(agent_id, "192.0.2.1:50051", (served,), profile.name)


@dataclass(slots=True, eq=False)
class Seat:
    """Owner of an agent's membership."""

    spec: AgentSpec
    profile: AgentProfile
    agent: SimulatedAgent = field(init=False)
    member: Member | None = None
    outcomes: list[Outcome] = field(default_factory=list)
    results: list[CommandResult] = field(default_factory=list)
    has_news: bool = True
    beat_at: float = 0.0
    num_preemptions: int = 0
    """Of earlier lives."""
    _stream: int = 0
    _kv_sequence: int = 0
    _needs_snapshot: bool = False

    def __post_init__(self) -> None:
        self.agent = SimulatedAgent(self.profile, self.spec.agent_id, 1)

    @property
    def is_member(self) -> bool:
        """Whether the present controller has it."""
        return self.member is not None

    def join(self, cell: Cell, now: float) -> bool:
        """Registers and beats; False where the controller does not take it yet."""
        try:
            self.member = cell.register(self.spec, self.agent.epoch, int(now * 1000))
        except DragomanError:
            return False  # its former life is not over there: it tries again with its next beat, as an agent does
        self._stream = cell.connect(self.member)
        self._kv_sequence, self._needs_snapshot = 0, True
        self.beat(cell, now)
        return True

    def beat(self, cell: Cell, now: float) -> None:
        """One Heartbeat, and the KV events since the last one."""
        member, agent = self.member, self.agent
        assert member is not None
        stored, removed = agent.take_events()
        if self._needs_snapshot:
            stored, removed = agent.all_units(), []
        if stored or removed or self._needs_snapshot:
            self._kv_sequence += 1
            cell.apply_kv_events(member, self._kv_sequence, stored, removed, self._needs_snapshot)
            self._needs_snapshot = False
        outcomes, self.outcomes = self.outcomes, []
        results, self.results = self.results, []
        self.has_news, self.beat_at = False, now
        if agent.is_draining and not agent.num_requests:
            self.outcomes = outcomes
            self.leave(cell)
            return
        state = AgentState.DRAINING if agent.is_draining else AgentState.SERVING
        cell.beat(member, state, agent.load(now), int(now * 1000), outcomes, results)

    def drain(self, cell: Cell, command: Drain) -> None:
        """Told to drain; it takes no more from now on."""
        assert self.member is not None
        command_id = cell.drain(self.member, command)
        self.results.append(CommandResult(command_id, 0, ""))
        self.agent.is_draining = self.has_news = True

    def leave(self, cell: Cell) -> None:
        """Says goodbye, with its last outcomes."""
        assert self.member is not None
        cell.deregister(self.member.lease_id, self.outcomes)
        self.outcomes, self.member, self.agent.is_alive = [], None, False

    def disconnect(self, cell: Cell | None) -> None:
        """Its connection breaks, as that of a killed process does."""
        if cell is not None and self.member is not None:
            cell.disconnect(self.member, self._stream)
        self.member, self.outcomes = None, []

    def forget_controller(self) -> None:
        """The controller is gone; outcomes are kept for the next one."""
        self.member, self.has_news = None, True

    def revive(self) -> None:
        """A new life begins, with an empty cache."""
        self.num_preemptions += self.agent.num_preemptions
        self.agent = SimulatedAgent(self.profile, self.spec.agent_id, self.agent.epoch + 1)
        self.has_news = True
