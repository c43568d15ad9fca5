"""Placement: the earliest finish, never an excluded agent, whatever the step models and loads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.step_model import StepModel
from dragoman_controller.agent_view import AgentView, Shape
from dragoman_controller.candidates import Candidates
from dragoman_controller.placement import FIRST_TOKEN_RATIO, TIE_RATIO, place
from dragoman_controller.steps import StepTable

FLAT = StepTable(StepModel((1,), (0,), (0.01,), 1000.0, 0.0))


def view(agent_id: str, **fields: object) -> AgentView:
    steps = fields.get("steps", FLAT)
    assert isinstance(steps, StepTable)
    running, most = fields.get("num_running", 0), fields.get("max_running_requests", 8)
    assert isinstance(running, int) and isinstance(most, int)
    defaults: dict[str, object] = {
        "agent_id": agent_id,
        "max_context_tokens": 4096,
        "num_free_slots": 8,
        "num_slots": 10,
        "num_running": 0,
        "mean_context_tokens": 0.0,
        "queue_seconds": 0.0,
        "max_running_requests": 8,
        "steps": steps,
        "row": steps.row(min(running + 1, most)),
    }
    return AgentView(**{**defaults, **fields})  # type: ignore[arg-type]


def candidates(*views: AgentView) -> Candidates:
    fleet = Candidates()
    for one in views:
        fleet.put(one)
    return fleet


@st.composite
def views(draw: st.DrawFn, agent_id: str) -> AgentView:
    contexts = sorted(draw(st.sets(st.integers(0, 8192), min_size=1, max_size=4)))
    batches = sorted(draw(st.sets(st.integers(1, 64), min_size=1, max_size=3)))
    count = len(contexts) * len(batches)
    times = draw(st.lists(st.floats(1e-4, 0.5), min_size=count, max_size=count))
    steps = StepTable(
        StepModel(tuple(batches), tuple(contexts), tuple(times), draw(st.floats(100, 1e5)), draw(st.floats(0, 0.05)))
    )
    most = draw(st.integers(1, 16))
    running = draw(st.integers(0, most))
    slots = most + draw(st.integers(0, 4))
    return view(
        agent_id,
        steps=steps,
        max_running_requests=most,
        num_running=running,
        num_slots=slots,
        num_free_slots=draw(st.integers(0, slots)),
        max_context_tokens=draw(st.sampled_from([512, 2048, 8192])),
        mean_context_tokens=draw(st.floats(0, 4000)),
        queue_seconds=draw(st.floats(0, 2)),
        excluded_because=draw(st.sampled_from(["", "", "", "it is draining"])),
    )


fleets = st.integers(0, 6).flatmap(lambda count: st.tuples(*(views(f"agent-{i}") for i in range(count))))
shapes = st.builds(
    lambda prompt, output, choices: Shape(prompt, output, choices, prompt + 1, prompt + output),
    st.integers(1, 3000),
    st.integers(1, 3000),
    st.sampled_from([1, 1, 1, 3]),
)


@given(fleet=fleets, shape=shapes, seed=st.integers(0, 99), data=st.data())
@settings(max_examples=300, deadline=None)
def test_the_choice_is_the_earliest_finish_of_those_that_may_be_chosen(
    fleet: tuple[AgentView, ...], shape: Shape, seed: int, data: st.DataObject
) -> None:
    ids = [one.agent_id for one in fleet]
    cached = {i: 64 * data.draw(st.integers(0, 40)) for i in ids if data.draw(st.booleans())}
    excluded = {i: "told so" for i in ids if data.draw(st.integers(0, 4)) == 0}
    able = [one for one in fleet if one.agent_id not in excluded and not one.refusal(shape)]
    if any(one.max_context_tokens >= shape.wanted_context_tokens for one in able):
        able = [one for one in able if one.max_context_tokens >= shape.wanted_context_tokens]
    placed = place(candidates(*fleet), shape, cached, Random(seed), excluded)
    if not able:
        assert placed is None
        return
    assert placed is not None
    chosen = fleet[placed.chosen]
    assert chosen in able
    finishes = {one.agent_id: one.score(shape, cached.get(one.agent_id, 0)).finish_seconds for one in able}
    assert placed.score.finish_seconds == pytest.approx(finishes[chosen.agent_id])
    assert placed.score.finish_seconds <= min(finishes.values()) * TIE_RATIO + 1e-12
    if len(able) == 1:
        assert placed.fallback is None
    else:
        assert placed.fallback is not None and fleet[placed.fallback] in able and placed.fallback != placed.chosen


def test_a_clear_winner_is_always_chosen() -> None:
    fleet = candidates(view("slow", queue_seconds=0.5), view("fast"), view("slower", queue_seconds=0.9))
    for seed in range(20):
        placed = place(fleet, Shape(10, 10), {}, Random(seed))
        assert placed is not None
        assert (fleet.views[placed.chosen].agent_id, placed.num_ties) == ("fast", 1)
        assert placed.fallback is not None and fleet.views[placed.fallback].agent_id == "slow"


def test_a_cached_prefix_decides_where_prefill_costs_more_than_the_wait() -> None:
    fleet = candidates(view("idle"), view("holder", queue_seconds=0.5))
    shape = Shape(1000, 2)
    without, with_prefix = (place(fleet, shape, cached, Random(0)) for cached in ({}, {"holder": 960}))
    assert without is not None and fleet.views[without.chosen].agent_id == "idle"
    assert with_prefix is not None and fleet.views[with_prefix.chosen].agent_id == "holder"
    assert with_prefix.score.cached_tokens == 960
    assert with_prefix.score.prefill_seconds == pytest.approx(40 / 1000)


def test_the_score_is_wait_plus_prefill_plus_decode_at_the_batch_it_joins() -> None:
    steps = StepTable(StepModel((1, 2), (0, 1000), (0.01, 0.02, 0.03, 0.05), 500.0, 0.001))
    one = view("a", steps=steps, num_running=1, mean_context_tokens=400.0, queue_seconds=0.25)
    score = one.score(Shape(100, 21), 0)
    context = (400 + 100 + 21 / 2) / 2
    assert score.queue_seconds == 0.25
    assert score.prefill_seconds == pytest.approx(100 / 500)
    assert score.step_seconds == pytest.approx(steps.model.decode_step_seconds(2, context))
    assert score.decode_seconds == pytest.approx(20 * score.step_seconds)


def test_the_last_prompt_token_is_always_computed() -> None:
    score = view("a").score(Shape(128, 1), 128)
    assert score.cached_tokens == 127
    assert score.prefill_seconds == pytest.approx(1 / 1000)


def test_a_tie_in_the_whole_is_none_where_the_first_token_comes_later() -> None:
    fleet = candidates(view("now"), view("later", queue_seconds=0.05))
    shape = Shape(100, 1000)
    assert fleet.views[1].finish_seconds(shape, 0) < TIE_RATIO * fleet.views[0].finish_seconds(shape, 0)
    placements = [place(fleet, shape, {}, Random(seed)) for seed in range(20)]
    assert {(one.chosen, one.num_ties) for one in placements if one is not None} == {(0, 2)}


def test_equal_agents_share_the_requests() -> None:
    fleet = candidates(*(view(f"agent-{i}") for i in range(4)))
    rng = Random(1)
    chosen = Counter(place(fleet, Shape(10, 10), {}, rng).chosen for _ in range(400))  # type: ignore[union-attr]
    assert set(chosen) == {0, 1, 2, 3}
    assert max(chosen.values()) < 160


def test_a_small_context_is_used_only_when_no_larger_one_has_room() -> None:
    small, large = view("small", max_context_tokens=512), view("large", queue_seconds=9.0)
    shape = Shape(300, 1000, 1, 301, 1300)
    placed = place(candidates(small, large), shape, {}, Random(0))
    assert placed is not None and placed.chosen == 1
    placed = place(candidates(small, view("large", excluded_because="it is draining")), shape, {}, Random(0))
    assert placed is not None and placed.chosen == 0


def looking_at_all(
    fleet: Candidates, shape: Shape, cached: Mapping[str, int], excluded: Collection[str], rng: Random
) -> tuple[int, int | None, int] | None:
    """The rule of placement in its plainest form: every agent exactly. Chosen, fallback, number of ties."""
    able = {
        index: view.finish_seconds(shape, cached.get(view.agent_id, 0))
        for index, view in enumerate(fleet.views)
        if not view.refusal(shape) and view.agent_id not in excluded
    }
    roomy = {i: t for i, t in able.items() if fleet.views[i].max_context_tokens >= shape.wanted_context_tokens}
    seconds = roomy or able
    if not seconds:
        return None
    ranked = sorted(seconds, key=lambda index: (seconds[index], index))
    ties = sorted(index for index in seconds if seconds[index] <= seconds[ranked[0]] * TIE_RATIO)
    chosen = ranked[0]
    if len(ties) > 1:
        first, second = int(rng.random() * len(ties)), int(rng.random() * (len(ties) - 1))
        second += second >= first
        starts = {
            index: view.queue_seconds + view.prefill_seconds(shape, cached.get(view.agent_id, 0))
            for index, view in enumerate(fleet.views)
        }
        soon = [index for index in (ties[first], ties[second]) if starts[index] <= starts[chosen] * FIRST_TOKEN_RATIO]
        chosen = min(soon, key=lambda index: seconds[index], default=chosen)
    others = [index for index in ranked if index != chosen]
    return chosen, others[0] if others else None, len(ties)


@given(fleet=fleets, shape=shapes, seed=st.integers(0, 99), data=st.data())
@settings(max_examples=300, deadline=None)
def test_the_search_decides_as_a_look_at_every_agent_does(
    fleet: tuple[AgentView, ...], shape: Shape, seed: int, data: st.DataObject
) -> None:
    ids = [one.agent_id for one in fleet]
    cached = {i: 64 * data.draw(st.integers(0, 40)) for i in ids if data.draw(st.booleans())}
    excluded = {i for i in ids if data.draw(st.integers(0, 4)) == 0}
    group = candidates(*fleet)
    placed = place(group, shape, cached, Random(seed), excluded)
    found = None if placed is None else (placed.chosen, placed.fallback, placed.num_ties)
    assert found == looking_at_all(group, shape, cached, excluded, Random(seed))


def measured(rng: Random) -> StepTable:
    """A device as measured: any pace, and noise that makes its rows neither convex nor concave."""
    pace = rng.uniform(0.5, 2.0)
    times = [
        pace * rng.uniform(0.9, 1.1) * (0.004 + 0.0001 * b + 1e-7 * b * c) for b in (1, 8, 64) for c in (0, 512, 4096)
    ]
    return StepTable(StepModel((1, 8, 64), (0, 512, 4096), tuple(times), 20_000 / pace, 0.004 * pace))


@pytest.mark.parametrize("num_kinds", [1, 4, 256])
def test_in_a_cell_of_256_agents_under_load_each_decision_is_that_of_a_look_at_all(num_kinds: int) -> None:
    rng = Random(num_kinds)
    kinds = [measured(rng) for _ in range(num_kinds)]
    fleet = candidates()
    running = [0] * 256

    def put(number: int) -> None:
        fleet.put(
            view(
                f"agent-{number}",
                steps=kinds[number % num_kinds],
                num_running=running[number],
                max_running_requests=64,
                num_slots=64,
                num_free_slots=64 - running[number],
                max_context_tokens=8192 if number % 3 else 2048,
                mean_context_tokens=rng.uniform(100, 4000) if running[number] else 0.0,
                queue_seconds=rng.choice((0.0, rng.random() / 10)),
            )
        )

    for number in range(256):
        put(number)
    chosen = set()
    for step in range(400):
        prompt, output = rng.randrange(1, 3000), rng.randrange(1, 900)
        shape = Shape(prompt, output, 1, prompt + 1, prompt + output)
        cached = {f"agent-{rng.randrange(256)}": 64 * rng.randrange(prompt // 64 + 1) for _ in range(step % 3)}
        fleet.learn(shape)
        placed = place(fleet, shape, cached, Random(step))
        assert placed is not None
        found = placed.chosen, placed.fallback, placed.num_ties
        assert found == looking_at_all(fleet, shape, cached, (), Random(step))
        chosen.add(placed.chosen)
        running[placed.chosen] += 1
        put(placed.chosen)
        if step % 7 == 0:
            done = rng.randrange(256)
            running[done] = 0
            put(done)
    assert len(chosen) > 20


@given(seed=st.integers(0, 10_000))
@settings(max_examples=40, deadline=None)
def test_in_a_large_changing_fleet_the_best_and_the_second_are_found(seed: int) -> None:
    rng = Random(seed)
    fleet = candidates(*(view(f"agent-{i}") for i in range(80)))
    for _ in range(rng.randrange(200)):
        steps = StepTable(
            StepModel((1,), (0, 4096), (0.001 * rng.randrange(1, 9), 0.02), 200.0 * rng.randrange(1, 99), 0.0)
        )
        busy = "it is draining" if rng.random() < 0.2 else ""
        one = view(f"agent-{rng.randrange(len(fleet))}", steps=steps, queue_seconds=rng.random(), excluded_because=busy)
        fleet.put(one)
        if rng.random() < 0.05:
            fleet.remove(f"agent-{rng.randrange(len(fleet))}")
    shape = Shape(rng.randrange(1, 2000), rng.randrange(1, 500))
    cached = {f"agent-{rng.randrange(90)}": 64 * rng.randrange(30) for _ in range(rng.randrange(4))}
    placed = place(fleet, shape, cached, Random(seed))
    assert placed is not None and placed.fallback is not None
    assert (placed.chosen, placed.fallback, placed.num_ties) == looking_at_all(fleet, shape, cached, (), Random(seed))


def test_removing_an_agent_keeps_the_others_in_place() -> None:
    fleet = candidates(view("a"), view("b", max_context_tokens=100), view("c", state="draining"))
    fleet.remove("b")
    fleet.remove("never there")
    assert sorted(one.agent_id for one in fleet.views) == ["a", "c"]
    assert [fleet.views[fleet.position(i) or 0].agent_id for i in ("a", "c")] == ["a", "c"]
    assert (fleet.smallest_context, fleet.num_in_state("draining"), fleet.num_in_state("serving")) == (4096, 1, 1)
    fleet.put(view("c"))
    assert (len(fleet), fleet.num_in_state("draining")) == (2, 0)


def test_a_full_fleet_places_nothing() -> None:
    full = view("a", excluded_because="all its 6 slots are taken")
    assert place(candidates(full), Shape(1, 1), {}, Random(0)) is None
    assert candidates(full).num_able == 0
