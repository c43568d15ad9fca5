"""Limits that change while the engine runs: they bind at once, never more than the plan took, and are undone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman_agent.device.base import GroupingDevice
from dragoman_agent.device.null import NullDevice
from dragoman_agent.device.null_model import NullModel, default_null_plan
from dragoman_agent.engine.frames import decode, encode
from dragoman_agent.engine.messages import Finished, Step, Tune
from dragoman_agent.engine.scheduler import Scheduler


def most(**changes: Any) -> Tune:
    """What the plan at start gives, but for `changes`."""
    return Tune(**{"max_step_tokens": 512, "max_num_seqs": 16, "num_usable_blocks": 255, **changes})


def test_a_tune_goes_over_the_wire() -> None:
    changed = most(num_ready_blocks=3, attention_rows=4)
    assert decode(encode(changed)[4:]) == changed


def test_rows_of_attention_go_to_a_device_that_groups_them_and_to_no_other(
    lab: Callable[..., Any], start: Callable[..., Any], answers: Any
) -> None:
    asked: list[int] = []

    class Grouping(NullDevice):
        def group_rows(self, rows: int) -> None:
            asked.append(rows)

    assert isinstance(Grouping(), GroupingDevice) and not isinstance(NullDevice(), GroupingDevice)
    grouping, plain = lab(device=Grouping()), lab()
    told = [
        answers(engine.run(most(), most(attention_rows=4), start("a", "x" * 30, 4), most()))["a", 0].token_ids
        for engine in (grouping, plain)
    ]
    assert asked == [1, 4, 1] and told[0] == told[1]


def test_fewer_tokens_a_step_and_back(lab: Callable[..., Any], start: Callable[..., Any], answers: Any) -> None:
    def run(engine: Any, name: str, *first: Tune) -> tuple[list[int], list[Step]]:
        engine.steps.clear()
        events = engine.run(*first, start(name, "x" * 300, 8))
        return answers(events)[name, 0].token_ids, list(engine.steps)

    engine = lab()
    plain, steps = run(engine, "a")
    assert max(s.load.prefill_tokens for s in steps) == 300
    engine = lab()
    slow, steps = run(engine, "a", most(max_step_tokens=64, max_lone_tokens=64))
    assert max(s.load.prefill_tokens for s in steps) == 64 and steps[-1].load.max_step_tokens == 64
    assert slow == plain, "a chunk's size changes no token"
    _, steps = run(engine, "c", most())
    assert steps[-1].load.max_step_tokens == 512


def test_prompts_alone_may_fill_a_step_that_streams_would_wait_for(
    lab: Callable[..., Any], start: Callable[..., Any], answers: Any
) -> None:
    engine = lab(company_tokens=64)
    events = engine.run(start("first", "x" * 300, 8))
    engine.core.receive(start("stream", "y" * 20, 400))
    engine.turn(3)
    engine.steps.clear()
    events += engine.run(start("beside", "w" * 300, 8))
    assert max(s.load.prefill_tokens + s.load.decode_tokens for s in engine.steps) == 64
    engine.steps.clear()
    engine.run(start("alone", "z" * 300, 8))
    assert max(s.load.prefill_tokens for s in engine.steps) == 300
    assert answers(events)["first", 0].token_ids


def test_prompts_alone_get_no_shorter_steps_than_beside_streams(
    lab: Callable[..., Any], start: Callable[..., Any]
) -> None:
    """A plan for a throttled device has short steps of both kinds; an index may then raise those beside streams."""
    engine = lab()
    engine.run(most(max_step_tokens=256, max_lone_tokens=64), start("alone", "x" * 300, 2))
    assert max(s.load.prefill_tokens for s in engine.steps) == 256


def test_fewer_sequences_run_at_once_and_none_starves(
    lab: Callable[..., Any], start: Callable[..., Any], terminals: Any
) -> None:
    engine = lab()
    events = engine.run(most(max_num_seqs=2), *[start(f"r{i}", f"prompt {i}", 6) for i in range(9)])
    assert max(step.load.running for step in engine.steps) == 2
    assert {name: type(ends[0]) for name, ends in terminals(events).items()} == {f"r{i}": Finished for i in range(9)}
    engine.steps.clear()
    engine.run(most(), *[start(f"s{i}", f"prompt {i}", 6) for i in range(9)])
    assert max(step.load.running for step in engine.steps) == 9
    engine.assert_idle()


def test_a_lower_class_makes_way_under_a_lowered_number_of_sequences(
    lab: Callable[..., Any], start: Callable[..., Any]
) -> None:
    engine = lab()
    for command in (most(max_num_seqs=1), start("batch", "long work", 400, priority=2)):
        engine.core.receive(command)
    engine.turn(5)
    engine.core.receive(start("now", "quick", 4, priority=0))
    engine.turn(30)
    finished = [event.request_id for event in engine.events if isinstance(event, Finished)]
    assert finished == ["now"]


def test_blocks_are_withheld_as_they_get_free_and_given_back(
    lab: Callable[..., Any], start: Callable[..., Any]
) -> None:
    engine = lab(num_blocks=64, max_context_tokens=1024)
    for number in range(6):
        engine.core.receive(start(f"r{number}", [number] * 500, 400))
    engine.turn(20)
    pool = engine.core.scheduler.pool
    used = pool.num_blocks - 1 - pool.num_free
    engine.core.receive(most(num_usable_blocks=20))
    assert pool.num_withheld < 43, f"{used} blocks are in use"
    engine.run()
    assert pool.num_withheld == 43 and pool.num_free == 20
    engine.run(start("more", [99] * 500, 100))
    engine.core.receive(most())
    assert pool.num_withheld == 0
    engine.assert_idle()


def test_cached_blocks_are_released_behind_the_device_so_that_no_step_evicts(
    lab: Callable[..., Any], start: Callable[..., Any]
) -> None:
    def churn(engine: Any) -> float:
        for number in range(12):
            engine.run(start(f"r{number}", [number] * 400, 100))
        return float(engine.steps[-1].load.eviction_seconds)

    assert churn(lab(num_blocks=24)) > 0
    engine = lab(num_blocks=24)
    engine.core.receive(most(num_ready_blocks=10))
    assert churn(engine) == 0.0
    assert engine.steps[-1].load.unused_blocks >= 10


@given(st.integers(-5, 10_000), st.integers(-5, 1000), st.integers(-5, 10_000), st.integers(-5, 10_000))
def test_nothing_is_tuned_past_what_the_plan_took(tokens: int, seqs: int, usable: int, ready: int) -> None:
    plan = default_null_plan(NullModel(), num_blocks=40, max_num_seqs=4, max_batch_tokens=128, max_context_tokens=640)
    scheduler = Scheduler(plan)
    scheduler.tune(Tune(tokens, seqs, usable, ready))
    assert 1 <= scheduler.max_step_tokens <= 128
    longest = -(-scheduler.capacity_tokens // plan.page_size)
    assert longest <= scheduler.pool.num_free <= 39
    scheduler.release_ahead()
    assert scheduler._has_row
    scheduler.tune(Tune(128, 4, 39, 0))
    assert scheduler.pool.num_free == 39 and scheduler.max_step_tokens == 128


def test_the_plan_at_start_binds_without_a_tune() -> None:
    scheduler = Scheduler(default_null_plan(NullModel(), max_batch_tokens=77))
    assert scheduler.max_step_tokens == 77 and scheduler.pool.num_withheld == 0
    with pytest.raises(AttributeError):
        scheduler.plan.max_batch_tokens = 1  # type: ignore[misc]
