"""The cell's events together: outcomes teach, lost agents free, keys rotate, placements are explained."""

from __future__ import annotations

from typing import Any

import pytest

from dragoman.v1 import ticket_pb2
from dragoman_controller.cell import CommandResult, Outcome
from dragoman_controller.commands import Drain, Outbox, RotateKeys
from dragoman_controller.explain import Placements, reason, weigh
from dragoman_controller.fleet import AgentState, Load
from dragoman_controller.granted import Granted
from dragoman_controller.intervals import lengths_of
from dragoman_controller.tickets import CellKey


def grant_of(answers: list[Any]) -> Granted:
    assert isinstance(answers[-1], Granted), answers
    return answers[-1]


def key_id(answers: list[Any]) -> int:
    token = grant_of(answers).ticket.token
    return ticket_pb2.TicketClaims.FromString(ticket_pb2.SignedTicket.FromString(token).claims).key_id


def test_outcomes_bring_the_quotes_to_what_is_observed(bench: Any) -> None:
    bench.join()
    first = grant_of(bench.ask()).quote
    for _ in range(300):
        granted = grant_of(bench.ask())
        outcome = Outcome(granted.ticket.jti, 0.2, 0.2 + 49 * 0.01, 50, False)
        bench.beat(outcomes=[outcome])
    later = grant_of(bench.ask()).quote
    assert later.time_to_first_token.expected == pytest.approx(0.2, rel=0.1)
    assert later.time_per_output_token.expected == pytest.approx(0.01, rel=0.1)
    assert later.time_to_first_token.expected != pytest.approx(first.time_to_first_token.expected, rel=0.5)
    recent = [one for one in bench.judgements if one.quantity == "time_to_first_token"][-50:]
    assert max(one.error for one in recent) < 0.1


def test_an_outcome_is_judged_by_the_quote_of_its_own_request_whatever_was_learnt_since(bench: Any) -> None:
    bench.join(max_running=8)
    early = grant_of(bench.ask())
    promised = early.quote.finish
    for _ in range(100):
        bench.beat(outcomes=[Outcome(grant_of(bench.ask()).ticket.jti, 3.0, 30.0, 50, False)])
    assert grant_of(bench.ask()).quote.finish.p10 > promised.p90
    bench.judgements.clear()
    total, num_tokens = promised.expected, bench.cell.ledger.find(early.ticket.jti).output_tokens
    bench.beat(outcomes=[Outcome(early.ticket.jti, total / 10, total, num_tokens, False)])
    (judged,) = [one for one in bench.judgements if one.quantity == "finish"]
    assert judged.inside and judged.error == pytest.approx(0.0, abs=1e-9)


def test_a_request_is_quoted_as_those_of_its_length_came_out(bench: Any) -> None:
    bench.join()
    asked = {"short": (100, 20), "long": (3000, 600)}
    ttft_seconds = {"short": 0.2, "long": 5.0}
    for number in range(400):
        which = "long" if number % 3 == 0 else "short"
        prompt_tokens, num_tokens = asked[which]
        granted = grant_of(bench.ask(prompt_tokens=prompt_tokens, max_output_tokens=num_tokens))
        bench.now += 0.001  # too quick for the weights to be learnt: what differs is what is known of a length
        # It stops early: what counts is what was asked for, which is all that a quote can go by.
        bench.beat(outcomes=[Outcome(granted.ticket.jti, ttft_seconds[which], 10.0, 15, False)])
    quotes = bench.cell.quotes.of("a")
    for prompt_tokens, num_tokens in asked.values():
        quote = grant_of(bench.ask(prompt_tokens=prompt_tokens, max_output_tokens=num_tokens)).quote
        assert quote.ratios == quotes.ratios_of(lengths_of(prompt_tokens, num_tokens))
    short, long = (quotes.ratios_of(lengths_of(*asked[which])) for which in asked)
    assert all(one != other for one, other in zip(short, long, strict=True))


def test_the_length_of_texts_in_tokens_is_learnt_from_the_agents(bench: Any) -> None:
    bench.join(max_running=8)
    first = grant_of(bench.ask(prompt_tokens=None, prompt_bytes=3000))
    assert bench.cell.ledger.find(first.ticket.jti).prompt_tokens == 750
    for _ in range(60):
        granted = grant_of(bench.ask(prompt_tokens=None, prompt_bytes=3000))
        bench.beat(outcomes=[Outcome(granted.ticket.jti, 0.1, 1.0, 50, False, prompt_tokens=3000)])
    assert (
        bench.cell.ledger.find(grant_of(bench.ask(prompt_tokens=None, prompt_bytes=3000)).ticket.jti).prompt_tokens
        > 2900
    )
    assert bench.cell.ledger.find(grant_of(bench.ask(prompt_tokens=10)).ticket.jti).prompt_tokens == 10


def test_absurd_outcomes_free_the_slot_and_teach_nothing(bench: Any) -> None:
    bench.join()
    before = bench.cell.quotes.of("a").weights
    for ttft, total in ((-1.0, 1.0), (2.0, 1.0), (1.0, 1e18)):
        granted = grant_of(bench.ask())
        bench.beat(outcomes=[Outcome(granted.ticket.jti, ttft, total, 50, False)])
    assert len(bench.cell.ledger) == 0 and not bench.judgements and bench.cell.quotes.of("a").weights == before


def test_an_incomplete_outcome_frees_the_slot_and_teaches_nothing(bench: Any) -> None:
    bench.join()
    granted = grant_of(bench.ask())
    bench.beat(outcomes=[Outcome(granted.ticket.jti, 9.0, 99.0, 3, True)])
    assert len(bench.cell.ledger) == 0 and not bench.judgements


def test_an_outcome_at_the_fallback_agent_frees_the_first_and_teaches_nothing(bench: Any) -> None:
    bench.join("a")
    bench.join("b")
    granted = grant_of(bench.ask())
    assert granted.fallback is not None
    bench.beat(granted.fallback.agent_id, outcomes=[Outcome(granted.fallback.jti, 0.1, 0.5, 5, False)])
    assert len(bench.cell.ledger) == 0 and not bench.judgements


def test_several_choices_are_judged_by_the_tokens_of_one(bench: Any) -> None:
    bench.join()
    granted = grant_of(bench.ask(num_choices=4))
    bench.beat(outcomes=[Outcome(granted.ticket.jti, 0.1, 0.1 + 49 * 0.02, 200, False)])
    ratio = bench.cell.quotes.of("a")._windows[1].all._window._latest[-1]
    record = bench.cell.placements._records[-1]
    assert ratio == pytest.approx(0.02 / weigh(record)[0].score.step_seconds)


def test_a_removed_agent_leaves_nothing_behind(bench: Any) -> None:
    bench.join()
    bench.ask()
    bench.cell.apply_kv_events(bench.members["a"], 1, [1, 2], (), True)
    bench.pass_time(15.1)
    assert len(bench.cell.ledger) == 0 and len(bench.cell.index) == 0 and len(bench.cell.fleet) == 0
    assert not bench.cell._outboxes and bench.tickets["lost"] == 1


def test_only_the_latest_stream_of_a_member_can_break_it(bench: Any) -> None:
    member = bench.join()
    old, new = bench.cell.connect(member), bench.cell.connect(member)
    bench.cell.disconnect(member, old)
    assert member.state is AgentState.SERVING
    bench.cell.disconnect(member, new)
    assert member.state is AgentState.SUSPECT


def test_tickets_carry_the_new_key_once_the_agent_has_confirmed_it(bench: Any) -> None:
    member = bench.join()
    bench.cell.rotate_keys((CellKey(8, b"n" * 32), CellKey(7, b"k" * 32)))
    ((command_id, command),) = bench.cell.outbox(member).unsent(set())
    assert isinstance(command, RotateKeys)
    assert key_id(bench.ask()) == 7
    bench.beat(results=[CommandResult(command_id, 3, "no")])
    assert key_id(bench.ask()) == 7
    bench.cell.rotate_keys((CellKey(8, b"n" * 32), CellKey(7, b"k" * 32)))
    ((command_id, _),) = bench.cell.outbox(member).unsent(set())
    bench.beat(results=[CommandResult(command_id, 0, "")])
    assert key_id(bench.ask()) == 8


def test_a_prefix_the_agent_holds_shortens_the_quote(bench: Any) -> None:
    bench.join()
    without = grant_of(bench.ask(prompt_tokens=2048)).quote
    bench.pass_time(11.1, beating=["a"])
    bench.cell.apply_kv_events(bench.members["a"], 1, range(1, 33), (), True)
    granted = grant_of(bench.ask(prompt_tokens=2048, block_hashes=tuple(range(1, 33))))
    assert granted.ticket.expected_cached_tokens == 2047
    assert granted.quote.time_to_first_token.expected < without.time_to_first_token.expected / 5


def test_a_busy_agent_is_passed_over_for_an_idle_one_and_the_explanation_says_so(bench: Any) -> None:
    bench.join("busy")
    bench.join("idle")
    bench.join("leaving")
    bench.beat("busy", Load(running_requests=3, pending_prefill_tokens=40_000, running_context_tokens=4000))
    bench.beat("leaving", state=AgentState.DRAINING)
    assert grant_of(bench.ask("r")).ticket.agent_id == "idle"
    record = bench.cell.placements.find("r")
    assert record is not None
    weighed = weigh(record)
    assert [one.agent_id for one in weighed] == ["idle", "busy", "leaving"]
    assert 2.0 < weighed[1].score.queue_seconds < 2.01  # the prefill in front, and the step that runs
    assert weighed[2].excluded_because == "it is draining"
    assert reason(record).startswith("idle finishes first; ") and "next is busy" in reason(record)


def test_the_predicted_rest_of_a_request_runs_down_and_follows_what_was_observed(bench: Any) -> None:
    bench.join()
    granted = grant_of(bench.ask(max_output_tokens=100))
    (grant,) = bench.cell.ledger.open_grants("a", 1)
    begun = bench.cell.remaining_seconds(grant)
    assert begun == pytest.approx(granted.quote.finish.expected)
    bench.now += begun / 2
    assert bench.cell.remaining_seconds(grant) == pytest.approx(begun / 2)
    bench.now += 10 * begun
    assert bench.cell.remaining_seconds(grant) == grant.tpot_seconds, "one that is late has a token to go"


def test_placements_are_a_bounded_ring(bench: Any) -> None:
    bench.join()
    bench.ask("r")
    record = bench.cell.placements.find("r")
    ring = Placements(max_num_placements=3)
    for number in range(5):
        ring.add(record._replace(request_id=str(number)))
    assert [ring.find(str(number)) is not None for number in range(5)] == [False, False, True, True, True]


def test_commands_are_kept_until_answered() -> None:
    outbox = Outbox()
    outbox.put("1", Drain(1.0))
    sent: set[str] = set()
    assert outbox.unsent(sent) == [("1", Drain(1.0))]
    assert outbox.unsent(sent) == []
    assert outbox.unsent(set()) == [("1", Drain(1.0))]
    assert outbox.acknowledge("1") == Drain(1.0)
    assert outbox.acknowledge("1") is None and outbox.unsent(set()) == []
