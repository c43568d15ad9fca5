"""A second launch of prefill attention: where one alone loses what timing can tell, divided by what was timed, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from dragoman_agent.device.cuda_inputs import Room
from dragoman_agent.engine.config import EngineConfig
from dragoman_agent.model.config import ModelConfig
from dragoman_agent.pal import step_cost
from dragoman_agent.pal.candidates import tuning_cases
from dragoman_agent.pal.decisions import Decision
from dragoman_agent.pal.kernel_calls import parse_key
from dragoman_agent.pal.kernel_times import KernelTimes
from dragoman_agent.pal.plan import LongPrefill, Plan, PrefillAttention, PrefillForms, seen_tokens
from dragoman_agent.pal.plan_fields import plan_fields
from dragoman_agent.pal.planner import Limits, Switches, plan_for
from dragoman_agent.pal.planner_batch import GRAPH_NODE_BYTES
from dragoman_agent.pal.planner_mixed import mixed_graph_bytes
from dragoman_agent.pal.profile import Profile
from dragoman_agent.pal.rates import rates_of
from dragoman_agent.pal.timings import Timings

MODEL = "qwen3-0.6b"
SMALL, LARGE = PrefillAttention("paged", 64, 64, 4, 5, tma=True), PrefillAttention("paged", 128, 64, 12, 4, tma=True)
Card, Shapes = Callable[..., Profile], Callable[[str], ModelConfig]
# Seconds of a layer's attention by (launch, prompts, tokens, context); None: not timed.
Seconds = Callable[[PrefillAttention, int, int, int], float | None]
Planner = Callable[..., tuple[Plan, dict[str, Decision]]]


def per_key(start: float, small: float, large: float, tail: float = 1.0) -> Seconds:
    """A tile of queries and each key that it sees take so much; the others are slow. `tail`: of LARGE for one usual prompt."""

    def seconds(one: PrefillAttention, prompts: int, tokens: int, context: int) -> float:
        seen = prompts * seen_tokens(tokens, context)
        if one not in (SMALL, LARGE):
            return 1e-10 * seen
        if one == SMALL:
            return 1e-12 * small * seen
        return (tail if (prompts, context) == (1, 1024) else 1.0) * 1e-12 * (start * prompts * tokens + large * seen)

    return seconds


@pytest.fixture
def planned(card: Card, shapes: Shapes) -> Planner:
    """The plan and its decisions where prefill attention takes what is given and other kernels what is predicted."""

    def make(
        seconds: Seconds, timed_for: int | None = None, **limits: bool | str | int
    ) -> tuple[Plan, dict[str, Decision]]:
        here, model = card(), shapes(MODEL)
        asked = Limits(**limits)  # type: ignore[arg-type]
        first, _ = plan_for(here, model, Limits(max_context_tokens=timed_for), Switches())
        held: dict[str, float] = {}
        for case in tuning_cases(here, model, first):
            call, taken = parse_key(case.key), case.predicted_seconds
            assert call is not None
            if case.kind == "prefill-library":
                continue
            if isinstance(call.config, PrefillAttention):
                shape = call.shape
                own = seconds(
                    call.config, shape.get("prompts", 1), shape["tokens"], shape.get("context", shape["tokens"])
                )
                if own is None:
                    continue
                taken = own
            held[case.key] = taken
        plan, decisions = plan_for(here, model, asked, Switches(), Timings("print", "hash", held))
        return plan, {decision.subject: decision for decision in decisions}

    return make


def test_two_launches_where_contexts_divide_them_and_the_boundary_is_where_their_times_cross(planned: Planner) -> None:
    """A tile takes 900 keys' time more by the one, a key 1.2 times more by the other: equal at 900 / 0.2 = 4,500 tokens seen."""
    plan, decisions = planned(per_key(start=900.0, small=1.2, large=1.0))
    assert plan.prefill_attention == SMALL
    assert plan.long_prefill is not None and plan.long_prefill.attention == LARGE
    assert plan.long_prefill.min_context_tokens == pytest.approx(4500, rel=0.01)
    assert plan.long_prefill.min_tokens == 512, "quicker for the last 512 of a long prompt too"
    assert plan.long_prefill.many_tokens == 0, "many usual prompts are attended quicker by the usual one"
    told = decisions["long-prefill"]
    assert told.chosen.startswith("m128-n64-w12-g4-tma from 512 tokens that see 4,5")
    assert "is the quickest for a prompt of 1,024 tokens and 16 prompts of 1,024 tokens" in told.reason
    candidates = {candidate.name: candidate.predicted for candidate in told.candidates}
    assert told.predicted == candidates["m128-n64-w12-g4-tma"] < (candidates["m64-n64-w4-g5-tma"] or 0)
    assert told.inputs and told.unit == "s"
    usual = decisions["prefill-attention"]
    assert usual.chosen == "m64-n64-w4-g5-tma" and "8,192" not in usual.reason


def test_points_between_move_the_boundary(planned: Planner) -> None:
    """Two prompts of 2,048 and 4,096 tokens say more than a line from 512 to 7,168 tokens seen does."""
    line = per_key(start=900.0, small=1.2, large=1.0)

    def bent(one: PrefillAttention, prompts: int, tokens: int, context: int) -> float | None:
        seconds = line(one, prompts, tokens, context)
        return seconds if seconds is None or one != LARGE or context != 2048 else 0.5 * seconds

    plan, _ = planned(bent)
    assert plan.long_prefill is not None and 512 < plan.long_prefill.min_context_tokens < 1025


@pytest.mark.parametrize(("slower", "fewest"), [((512,), 1024), ((1024,), 2048), ((512, 1024), 2048)])
def test_parts_of_a_long_prompt_take_it_from_the_length_on_at_which_it_was_quicker(
    planned: Planner, slower: tuple[int, ...], fewest: int
) -> None:
    line = per_key(start=900.0, small=1.2, large=1.0)

    def seconds(one: PrefillAttention, prompts: int, tokens: int, context: int) -> float | None:
        found = line(one, prompts, tokens, context)
        is_slower = one == LARGE and context > tokens and tokens in slower
        return found if found is None or not is_slower else 2 * found

    plan, _ = planned(seconds)
    assert plan.long_prefill is not None and plan.long_prefill.min_tokens == fewest


def test_few_tokens_take_another_launch_than_many_where_large_tiles_leave_the_device_without_work(
    planned: Planner,
) -> None:
    """Both at once otherwise: the large tiles lose for one usual prompt alone."""
    plan, decisions = planned(per_key(start=0.0, small=1.1, large=1.0, tail=1.3))
    assert plan.prefill_attention == SMALL
    long = plan.long_prefill
    assert long is not None and (long.attention, long.min_tokens, long.many_tokens) == (LARGE, 512, 2048)
    assert decisions["long-prefill"].chosen.endswith("in the mean, or 2,048 tokens")
    forms = PrefillForms(SMALL, long)
    assert forms.of(1024, 1024) == SMALL and forms.of(1024, 1024, 16) == LARGE
    assert forms.of(512, 8192) == LARGE and forms.of(384, 8192) == SMALL
    assert forms.of(64, 64, 64) == SMALL, "half of each tile of 128 queries would be empty"


@pytest.mark.parametrize(("small", "expected"), [(1.02, False), (1.05, True)])
def test_what_timing_cannot_tell_is_not_worth_a_second_one(planned: Planner, small: float, expected: bool) -> None:
    plan, decisions = planned(
        lambda one, prompts, tokens, context: 1.0 + (small - 1.0) * (one != (SMALL if context <= 1024 else LARGE))
    )
    assert (plan.long_prefill is not None) is expected
    if not expected:
        assert decisions["long-prefill"].chosen == "none" and "2.0%" in decisions["long-prefill"].reason


def test_one_that_wins_everywhere_serves_all_lengths(planned: Planner) -> None:
    plan, decisions = planned(per_key(start=0.0, small=1.3, large=1.0))
    assert plan.prefill_attention == LARGE and plan.long_prefill is None
    assert "would gain 0.0%" in decisions["long-prefill"].reason
    assert not any(field.name.startswith("long_prefill") for field in plan_fields(plan))


def test_without_a_part_of_a_long_prompt_or_many_prompts_there_is_one(planned: Planner) -> None:
    times = per_key(start=900.0, small=1.2, large=1.0)

    def without(what: str) -> Seconds:
        def seconds(one: PrefillAttention, prompts: int, tokens: int, context: int) -> float | None:
            left_out = prompts > 1 if what == "many" else context > tokens
            return None if left_out else times(one, prompts, tokens, context)

        return seconds

    for what in ("many", "long"):
        plan, decisions = planned(without(what))
        assert plan.long_prefill is None and decisions["long-prefill"].chosen == "none"
        assert "were not timed" in decisions["long-prefill"].reason
    plan, decisions = planned(times, timed_for=2048, max_context_tokens=2048)
    assert plan.long_prefill is None
    assert decisions["long-prefill"].reason == "prompts of up to 2,048 tokens are computed whole: none looks far back"


def test_a_limit_of_contexts_that_nothing_was_timed_for_has_one_launch_judged_by_what_was_timed(
    planned: Planner,
) -> None:
    times = per_key(start=0.0, small=1.1, large=1.0, tail=1.3)
    plan, decisions = planned(times, timed_for=4096, max_context_tokens=4096)
    assert plan.long_prefill is not None and plan.long_prefill.attention == LARGE
    plan, decisions = planned(times, max_context_tokens=4096)
    assert plan.long_prefill is None
    assert (
        decisions["long-prefill"].reason
        == "launches were not timed for contexts up to 4,096 tokens, which --tune now does"
    )
    reason = decisions["prefill-attention"].reason
    assert "for the last 2,048 of 8,192 tokens, for 16 prompts of 1,024 tokens, measured" in reason


def test_bits_must_not_depend_on_lengths_in_a_deterministic_plan_and_eight_bits_were_not_compared(
    planned: Planner,
) -> None:
    times = per_key(start=900.0, small=1.2, large=1.0)
    fixed, decisions = planned(times, deterministic=True)
    assert fixed.long_prefill is None and "deterministic" in decisions["long-prefill"].reason
    narrow, decisions = planned(times, kv_dtype="fp8")
    assert narrow.long_prefill is None and "eight bits" in decisions["long-prefill"].reason


def test_a_step_is_priced_by_the_launch_that_runs_it_and_its_graphs_by_both(
    planned: Planner, card: Card, shapes: Shapes
) -> None:
    plan, _ = planned(per_key(start=900.0, small=1.2, large=1.0))
    model, long = shapes(MODEL), plan.long_prefill
    assert long is not None
    call = step_cost.prefill_attention_call(model, plan.page_size, LARGE, 16384, 16384)
    quick = KernelTimes(rates_of(card()), Timings("print", "hash", {call.key: 1e-6}))
    usual, both = (
        step_cost.prefill_step_seconds(quick, model, plan.page_size, forms, 16384, 16384)
        for forms in (PrefillForms(SMALL), PrefillForms(SMALL, long))
    )
    assert both < usual / 1.5
    again = mixed_graph_bytes(model, plan.captured_tokens, plan.max_num_seqs, None, long)
    ops: Any = SimpleNamespace(library=None, queries_an_item=64)
    rooms = [room for room in Room.all_of(plan, ops) if room.is_long]
    assert {room.num_tokens for room in rooms} == {size for size in plan.captured_tokens if size >= 512}
    nodes = step_cost.num_kernels(model, is_split=True) * GRAPH_NODE_BYTES
    once = mixed_graph_bytes(model, plan.captured_tokens, plan.max_num_seqs)
    assert again - once == sum(nodes + 2 * room.num_tokens * model.hidden_size for room in rooms)
    lines = {line.name: line.size_bytes for line in plan.memory}
    without = replace(plan, long_prefill=None)
    assert lines["graphs"] > again and without.digest() != plan.digest()


def test_it_survives_the_way_to_the_engine_process(planned: Planner) -> None:
    plan, _ = planned(per_key(start=900.0, small=1.2, large=1.0))
    config = EngineConfig("cuda", "m", plan)
    assert isinstance(plan.long_prefill, LongPrefill) and EngineConfig.from_json(config.to_json()) == config
    broken = config.to_json().replace('"min_context_tokens"', '"other"')
    with pytest.raises(ValueError, match="long prefill: unknown key 'other'"):
        EngineConfig.from_json(broken)
