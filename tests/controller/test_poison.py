"""A prompt that engines are lost to: two strikes quarantine it, a finished run clears it, time forgets it."""

from __future__ import annotations

from typing import Any

import pytest

from dragoman.errors import DragomanError
from dragoman.v1 import error_pb2
from dragoman_controller.cell import Outcome
from dragoman_controller.fleet import AgentState
from dragoman_controller.granted import Granted
from dragoman_controller.poison import MAX_NUM_SUSPECTS, QUARANTINE_SECONDS, PoisonGuard
from dragoman_controller.requests import Resume

POISON = b"x" * 32
QUARANTINED = error_pb2.ERROR_REASON_PROMPT_QUARANTINED


@pytest.fixture
def cell(bench: Any) -> Any:
    for number, agent_id in enumerate("abcd"):
        bench.join(agent_id, epoch=number + 1)
    return bench


def run(cell: Any, attempt: int = 0, origin: tuple[str, int] = ("", 0), request_id: str = "r") -> Any:
    """Asks for the poisonous prompt; the answer."""
    resume = Resume(origin[0], origin[1], attempt, 0) if attempt else None
    answers = cell.ask(request_id, prompt_digest=POISON, resume=resume)
    return answers[-1] if answers else None


def lose_engine(cell: Any, granted: Granted) -> tuple[str, int]:
    """The engine of the agent dies with the request; the agent says so and leaves."""
    agent_id, epoch = granted.ticket.agent_id, granted.ticket.epoch
    outcome = Outcome(granted.ticket.jti, 0, 0, 0, True, engine_lost=True, prompt_digest=POISON)
    cell.cell.deregister(cell.members[agent_id].lease_id, [outcome])
    return agent_id, epoch


def test_two_lost_engines_quarantine_a_prompt_and_no_third_is_lost(cell: Any) -> None:
    first = lose_engine(cell, run(cell))
    second = lose_engine(cell, run(cell, 1, first))
    refused = run(cell, 2, second)
    assert isinstance(refused, DragomanError) and refused.reason == QUARANTINED and not refused.retryable
    assert first[0] in refused.message and second[0] in refused.message and "do not send it again" in refused.message
    anew = run(cell, request_id="another request with this prompt")
    assert isinstance(anew, DragomanError) and anew.reason == QUARANTINED
    assert isinstance(cell.ask("other", prompt_digest=b"o" * 32)[-1], Granted)
    assert len(cell.cell.fleet) == 2 and cell.tickets["prompt_quarantined"] == 2
    cell.pass_time(QUARANTINE_SECONDS + 1, beating=[m.agent_id for m in cell.cell.fleet])
    assert isinstance(run(cell, request_id="later"), Granted)


def test_one_engine_may_be_lost_with_many_streams_of_one_prompt(cell: Any) -> None:
    grants = [run(cell, request_id=str(number)) for number in range(4)]
    for granted in grants:
        agent = granted.ticket.agent_id
        cell.beat(agent, outcomes=[Outcome(granted.ticket.jti, 0, 0, 0, True, agent == "a", prompt_digest=POISON)])
    assert isinstance(run(cell, request_id="next"), Granted)


def test_a_run_that_ends_clears_its_prompt(cell: Any) -> None:
    first = lose_engine(cell, run(cell))
    granted = run(cell, 1, first)
    cell.beat(granted.ticket.agent_id, outcomes=[Outcome(granted.ticket.jti, 0.1, 0.5, 5, False, prompt_digest=POISON)])
    second = lose_engine(cell, run(cell, request_id="again"))
    assert isinstance(run(cell, 1, second, request_id="again"), Granted)


def test_what_ran_by_the_tickets_of_another_controller_counts(cell: Any) -> None:
    """Agents tell every controller; only the one that minted a ticket knows it."""
    for agent_id in "ab":
        cell.beat(agent_id, outcomes=[Outcome(b"not ours", 0, 0, 0, True, True, prompt_digest=POISON)])
    assert run(cell).reason == QUARANTINED
    cell.beat("c", outcomes=[Outcome(b"nor this", 0.1, 0.5, 5, False, prompt_digest=POISON)])
    assert isinstance(run(cell), Granted)


def test_agents_that_vanish_count_and_those_that_leave_do_not(cell: Any) -> None:
    first = run(cell).ticket
    cell.cell.fleet.deregister(cell.members[first.agent_id].lease_id)  # silent removal stands for a lost machine
    second = run(cell, 1, (first.agent_id, first.epoch)).ticket
    cell.cell.deregister(cell.members[second.agent_id].lease_id)  # it was drained and said goodbye
    answers = cell.ask("r", prompt_digest=POISON, resume=Resume(second.agent_id, second.epoch, 2, 0))
    cell.pass_time(0.5, beating=[m.agent_id for m in cell.cell.fleet])
    (third,) = answers
    assert isinstance(third, Granted), "only one was lost"
    member = cell.members[third.ticket.agent_id]
    cell.cell.disconnect(member, cell.cell.connect(member))
    assert member.state is AgentState.SUSPECT
    refused = run(cell, 3, (third.ticket.agent_id, third.ticket.epoch))
    assert isinstance(refused, DragomanError) and refused.reason == QUARANTINED


def test_a_life_the_controller_never_knew_is_no_strike(cell: Any) -> None:
    for number in range(5):
        assert isinstance(run(cell, 1, (f"gone-{number}", 99), request_id=str(number)), Granted)


def test_a_resume_waits_for_the_verdict_on_its_agent(cell: Any) -> None:
    first = lose_engine(cell, run(cell))
    granted = run(cell, 1, first)
    origin = granted.ticket.agent_id, granted.ticket.epoch
    waiting = cell.ask("r", prompt_digest=POISON, resume=Resume(*origin, 2, 0))
    assert waiting == [], "the second agent looks well: it is not known yet that it was lost"
    lose_engine(cell, granted)
    cell.cell.tick()
    (refused,) = waiting
    assert isinstance(refused, DragomanError) and refused.reason == QUARANTINED


def test_a_resume_is_placed_when_its_agent_turns_out_well(cell: Any) -> None:
    first = lose_engine(cell, run(cell))
    granted = run(cell, 1, first)
    waiting = cell.ask("r", prompt_digest=POISON, resume=Resume(granted.ticket.agent_id, granted.ticket.epoch, 2, 0))
    cell.pass_time(0.5, beating=[m.agent_id for m in cell.cell.fleet])
    (answer,) = waiting
    assert isinstance(answer, Granted)


def test_memory_is_bounded() -> None:
    guard = PoisonGuard(lambda life: False, lambda: 0.0)
    for number in range(MAX_NUM_SUSPECTS + 100):
        guard.lost(number.to_bytes(32, "little"), ("a", 1))
    assert len(guard._suspects) == MAX_NUM_SUSPECTS and len(guard) == 0
    guard.lost(b"", ("a", 1))
    assert b"" not in guard._suspects
