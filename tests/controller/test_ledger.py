"""Debits: taken at the grant, replaced by the agent's own report, undone by outcome, release or expiry."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman_controller.fleet import Load
from dragoman_controller.ledger import Grant, Ledger


def grant(name: str, at: float = 0.0, **fields: object) -> Grant:
    defaults: dict[str, object] = {
        "jti": name.encode(),
        "key": ("", name, 0),
        "tenant": "t",
        "model": "m",
        "agent_id": "a",
        "epoch": 1,
        "granted_at": at,
        "usable_until": at + 10,
        "num_slots": 1,
        "uncached_tokens": 60,
        "prompt_tokens": 100,
        "output_tokens": 11,
        "ttft_seconds": 0.5,
        "tpot_seconds": 0.1,
    }
    return Grant(**{**defaults, **fields})  # type: ignore[arg-type]


def test_a_grant_counts_until_the_agents_report_knows_it() -> None:
    ledger = Ledger()
    ledger.add(grant("x", at=1.0))
    before = ledger.debit("a", 1, Load(), sampled_at=0.9)
    assert (before.num_requests, before.pending_prefill_tokens, before.context_tokens) == (1, 60, 100)
    load = Load(running_requests=1, running_context_tokens=105)
    after = ledger.debit("a", 1, load, sampled_at=1.2)
    assert (after.num_requests, after.pending_prefill_tokens, after.context_tokens) == (1, 0, 105)
    assert after.mean_context_tokens == 105


def test_the_work_in_front_runs_down_between_reports() -> None:
    ledger = Ledger()
    ledger.add(grant("x", at=1.0, prefill_seconds=0.5))
    ledger.add(grant("y", at=1.1, prefill_seconds=0.2, shared_seconds=0.2))
    assert ledger.debit("a", 1, Load(), 0.9).busy_until == pytest.approx(1.7)
    # An idle pause between two grants is not work.
    ledger.add(grant("z", at=5.0, prefill_seconds=0.3, shared_seconds=0.3))
    assert ledger.debit("a", 1, Load(), 0.9).busy_until == pytest.approx(5.3)
    # A new report knows what was granted before it, and says itself what is left.
    assert ledger.debit("a", 1, Load(), 4.9, pending_seconds=0.4).busy_until == pytest.approx(5.6)
    ledger.end(b"z")
    assert ledger.debit("a", 1, Load(), 4.9, pending_seconds=0.4).busy_until == pytest.approx(5.3)
    assert ledger.debit("b", 1, Load(), 2.0, pending_seconds=0.1).busy_until == pytest.approx(2.1)


def test_prompts_that_wait_share_a_step_where_it_takes_long_however_few_tokens_it_has() -> None:
    ledger = Ledger()
    for number in range(20):
        ledger.add(grant(f"r{number}", at=1.0 + number / 1000, prefill_seconds=0.03, shared_seconds=0.001))
    # The first one's step runs, the second one waits for the next, and the others join it.
    assert ledger.debit("a", 1, Load(), 0.9).busy_until == pytest.approx(1.0 + 2 * 0.03 + 18 * 0.001)
    ledger.end(b"r7")
    assert ledger.debit("a", 1, Load(), 0.9).busy_until == pytest.approx(1.0 + 2 * 0.03 + 17 * 0.001)
    # As soon as no more than a step is in front, another one is needed.
    ledger.add(grant("s", at=1.06, prefill_seconds=0.03, shared_seconds=0.001))
    assert ledger.debit("a", 1, Load(), 0.9).busy_until == pytest.approx(1.0 + 3 * 0.03 + 17 * 0.001)


def test_requests_of_others_at_the_agent_are_added_to() -> None:
    ledger = Ledger()
    ledger.add(grant("x", at=1.0, num_slots=2))
    load = Load(running_requests=3, waiting_requests=1, running_context_tokens=300, pending_prefill_tokens=7)
    debit = ledger.debit("a", 1, load, sampled_at=0.5)
    assert (debit.num_requests, debit.pending_prefill_tokens) == (6, 67)
    assert debit.mean_context_tokens == 500 / 5


def test_an_outcome_of_either_ticket_undoes_the_debit_once() -> None:
    ledger = Ledger()
    ledger.add(grant("x", fallback_jti=b"y"))
    assert ledger.num_running("t") == 1
    ended = ledger.end(b"y")
    assert ended is not None and ended.key == ("", "x", 0)
    assert ledger.end(b"x") is None
    assert ledger.end(b"never") is None
    assert (len(ledger), ledger.num_running("t")) == (0, 0)
    assert ledger.debit("a", 1, Load(), sampled_at=-1.0).num_requests == 0


def test_an_unused_ticket_is_dropped_after_its_window_but_a_running_one_is_not() -> None:
    ledger = Ledger()
    ledger.add(grant("old", at=0.0))
    ledger.add(grant("young", at=5.0))
    assert ledger.sweep("a", 1, Load(), now=10.9) == []
    assert ledger.sweep("a", 1, Load(running_requests=1), now=11.1) == []
    assert [one.jti for one in ledger.sweep("a", 1, Load(), now=11.1)] == [b"old"]
    assert ledger.num_open("a", 1) == 1


def test_the_end_of_a_life_closes_its_grants_only() -> None:
    ledger = Ledger()
    ledger.add(grant("x"))
    ledger.add(grant("y", epoch=2))
    assert [one.jti for one in ledger.drop_life("a", 1)] == [b"x"]
    assert [one.jti for one in ledger.open_grants("a", 2)] == [b"y"]


@given(st.lists(st.tuples(st.sampled_from(["add", "end", "drop", "sweep"]), st.integers(0, 9)), max_size=60))
@settings(max_examples=100, deadline=None)
def test_whatever_happens_nothing_is_left_once_all_have_ended(steps: list[tuple[str, int]]) -> None:
    ledger = Ledger()
    for number, (what, value) in enumerate(steps):
        if what == "add":
            ledger.add(grant(f"{number}", at=number, agent_id=f"a{value % 3}", tenant=f"t{value % 2}"))
        elif what == "end":
            ledger.end(f"{value}".encode())
        elif what == "drop":
            ledger.drop_life(f"a{value % 3}", 1)
        else:
            ledger.sweep(f"a{value % 3}", 1, Load(), now=number)
    for number in range(len(steps)):
        ledger.end(f"{number}".encode())
    assert len(ledger) == 0
    for name in range(3):
        assert ledger.debit(f"a{name}", 1, Load(), sampled_at=-1.0).num_requests == 0
    assert ledger.num_running("t0") == ledger.num_running("t1") == 0
