"""Membership: what beats, silence, restarts and duplicates do to an agent's state."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dragoman.errors import DragomanError
from dragoman.step_model import StepModel
from dragoman.v1 import error_pb2
from dragoman_controller.fleet import SUSPECT_SECONDS, AgentSpec, AgentState, Change, Fleet, Load, Member, ModelSpec
from dragoman_controller.steps import StepTable

STEPS = StepTable(StepModel((1,), (0,), (0.01,), 1000.0, 0.001))


def spec(agent_id: str = "a", **fields: object) -> AgentSpec:
    model = ModelSpec("tiny", b"d" * 32, 4096, 4, 2, STEPS)
    return AgentSpec(**{"agent_id": agent_id, "data_address": "127.0.0.1:1", "models": (model,), **fields})  # type: ignore[arg-type]


def fleet() -> tuple[Fleet, list[Change]]:
    changes: list[Change] = []
    return Fleet(changes.append), changes


def serving(members: Fleet, now: float = 0.0, epoch: int = 1) -> Member:
    member = members.register(spec(), epoch, 1000, now)
    members.beat(member, AgentState.SERVING, Load(), 1000, now)
    return member


def tick_until(members: Fleet, start: float, end: float) -> None:
    """Ticks every tenth of a second, as the timer would or so."""
    for tenth in range(round((end - start) * 10) + 1):
        members.tick(start + tenth / 10)


def reason_of(raised: pytest.ExceptionInfo[DragomanError]) -> int:
    return raised.value.reason


@pytest.mark.parametrize(
    ("silence", "state"),
    [
        (2.9, AgentState.SERVING),
        (3.0, AgentState.SUSPECT),
        (5.9, AgentState.SUSPECT),
        (6.0, AgentState.DEAD),
        (14.9, AgentState.DEAD),
    ],
)
def test_silence_makes_suspect_then_dead(silence: float, state: AgentState) -> None:
    members, _ = fleet()
    member = serving(members)
    tick_until(members, 0.0, silence)
    assert member.state is state
    assert members.get("a") is member


def test_after_15_seconds_of_silence_it_is_removed_and_its_lease_is_gone() -> None:
    members, changes = fleet()
    member = serving(members)
    tick_until(members, 0.0, 15.0)
    assert members.get("a") is None
    assert changes[-1].removed
    with pytest.raises(DragomanError) as raised:
        members.member_of(member.lease_id, member.epoch)
    assert reason_of(raised) == error_pb2.ERROR_REASON_LEASE_EXPIRED


def test_a_stuck_engine_counts_as_silence_although_beats_arrive() -> None:
    members, _ = fleet()
    member = serving(members)
    members.beat(member, AgentState.SERVING, Load(step_age_seconds=3.0), 1100, 0.1)
    assert member.state is AgentState.SUSPECT
    members.beat(member, AgentState.SERVING, Load(step_age_seconds=6.5), 1200, 3.6)
    assert member.state is AgentState.DEAD
    members.beat(member, AgentState.SERVING, Load(), 1300, 3.8)
    assert member.state is AgentState.SERVING


def test_agents_are_not_blamed_for_the_time_the_controller_itself_was_stopped() -> None:
    members, _ = fleet()
    member = serving(members)
    tick_until(members, 0.0, 1.0)
    members.tick(61.0)
    assert member.state is AgentState.SERVING and members.get("a") is member
    tick_until(members, 61.0, 63.5)
    assert member.state is AgentState.SUSPECT
    members.beat(member, AgentState.SERVING, Load(), 1000, 63.6)
    tick_until(members, 63.6, 66.5)
    assert member.state is AgentState.SERVING
    members.tick(66.7)
    assert member.state is AgentState.SUSPECT


def test_a_broken_stream_stops_grants_at_once_and_a_beat_mends_it() -> None:
    members, _ = fleet()
    member = serving(members)
    members.disconnect(member, 0.1)
    assert member.state is AgentState.SUSPECT
    members.beat(member, AgentState.SERVING, Load(), 1000, 0.2)
    assert member.state is AgentState.SERVING


def test_registering_again_with_the_same_epoch_is_the_same_membership() -> None:
    members, _ = fleet()
    member = serving(members)
    assert members.register(spec(), 1, 2000, 1.0) is member
    assert len(members) == 1


def test_a_second_live_agent_with_the_id_is_refused() -> None:
    members, _ = fleet()
    serving(members)
    with pytest.raises(DragomanError) as raised:
        members.register(spec(), 2, 1000, 1.0)
    assert reason_of(raised) == error_pb2.ERROR_REASON_DUPLICATE_AGENT
    assert "--agent-id" in raised.value.message


def test_a_restarted_agent_takes_over_and_its_earlier_life_is_fenced() -> None:
    members, changes = fleet()
    old = serving(members)
    members.disconnect(old, 1.0)
    new = members.register(spec(), 2, 50, 1.1)
    assert members.get("a") is new
    assert [change.member for change in changes if change.removed] == [old]
    with pytest.raises(DragomanError) as raised:
        members.register(spec(), 1, 1000, 9.0)
    assert reason_of(raised) == error_pb2.ERROR_REASON_EPOCH_STALE
    with pytest.raises(DragomanError) as raised:
        members.member_of(old.lease_id, 1)
    assert reason_of(raised) == error_pb2.ERROR_REASON_LEASE_EXPIRED
    with pytest.raises(DragomanError) as raised:
        members.member_of(new.lease_id, 1)
    assert reason_of(raised) == error_pb2.ERROR_REASON_EPOCH_STALE


def test_a_member_told_to_drain_gets_nothing_new_before_it_knows() -> None:
    members, _ = fleet()
    member = serving(members)
    members.drain(member, 0.1)
    assert member.state is AgentState.DRAINING
    members.beat(member, AgentState.SERVING, Load(), 1000, 0.2)
    assert member.state is AgentState.DRAINING


def test_the_agents_clock_runs_on_between_beats() -> None:
    members, _ = fleet()
    member = serving(members, now=10.0)
    assert member.agent_clock_ms(11.5) == 2500


@pytest.mark.parametrize(
    ("fields", "epoch", "param"),
    [
        ({"agent_id": ""}, 1, "agent.agent_id"),
        ({"agent_id": "x" * 64}, 1, "agent.agent_id"),
        ({"data_address": ""}, 1, "agent.data_address"),
        ({"models": ()}, 1, "agent.models"),
        ({"models": (ModelSpec("m", b"", 4096, 1, 1, STEPS),)}, 1, "agent.models"),
        ({"models": (ModelSpec("m", b"d", 1, 1, 1, STEPS),)}, 1, "agent.models"),
        ({"models": (ModelSpec("m", b"d", 4096, 0, 1, STEPS),)}, 1, "agent.models"),
        ({}, 0, "epoch"),
    ],
)
def test_an_agent_that_could_never_serve_is_refused(fields: dict[str, object], epoch: int, param: str) -> None:
    members, _ = fleet()
    with pytest.raises(DragomanError) as raised:
        members.register(spec(**fields), epoch, 0, 0.0)
    assert raised.value.metadata["param"] == param


class MembershipMachine(RuleBasedStateMachine):
    """Random events on two agents; the expected state is computed from the latest event of each alone."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.changes: list[Change] = []
        self.members = Fleet(self.changes.append)
        self.heard: dict[str, float] = {}
        self.broken: dict[str, bool] = {}
        self.epochs = iter(range(1, 10_000))

    @rule(agent_id=st.sampled_from("ab"))
    def restart(self, agent_id: str) -> None:
        present = self.members.get(agent_id)
        try:
            member = self.members.register(spec(agent_id), next(self.epochs), 0, self.now)
        except DragomanError as error:
            assert error.reason == error_pb2.ERROR_REASON_DUPLICATE_AGENT
            assert not self.broken[agent_id] and self.now - self.heard[agent_id] < SUSPECT_SECONDS
            return
        assert present is None or self.broken[agent_id] or self.now - self.heard[agent_id] >= SUSPECT_SECONDS
        self.members.beat(member, AgentState.SERVING, Load(), 0, self.now)
        self.heard[agent_id], self.broken[agent_id] = self.now, False

    @rule(agent_id=st.sampled_from("ab"))
    def beat(self, agent_id: str) -> None:
        member = self.members.get(agent_id)
        if member is not None:
            self.members.beat(member, AgentState.SERVING, Load(), 0, self.now)
            self.heard[agent_id], self.broken[agent_id] = self.now, False

    @rule(agent_id=st.sampled_from("ab"))
    def disconnect(self, agent_id: str) -> None:
        member = self.members.get(agent_id)
        if member is not None:
            self.members.disconnect(member, self.now)
            self.broken[agent_id] = True

    @rule(agent_id=st.sampled_from("ab"))
    def leave(self, agent_id: str) -> None:
        member = self.members.get(agent_id)
        if member is not None:
            self.members.deregister(member.lease_id)
            self.heard.pop(agent_id)

    @precondition(lambda self: True)
    @rule(seconds=st.sampled_from([0.1, 1.0, 2.9, 3.0, 6.0, 15.0]))
    def wait(self, seconds: float) -> None:
        tick_until(self.members, self.now, self.now + seconds)
        self.now += round(seconds * 10) / 10
        self.heard = {agent_id: at for agent_id, at in self.heard.items() if self.now - at < 15}

    @invariant()
    def states_follow_from_the_latest_events(self) -> None:
        assert {member.agent_id for member in self.members} == set(self.heard)
        for member in self.members:
            silence = self.now - self.heard[member.agent_id]
            if silence >= 6:
                expected = AgentState.DEAD
            elif silence >= SUSPECT_SECONDS or self.broken[member.agent_id]:
                expected = AgentState.SUSPECT
            else:
                expected = AgentState.SERVING
            assert member.state is expected

    @invariant()
    def watchers_see_every_state(self) -> None:
        seen = {change.member.lease_id: change for change in self.changes}
        for member in self.members:
            assert not seen[member.lease_id].removed


TestMembership = MembershipMachine.TestCase
TestMembership.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
