"""Re-planning under a running engine, with the real planners: what changes now, what waits, and the way back."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman_agent.model.config import ModelConfig
from dragoman_agent.pal.live import CPU_THRESHOLDS, LiveEvent, LiveState, overlay
from dragoman_agent.pal.planner import Limits, PlanError, Road, Switches, plan_for
from dragoman_agent.pal.profile import DeviceFacts, Profile, Value
from dragoman_agent.pal.replan import describe, replan

MODEL = ModelConfig("m", "llama", 16, 1024, 2816, 16, 8, 64, 32000, 8192, 1e4, 1e-5, True)
ROAD = Road("native-int8", "fast", MODEL.num_parameters, "float32", 4.0)
PROFILE = Profile(
    "cpu",
    DeviceFacts("cpu", 0, "a cpu", "x86_64-avx2", 32 << 30, "u"),
    "f",
    "2026-11-29T00:00:00+00:00",
    {
        "compute.cores": Value(8, "", "reported"),
        "compute.instruction_set": Value("avx2", "", "reported"),
        "compute.matmul_float32": Value(1.6e11, "flop/s", "measured"),
        "memory.read_bandwidth": Value(4e10, "bytes/s", "measured"),
        "memory.total": Value(32 << 30, "bytes", "reported"),
        "memory.free": Value(24 << 30, "bytes", "reported"),
        "scheduling.thread_handover": Value(5e-6, "s", "measured"),
    },
)
MAKE = partial(plan_for, model=MODEL, limits=Limits(memory_utilization=0.5), switches=Switches(), road=ROAD)
START, _ = MAKE(PROFILE)


def scaled(**values: float) -> Profile:
    """The profile with some values times a factor."""
    names = {name.replace("__", "."): factor for name, factor in values.items()}
    return PROFILE.with_values(
        {name: replace(PROFILE.values[name], value=PROFILE.number(name) * factor) for name, factor in names.items()}
    )


def test_the_same_profile_changes_nothing() -> None:
    result = replan(START, START, MAKE, PROFILE, memory_is_committed=True)
    assert result.plan == START and not result.changes and not result.applies


def test_a_slower_device_gets_smaller_steps_and_a_slower_model_and_recovers() -> None:
    slow = scaled(compute__matmul_float32=0.25)
    result = replan(START, START, MAKE, slow, memory_is_committed=True)
    assert result.applies and result.plan.max_batch_tokens < START.max_batch_tokens
    assert result.plan.step_model.prefill_tokens_per_second == pytest.approx(
        0.25 * START.step_model.prefill_tokens_per_second
    )
    assert result.plan.page_size == START.page_size and result.plan.num_blocks == START.num_blocks
    back = replan(result.plan, START, MAKE, PROFILE, memory_is_committed=True)
    assert back.plan == START and back.applies
    decision = describe([LiveEvent("clock", 1.0, 0.25, "clock down")], result)
    assert "max_batch_tokens" in decision.chosen and "clock down" in decision.reason and decision.predicted


def test_steps_beside_streams_are_told_of_where_a_plan_has_fewer_tokens_for_them() -> None:
    def fewer(profile: Profile, company_tokens: int):
        plan, decisions = MAKE(profile)
        return replace(plan, company_tokens=company_tokens), decisions

    slow = scaled(compute__matmul_float32=0.25)
    assert "company_tokens" not in describe([], replan(START, START, MAKE, slow, memory_is_committed=True)).chosen
    start, most = replace(START, company_tokens=64), START.max_batch_tokens
    result = replan(start, start, partial(fewer, company_tokens=32), PROFILE, memory_is_committed=True)
    assert [str(change) for change in result.changes] == ["company_tokens 64 -> 32 tokens"]
    assert (result.plan.max_company_tokens, result.plan.max_batch_tokens) == (32, most)
    back = replan(result.plan, start, partial(fewer, company_tokens=0), PROFILE, memory_is_committed=True)
    assert back.plan == start, "no more than at the start"
    equal = replan(START, START, partial(fewer, company_tokens=32), PROFILE, memory_is_committed=True)
    assert [str(change) for change in equal.changes] == [f"company_tokens {most} -> 32 tokens"]


def test_nothing_grows_past_what_the_engine_took_at_its_start() -> None:
    fast = scaled(compute__matmul_float32=64.0, memory__free=1.3)
    for committed in (True, False):
        result = replan(START, START, MAKE, fast, memory_is_committed=committed)
        assert result.plan.max_batch_tokens == START.max_batch_tokens
        assert result.plan.num_blocks == START.num_blocks


def test_less_free_memory_binds_only_where_the_arena_is_not_yet_taken() -> None:
    tight = scaled(memory__free=0.1)
    elastic = replan(START, START, MAKE, tight, memory_is_committed=False)
    assert elastic.plan.num_blocks < START.num_blocks
    assert [c.field for c in elastic.changes if c.applies] == ["num_blocks"]
    taken = replan(START, START, MAKE, tight, memory_is_committed=True)
    assert taken.plan.num_blocks == START.num_blocks and not taken.applies
    (change,) = taken.changes
    assert change.field == "num_blocks" and "next start" in str(change)
    assert "the plan in force stays" in describe([], taken).chosen and "next start" in describe([], taken).reason


def test_limits_under_which_nothing_fits_leave_the_plan_and_say_so() -> None:
    result = replan(START, START, MAKE, scaled(memory__free=0.001), memory_is_committed=True)
    assert result.plan is START and not result.applies and result.problem
    decision = describe([LiveEvent("foreign-memory", 0.0, 0.9, "a neighbour")], result)
    assert "a neighbour" in decision.reason and "refused" in decision.reason


def test_what_is_made_at_start_waits_for_the_next_one() -> None:
    def other(profile: Profile):  # a planner whose choice of page and threads depends on the limits
        plan, decisions = MAKE(profile)
        return replace(plan, page_size=128, num_threads=plan.num_threads // 2), decisions

    result = replan(START, START, other, PROFILE, memory_is_committed=True)
    assert {c.field: c.applies for c in result.changes} == {"page_size": False, "num_threads": False}
    assert result.plan.page_size == START.page_size
    assert "pages" in str(result.changes[0])


@given(st.floats(0.05, 4), st.floats(0.05, 4), st.floats(0.0, 1.0), st.booleans())
def test_any_overlay_gives_a_plan_within_the_start_or_a_reason(
    rate: float, bandwidth: float, foreign: float, committed: bool
) -> None:
    state = LiveState(in_force={"foreign-memory": foreign, "clock": min(rate, 1.0)})
    profile = overlay(scaled(memory__read_bandwidth=bandwidth), state, CPU_THRESHOLDS, 24 << 30)
    result = replan(START, START, MAKE, profile, memory_is_committed=committed)
    assert result.plan.max_batch_tokens <= START.max_batch_tokens
    assert 3 <= result.plan.num_blocks <= START.num_blocks
    if result.problem:
        assert result.plan is START
        with pytest.raises(PlanError):
            MAKE(profile)
    assert replan(result.plan, START, MAKE, PROFILE, memory_is_committed=committed).plan == START
