"""A library's attention over prompts is taken where it was timed quicker and the host keeps up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from dragoman_agent.model.config import ModelConfig
from dragoman_agent.pal import step_cost
from dragoman_agent.pal.candidates import tuning_cases
from dragoman_agent.pal.decisions import Decision
from dragoman_agent.pal.kernel_calls import parse_key
from dragoman_agent.pal.kernel_times import KernelTimes
from dragoman_agent.pal.plan import LibraryPrefill, Plan, PrefillAttention
from dragoman_agent.pal.planner import Limits, Switches, plan_for
from dragoman_agent.pal.profile import Profile
from dragoman_agent.pal.rates import rates_of
from dragoman_agent.pal.timings import Timings

OWN = PrefillAttention("paged", 64, 64, 4, 3)
Factor = Callable[[int], float | None]  # the library's seconds over our own, by tokens; None: it could not be timed
Planner = Callable[..., tuple[Plan, Decision]]


@pytest.fixture
def planned(card: Callable[..., Profile], shapes: Callable[[str], ModelConfig]) -> Planner:
    """The plan where every kernel takes what is predicted and the library `factor` times our attention."""

    def make(
        factor: Factor,
        name: str = "qwen3-8b",
        *,
        deterministic: bool = False,
        off: bool = False,
        timed_for: int | None = None,
        max_context_tokens: int | None = None,
    ) -> tuple[Plan, Decision]:
        limits = Limits(deterministic=deterministic, max_context_tokens=max_context_tokens)
        model, here = shapes(name), card()
        first, _ = plan_for(here, model, replace(limits, max_context_tokens=timed_for), Switches())
        times = KernelTimes(rates_of(here))
        seconds = {}
        for case in tuning_cases(here, model, first):
            taken: float | None = case.predicted_seconds
            if case.kind == "prefill-library":
                tokens, context = case.shape["tokens"], case.shape["context"]
                ours = times.seconds(step_cost.prefill_attention_call(model, first.page_size, OWN, tokens, context))
                over = factor(tokens)
                taken = None if over is None else ours * over
            if taken is not None:
                seconds[case.key] = taken
        switches = Switches(launch_tuning=False) if off else Switches()
        plan, decisions = plan_for(here, model, limits, switches, Timings(here.fingerprint, "k", seconds))
        return plan, next(decision for decision in decisions if decision.subject == "library-prefill")

    return make


def test_the_fewest_tokens_at_which_it_is_quicker(planned: Planner) -> None:
    plan, decision = planned(lambda tokens: 0.7 if tokens >= 4096 else 1.1)
    assert plan.library_prefill == LibraryPrefill("cudnn", 4096, 16)
    assert decision.chosen == "cudnn from 4096"
    assert "quicker than our kernel at 4096 tokens" in decision.reason
    assert {candidate.name for candidate in decision.candidates} >= {"cudnn at 1024", "own at 8192"}


@pytest.mark.parametrize("timed_for", [4096, None])
def test_where_contexts_are_limited_it_is_compared_at_what_was_timed(planned: Planner, timed_for: int | None) -> None:
    """For the same limit, or for none."""
    plan, decision = planned(lambda tokens: 0.7, timed_for=timed_for, max_context_tokens=4096)
    assert plan.max_context_tokens == 4096
    assert plan.library_prefill is not None and plan.library_prefill.min_tokens == 1024, decision.reason


def test_a_step_that_the_host_holds_up_stays_with_our_kernel(planned: Planner) -> None:
    large, _ = planned(lambda tokens: 0.5)
    small, _ = planned(lambda tokens: 0.5, "qwen3-0.6b")
    assert large.library_prefill is not None and small.library_prefill is not None
    assert large.library_prefill.min_tokens == 1024
    assert small.library_prefill.min_tokens > 1024


@pytest.mark.parametrize("factor", [1.0, 0.98, 1.3])
def test_not_where_it_gains_nothing(planned: Planner, factor: float) -> None:
    plan, decision = planned(lambda tokens: factor)
    assert plan.library_prefill is None
    assert (decision.chosen, bool(decision.candidates)) == ("none", True)


def test_not_where_it_was_not_timed(planned: Planner) -> None:
    plan, decision = planned(lambda tokens: None)
    assert plan.library_prefill is None
    assert "not timed" in decision.reason


def test_not_in_a_deterministic_plan_nor_with_tuning_off(planned: Planner) -> None:
    fixed, why = planned(lambda tokens: 0.5, deterministic=True)
    off, _ = planned(lambda tokens: 0.5, off=True)
    assert fixed.library_prefill is None and off.library_prefill is None
    assert "deterministic" in why.reason


def test_a_step_is_predicted_with_it(planned: Planner) -> None:
    with_it, _ = planned(lambda tokens: 0.5)
    without, _ = planned(lambda tokens: 1.0)
    assert with_it.step_model.prefill_tokens_per_second > 1.005 * without.step_model.prefill_tokens_per_second
    assert with_it.digest() != without.digest()


def test_its_key_is_read_back(shapes: Callable[[str], ModelConfig]) -> None:
    call = step_cost.library_prefill_call(shapes("qwen3-8b"), 64, 1024, 4096)
    assert parse_key(call.key) == call
    assert call.point == (1024, 4096)
