"""Actions of the indices on a simulated engine that really gains, or does not: tried, kept, undone, never on an index alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.step_model import StepModel
from dragoman_agent.engine.index_actions import (
    PAUSE_STEPS,
    SUSTAINED_STEPS,
    TRIAL_STEPS,
    Act,
    IndexActions,
    Knobs,
    Limits,
)
from dragoman_agent.engine.indices import (
    CacheView,
    IndexSample,
    StepFacts,
    bound_seconds,
    compute_saturation,
    link_score,
    memory_pressure,
)
from dragoman_agent.pal.plan import ShortGroups

MODEL = StepModel((1, 8), (0, 1000), (1e-3, 2e-3, 2e-3, 4e-3), 100_000.0, 1e-3)


@dataclass
class Engine:
    """Steps whose time is the model's bound plus an overhead, under the knobs in force."""

    actions: IndexActions
    pending: int = 100_000
    overhead: float = 3e-3
    unused: int = 50
    evicting: Callable[[Knobs], float] = lambda knobs: 0.0
    overhead_of: Callable[[int], float] | None = None
    cache: CacheView = field(default_factory=CacheView)
    pbs: float | None = None
    model: StepModel = MODEL
    batch: int = 8
    context: int = 500  # tokens of each sequence
    saved: Callable[[Knobs], float] = lambda knobs: 0.0
    acts: list[tuple[int, Act]] = field(default_factory=list)
    num_steps: int = 0

    def run(self, steps: int) -> list[Act]:
        """So many steps; what was done in them."""
        before = len(self.acts)
        for _ in range(steps):
            self.num_steps += 1
            knobs = self.actions.knobs
            batch, tokens = self.batch, self.batch * self.context
            prefill = max(min(self.pending, knobs.max_step_tokens - batch), 0)
            shape = StepFacts(
                batch, prefill, batch, tokens, self.pending, 1.0, 0.0, self.unused, 100, knobs.max_step_tokens
            )
            bound = bound_seconds(self.model, shape)
            extra = self.overhead if self.overhead_of is None else self.overhead_of(knobs.max_step_tokens)
            evicting = self.evicting(knobs)
            facts = StepFacts(
                batch,
                prefill,
                batch,
                tokens,
                self.pending,
                bound + extra - self.saved(knobs),
                evicting,
                self.unused,
                100,
                knobs.max_step_tokens,
                evicting,
            )
            indices: list[IndexSample] = [
                memory_pressure(100 - self.unused, 100, self.cache),
                compute_saturation(self.model, facts),
            ]
            if self.pbs is not None:
                indices.append(link_score(self.pbs, 1.0, "gpm"))
            act = self.actions.take(facts, indices, self.cache, self.model)
            if act is not None:
                self.acts.append((self.num_steps, act))
        return [act for _, act in self.acts[before:]]


def engine(budget: int = 256, limits: Limits | None = None, **fields: object) -> Engine:
    actions = IndexActions(limits or Limits(2048, 100, 1e12))
    actions.rebase(Knobs(budget))
    return Engine(actions, **fields)  # type: ignore[arg-type]


def kinds(acts: list[Act]) -> list[str]:
    return [f"{act.kind} {act.proposal.action}" for act in acts]


def test_low_saturation_raises_the_prefill_budget_and_keeps_it_where_the_gain_is_seen() -> None:
    machine = engine()
    assert machine.run(SUSTAINED_STEPS - 1) == []
    (started,) = machine.run(1)
    assert started.kind == "started" and machine.actions.knobs.max_step_tokens == 512
    assert started.proposal.predicted_gain > 0.3 and started.proposal.index.value < 0.7
    (kept,) = machine.run(TRIAL_STEPS)
    assert kept.kind == "kept" and machine.actions.knobs.max_step_tokens == 512
    assert kept.measured_gain == pytest.approx(started.proposal.predicted_gain, rel=0.1)
    assert machine.run(PAUSE_STEPS["kept"] - TRIAL_STEPS) == [], "a pause before it is raised again"


def test_a_gain_that_does_not_come_within_100_steps_is_undone() -> None:
    machine = engine(overhead_of=lambda budget: 3e-3 * budget / 256)
    assert kinds(machine.run(SUSTAINED_STEPS + TRIAL_STEPS)) == [
        "started raise-prefill-budget",
        "undone raise-prefill-budget",
    ]
    started, undone = (act for _, act in machine.acts)
    assert machine.actions.knobs == Knobs(256)
    assert undone.measured_gain is not None and undone.measured_gain < started.proposal.predicted_gain / 2
    later = machine.run(PAUSE_STEPS["undone"] - TRIAL_STEPS)
    assert kinds(later) == ["declined group-short-sequences"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"pending": 0}, "no prompt waits"),
        ({"budget": 2048, "overhead": 0.03}, "already has the 2048 tokens"),
        ({"budget": 2048, "overhead": 0.03, "limits": Limits(2048, 100)}, "took memory for"),
    ],
)
def test_no_action_on_an_index_alone(fields: dict[str, object], words: str) -> None:
    machine = engine(**fields)  # type: ignore[arg-type]
    declined, grouping = machine.run(2000)
    assert declined.kind == "declined" and words in declined.reason and declined.proposal.predicted_gain == 0
    assert (
        kinds([grouping]) == ["declined group-short-sequences"] and "timed to be quicker at no batch" in grouping.reason
    )
    assert machine.actions.knobs == Knobs(machine.actions.knobs.max_step_tokens)


def test_one_step_of_good_saturation_starts_the_count_again() -> None:
    machine = engine()
    for _ in range(10):
        machine.overhead = 3e-3
        assert machine.run(SUSTAINED_STEPS - 1) == []
        machine.overhead = 0.0
        assert machine.run(1) == []


def test_memory_pressure_releases_cached_blocks_where_steps_wait_for_evictions() -> None:
    machine = engine(overhead=0.0, unused=0, evicting=lambda knobs: 0.0 if knobs.num_ready_blocks else 4e-4)
    acts = machine.run(SUSTAINED_STEPS + TRIAL_STEPS)
    assert kinds(acts) == ["started release-cached-kv", "kept release-cached-kv"]
    assert machine.actions.knobs.num_ready_blocks == 6 and acts[1].measured_gain is not None


def test_memory_pressure_without_evictions_or_excess_reads_does_nothing() -> None:
    machine = engine(overhead=0.0, unused=0)
    (declined,) = machine.run(1000)
    assert declined.kind == "declined" and machine.actions.knobs.num_ready_blocks == 0


def test_reads_that_l2_should_have_served_are_a_gain_that_must_be_seen() -> None:
    cache = CacheView("gpm", 0.8, 0.4, excess_bytes_per_second=2e11)
    machine = engine(overhead=0.0, unused=0, cache=cache)
    acts = machine.run(SUSTAINED_STEPS + TRIAL_STEPS)
    assert kinds(acts) == ["started release-cached-kv", "undone release-cached-kv"]
    assert acts[0].proposal.index.source == "gpm" and acts[0].proposal.predicted_gain == pytest.approx(0.25)
    assert machine.actions.knobs.num_ready_blocks == 0


def test_a_busy_link_turns_prefetch_on_only_where_there_is_something_to_bring() -> None:
    machine = engine(overhead=0.0, pbs=0.9)
    (declined,) = machine.run(1000)
    assert declined.kind == "declined" and "its device only" in declined.reason
    machine = engine(overhead=0.0, pbs=0.9, limits=Limits(2048, 100, can_prefetch=True))
    (started,) = machine.run(SUSTAINED_STEPS)
    assert started.proposal.action == "prefetch-ahead" and machine.actions.knobs.prefetch_ahead


GROUPS = (ShortGroups(64, 127, 2, 128, 20e-6, 18e-6), ShortGroups(128, 255, 4, 128, 30e-6, 20e-6))


def decoding(**fields: object) -> Engine:
    """200 short sequences that decode, their steps slower than the model; 50 layers whose attention groups make quicker by 10 us."""
    limits = Limits(2048, 100, 1e12, num_layers=50, short_groups=GROUPS)
    model = StepModel((64, 256), (0, 1000), (1e-3, 2e-3, 2e-3, 4e-3), 100_000.0, 1e-3)
    usual = {"pending": 0, "batch": 200, "context": 100, "model": model}
    return engine(limits=limits, **usual | fields)


def test_low_saturation_of_short_sequences_groups_them_once_the_budget_is_declined() -> None:
    machine = decoding(saved=lambda knobs: 5e-4 if knobs.attention_rows == 4 else 0.0)
    assert kinds(machine.run(SUSTAINED_STEPS)) == ["declined raise-prefill-budget"]
    (started,) = machine.run(1)
    step = bound_seconds(machine.model, machine_facts(machine)) + machine.overhead
    assert kinds([started]) == ["started group-short-sequences"] and started.proposal.index.name == "csl"
    assert started.proposal.predicted_gain == pytest.approx(50 * 10e-6 / step)
    assert machine.actions.knobs == replace(Knobs(256), attention_rows=4)
    assert "200 sequences of 100 tokens" in started.reason and "20.0 us instead of 30.0" in started.reason
    (kept,) = machine.run(TRIAL_STEPS)
    assert kept.kind == "kept" and machine.actions.knobs.attention_rows == 4
    assert kept.measured_gain == pytest.approx(5e-4 / (step - 5e-4), rel=0.01)
    (again,) = machine.run(PAUSE_STEPS["kept"])
    assert kinds([again]) == ["declined group-short-sequences"] and "share a program already" in again.reason
    machine.context = 129
    assert machine.run(SUSTAINED_STEPS - 1) == []
    (ended,) = machine.run(1)
    assert kinds([ended]) == ["undone group-short-sequences"] and "129 tokens on average" in ended.reason
    assert machine.actions.knobs == Knobs(256)
    machine.context = 100
    acts = machine.run(PAUSE_STEPS["kept"] + 1)
    assert kinds(acts) == ["started group-short-sequences"], "they may be grouped once more"


def test_a_batch_that_grows_later_gets_the_rows_that_were_timed_for_it() -> None:
    """Of the words on the device each range of batches takes at most its own number."""
    machine = decoding(batch=100, overhead=1e-3)
    started = machine.run(SUSTAINED_STEPS + 1)[-1]
    assert kinds([started]) == ["started group-short-sequences"] and "where 2 share a program" in started.reason
    assert machine.actions.knobs.attention_rows == 4


def machine_facts(machine: Engine) -> StepFacts:
    """A step of what it decodes."""
    tokens = machine.batch * machine.context
    return StepFacts(machine.batch, 0, machine.batch, tokens, 0, 1.0, 0.0, 50, 100, 256)


def test_groups_that_gain_nothing_are_undone() -> None:
    machine = decoding()
    acts = machine.run(SUSTAINED_STEPS + 1 + TRIAL_STEPS)
    assert kinds(acts[1:]) == ["started group-short-sequences", "undone group-short-sequences"]
    assert acts[-1].measured_gain == pytest.approx(0.0, abs=1e-9) and machine.actions.knobs == Knobs(256)


def test_a_new_plan_ends_groups_that_were_kept() -> None:
    machine = decoding(saved=lambda knobs: 5e-4 if knobs.attention_rows == 4 else 0.0)
    assert kinds(machine.run(SUSTAINED_STEPS + 1 + TRIAL_STEPS))[-1] == "kept group-short-sequences"
    machine.actions.rebase(Knobs(256))
    machine.context = 5000
    assert machine.actions.knobs.attention_rows == 1 and machine.run(SUSTAINED_STEPS - 1) == []


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"context": 129}, "sequences have 129 tokens on average; sharing programs was timed to be quicker with 128"),
        ({"batch": 8}, "steps have 8 sequences; sharing programs was timed to be quicker for 64 to 127, 128 to 255"),
        ({"batch": 300}, "steps have 300 sequences"),
        ({"batch": 64, "overhead": 20e-3}, "takes 18.0 us instead of 20.0, 0.5% of a step of"),
        (
            {"pending": 100_000, "overhead": 0.03, "budget": 2048},
            "0 of the last 50 steps were without prompts, 20 are wanted",
        ),
    ],
)
def test_sequences_are_not_grouped_without_a_gain_to_expect(fields: dict[str, object], words: str) -> None:
    machine = decoding(**fields)
    budget, grouping = machine.run(2000)
    assert kinds([budget, grouping]) == ["declined raise-prefill-budget", "declined group-short-sequences"]
    assert words in grouping.reason and machine.actions.knobs.attention_rows == 1


def test_a_trial_whose_work_ends_is_undone() -> None:
    machine = engine()
    machine.run(SUSTAINED_STEPS)
    machine.pending = 0
    (undone,) = machine.run(TRIAL_STEPS)
    assert undone.kind == "undone" and undone.measured_gain is None and "too few" in undone.reason


def test_a_new_plan_ends_a_trial_and_forgets_what_was_tried() -> None:
    machine = engine()
    machine.run(SUSTAINED_STEPS)
    machine.actions.rebase(Knobs(128))
    assert machine.actions.knobs == Knobs(128)
    assert machine.run(SUSTAINED_STEPS - 1) == [] and kinds(machine.run(1)) == ["started raise-prefill-budget"]


@given(
    st.lists(st.tuples(st.floats(0, 0.02), st.integers(0, 5000), st.integers(0, 100)), min_size=1, max_size=8),
    st.integers(1, 2048),
)
def test_whatever_happens_one_trial_at_a_time_within_the_limits(
    phases: list[tuple[float, int, int]], budget: int
) -> None:
    machine = engine(budget)
    for overhead, pending, unused in phases:
        machine.overhead, machine.pending, machine.unused = overhead, pending, unused
        machine.run(70)
        assert 1 <= machine.actions.knobs.max_step_tokens <= 2048
        assert machine.actions.knobs.num_ready_blocks <= 100
    open_trial = None
    for number, act in machine.acts:
        if act.kind == "started":
            assert open_trial is None
            open_trial = number
        elif act.kind in ("kept", "undone"):
            assert open_trial is not None and number - open_trial == TRIAL_STEPS
            open_trial = None
        else:
            assert open_trial is None
