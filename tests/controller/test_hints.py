"""Hints of clients and of the queue become one command, with a ticket that the source takes once and for nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from dragoman.errors import DragomanError
from dragoman.prefix_hash import prompt_digest_of_ids, transfer_digest
from dragoman.v1 import agent_pb2
from dragoman_agent.tickets import Presented, TicketVerifier
from dragoman_controller.cell import CommandResult
from dragoman_controller.commands import Prefetch
from dragoman_controller.fleet import Load
from dragoman_controller.rpc.convert import agent_spec

UNITS = tuple(range(101, 109))


def join(bench: Any, agent_messages: Any, agent_id: str, **options: Any) -> None:
    message: agent_pb2.Agent = agent_messages(agent_id, max_running=1, max_waiting=0, **options)
    model = message.models[0]
    model.kv_type, model.kv_layout, model.kv_bytes_per_token = "null", "states", 12
    bench.members[agent_id] = bench.cell.register(agent_spec(message), 1, 1000)
    bench.beat(agent_id)


@pytest.fixture
def two(bench: Any, agent_messages: Any) -> Any:
    """A cell of two agents with one slot each; "a" holds the prefix."""
    join(bench, agent_messages, "a")
    join(bench, agent_messages, "b")
    bench.cell.apply_kv_events(bench.members["a"], 1, UNITS, (), True)
    return bench


def commands(bench: Any, agent_id: str) -> list[Prefetch]:
    return [c for _, c in bench.cell.outbox(bench.members[agent_id]).unsent(set()) if isinstance(c, Prefetch)]


def test_a_hint_becomes_a_command_with_a_ticket_for_the_source(two: Any) -> None:
    assert two.cell.hints.hint("tiny", UNITS) == "" and two.hints == ["accepted"]
    (command,) = commands(two, "b")
    assert not commands(two, "a")
    assert (command.block_hashes, command.source_agent_id) == (UNITS, "a") and command.limit_seconds > 0
    keys = dict(two.cell.minter.agent_keys("a", 1))
    verifier = TicketVerifier("a", 1, b"d" * 32, lambda: int(two.now * 1000))
    verifier.set_keys("here", keys)
    for digest in (transfer_digest(UNITS[:-1]), prompt_digest_of_ids([u for unit in UNITS for u in (unit, 0)])):
        with pytest.raises(DragomanError):
            verifier.verify(command.source_ticket, Presented(digest))
    grant = verifier.verify(command.source_ticket, Presented(transfer_digest(UNITS)))
    assert (grant.max_output_tokens, grant.max_choices) == (1, 1)
    verifier.consume(grant)
    with pytest.raises(DragomanError, match="used before"):
        verifier.verify(command.source_ticket, Presented(transfer_digest(UNITS)))
    assert len(command.source_ticket) < 200


def test_the_same_hint_is_not_sent_twice_in_a_row(two: Any) -> None:
    assert two.cell.hints.hint("tiny", UNITS) == ""
    assert "was told so" in two.cell.hints.hint("tiny", UNITS)
    assert two.hints == ["accepted", "not_accepted"]
    two.pass_time(5.1, beating=["a", "b"])
    assert two.cell.hints.hint("tiny", UNITS) == "" and len(commands(two, "b")) == 2


def fill(bench: Any, num_tokens_at_a: int, num_tokens_at_b: int) -> None:
    """One request at each agent, of so many tokens."""
    lengths = {"a": num_tokens_at_a, "b": num_tokens_at_b}
    granted = bench.ask("at a", prompt_tokens=600, block_hashes=UNITS, max_output_tokens=lengths["a"])[-1]
    assert granted.ticket.agent_id == "a"
    assert bench.ask("at b", max_output_tokens=lengths["b"])[-1].ticket.agent_id == "b"
    for agent_id in lengths:
        bench.beat(agent_id, Load(running_requests=1))


def test_a_waiting_request_brings_its_prefix_to_the_agent_that_is_free_first(two: Any) -> None:
    fill(two, 1000, 10)
    two.ask("waits", prompt_tokens=600, block_hashes=UNITS)
    (command,) = commands(two, "b")
    assert command.block_hashes == UNITS
    two.ask("waits too", prompt_tokens=600, block_hashes=UNITS)
    assert len(commands(two, "b")) == 1


def test_nothing_is_sent_where_it_would_not_help(two: Any) -> None:
    fill(two, 10, 1000)
    two.ask("waits for a", prompt_tokens=600, block_hashes=UNITS)
    two.ask("has none", prompt_tokens=600)
    two.ask("nobody holds it", prompt_tokens=600, block_hashes=(1, 2, 3))
    assert not commands(two, "a") and not commands(two, "b")


def test_an_agent_is_told_to_bring_up_what_lies_in_its_lower_tiers(two: Any) -> None:
    two.cell.apply_kv_events(two.members["a"], 2, (), UNITS, False, stored_below=UNITS)
    assert two.cell.index.lookup(UNITS) == {} and two.cell.index.lookup_all_tiers(UNITS) == {"a": len(UNITS)}
    assert two.cell.hints.hint("tiny", UNITS) == ""
    (command,) = commands(two, "a")
    assert (command.block_hashes, command.source_address, command.source_ticket) == (UNITS, "", b"")
    assert command.limit_seconds > 0 and not commands(two, "b")


def test_a_waiting_request_has_its_prefix_brought_up(two: Any) -> None:
    fill(two, 10, 1000)
    two.cell.apply_kv_events(two.members["a"], 2, (), UNITS, False, stored_below=UNITS)
    two.ask("waits", prompt_tokens=600, block_hashes=UNITS)
    (command,) = commands(two, "a")
    assert command.source_address == "" and not commands(two, "b")


def test_the_queue_is_left_to_itself_where_that_is_wanted(two: Any) -> None:
    two.cell.hints.for_queue = False
    fill(two, 1000, 10)
    two.ask("waits", prompt_tokens=600, block_hashes=UNITS)
    assert not commands(two, "b") and two.cell.hints.hint("tiny", UNITS) == ""


def test_a_slow_link_is_left_alone(two: Any) -> None:
    two.beat("b", Load(kv_fetch_bytes_per_second=1000.0))
    assert "would take" in two.cell.hints.hint("tiny", UNITS) and not commands(two, "b")


def test_the_end_of_a_hint_is_counted_once(two: Any) -> None:
    two.cell.hints.hint("tiny", UNITS)
    ((command_id, _),) = two.cell.outbox(two.members["b"]).unsent(set())
    for _ in range(2):
        two.beat("b", results=[CommandResult(command_id, 0, "", "used")])
    assert two.hints == ["accepted", "used"] and not commands(two, "b")


@pytest.mark.parametrize(
    ("rate", "share"),
    [(0.0, 0.0), (12 * 10_000.0, 0.0), (12 * 1_000_000.0, 0.98), (1e12, 1.0)],
)
def test_what_lies_below_counts_as_cached_less_what_bringing_it_up_takes(two: Any, rate: float, share: float) -> None:
    two.cell.apply_kv_events(two.members["a"], 2, (), UNITS, False)
    two.cell.apply_kv_events(two.members["b"], 1, UNITS[:2], (), True, stored_below=UNITS)
    two.beat("b", Load(kv_tier_bytes_per_second=rate))
    steps = two.members["b"].spec.models[0].steps
    below = (len(UNITS) - 2) * 64
    saved = max(1.0 - below * 12 / rate / steps.prefill_seconds(below), 0.0) if rate else 0.0
    assert saved == pytest.approx(share, abs=0.05)
    request = two.request(prompt_tokens=600, block_hashes=UNITS)
    cached = two.cell.placer._with_lower_tiers(request, {"b": 128})
    assert cached == {"b": 128 + int(below * saved)}
    granted = two.ask("goes to b", prompt_tokens=600, block_hashes=UNITS)[-1]
    assert granted.ticket.agent_id == "b"
