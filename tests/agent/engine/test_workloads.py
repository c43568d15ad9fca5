"""Random requests against small pools: whatever the order, pressure and chunks, each gets what it gets alone."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from dragoman_agent.engine.messages import Cancel, Credit, Delta, Embedded, Failed, Finished, StartEmbed

SHARED = [i % 251 for i in range(400)]


def workload(rng: random.Random, start: Any, count: int) -> list[Any]:
    """Requests that share prefixes, with all kinds of sampling, stopping, tenants and classes."""
    commands = []
    for index in range(count):
        shared = rng.choice([0, 0, 64, 100, 128, 200])
        prompt = SHARED[:shared] + [rng.randrange(259) for _ in range(rng.randrange(1, 90))]
        if rng.random() < 0.1:
            commands.append(StartEmbed(f"r{index}", prompt, priority=rng.randrange(3)))
            continue
        commands.append(
            start(
                f"r{index}",
                prompt,
                rng.randrange(1, 60),
                temperature=rng.choice([0.0, 1.0]),
                seed=rng.randrange(1 << 63),
                strings=rng.choice([[], [], ["e", "th"], ["zzz"]]),
                stop_token_ids=rng.choice([[], [ord("q")]]),
                num_choices=rng.choice([1, 1, 1, 2, 3]),
                priority=rng.randrange(3),
                tenant=rng.choice("abc"),
            )
        )
    return commands


def values_of(events: list[Any]) -> dict[str, bytes]:
    return {e.request_id: e.values for e in events if isinstance(e, Embedded)}


@pytest.mark.parametrize("seed", range(12))
def test_under_pressure_each_request_gets_what_it_gets_alone(lab: Any, start: Any, answers: Any, seed: int) -> None:
    rng = random.Random(seed)
    commands = workload(rng, start, 24)
    alone: dict[Any, Any] = {}
    alone_values: dict[str, bytes] = {}
    for command in commands:
        events = lab().run(command)
        alone.update(answers(events))
        alone_values.update(values_of(events))
    page_size = rng.choice([16, 32, 64, 128])
    engine = lab(
        page_size=page_size,
        num_blocks=max(1 + 384 // page_size, 1 + rng.choice([400, 600, 1000]) // page_size),
        max_num_seqs=rng.choice([2, 5, 16]),
        max_batch_tokens=rng.choice([16, 40, 512]),
    )
    pending = list(commands)
    while pending:
        for _ in range(rng.randrange(1, 4)):
            if pending:
                engine.core.receive(pending.pop(0))
        engine.turn(rng.randrange(0, 4))
        engine.clock.now += rng.random()
    events = [*engine.events, *engine.run()]
    found = answers(events)
    for key, answer in alone.items():
        assert found[key].token_ids == answer.token_ids, key
        assert found[key].text == answer.text
        assert found[key].finish == answer.finish
    assert values_of(events) == alone_values
    ends = Counter(e.request_id for e in events if not isinstance(e, Delta))
    assert ends == {c.request_id: 1 for c in commands}
    for step in engine.steps:
        assert step.load.prefill_tokens + step.load.decode_tokens <= engine.plan.max_batch_tokens
        assert step.load.running <= engine.plan.max_num_seqs
    engine.assert_idle()


def test_the_pressure_is_real(lab: Any, start: Any, answers: Any) -> None:
    commands = [start(f"r{i}", [i] * 100, 120) for i in range(6)]
    calm = answers(lab().run(*commands))
    engine = lab(num_blocks=9, page_size=64)
    found = answers(engine.run(*commands))
    assert engine.steps[-1].load.preemptions > 0
    assert {k: a.token_ids for k, a in found.items()} == {k: a.token_ids for k, a in calm.items()}
    engine.assert_idle()


# The fixtures are functions without state, so examples may share them.
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_order_of_commands_ends_each_request_once_and_leaks_nothing(
    data: st.DataObject, lab: Any, start: Any, answers: Any
) -> None:
    engine = lab(num_blocks=14, page_size=16, max_num_seqs=3, max_batch_tokens=24, max_num_waiting=50)
    count = data.draw(st.integers(1, 6))
    acts = data.draw(
        st.lists(
            st.one_of(
                st.tuples(st.just("start"), st.integers(0, count - 1)),
                st.tuples(st.just("cancel"), st.integers(0, count - 1)),
                st.tuples(st.just("credit"), st.integers(0, count - 1)),
                st.tuples(st.just("turn"), st.integers(1, 5)),
                st.tuples(st.just("wait"), st.sampled_from([0.5, 3.0, 11.0, 30.0])),
            ),
            max_size=40,
        )
    )
    note(repr(acts))
    started: set[int] = set()
    for act, value in acts:
        if act == "start" and value not in started:
            started.add(value)
            choices = 1 + value % 3
            engine.core.receive(
                start(f"r{value}", SHARED[: 10 + 20 * value], 30, credit=8, num_choices=choices, deadline_seconds=100.0)
            )
        elif act == "cancel":
            engine.core.receive(Cancel(f"r{value}"))
        elif act == "credit":
            engine.core.receive(Credit(f"r{value}", 30))
        elif act == "turn":
            engine.turn(value)
        elif act == "wait":
            engine.clock.now += value
    for value in started:
        engine.core.receive(Credit(f"r{value}", 30))
    engine.run()
    answers(engine.events)
    ends = Counter(e.request_id for e in engine.events if isinstance(e, Finished | Failed))
    assert ends == {f"r{v}": 1 for v in started}
    engine.assert_idle()
