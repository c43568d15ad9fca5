"""Products of few rows as whole layers tell: what wins alone and loses in the chain stays with the library."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dragoman_agent.model.config import ModelConfig
from dragoman_agent.pal.candidates import tuning_cases
from dragoman_agent.pal.decisions import Decision
from dragoman_agent.pal.kernel_calls import parse_key
from dragoman_agent.pal.layer_timing import LayerCase
from dragoman_agent.pal.plan import Plan
from dragoman_agent.pal.planner import Limits, Switches, plan_for
from dragoman_agent.pal.planner_cuda import wanted_layers
from dragoman_agent.pal.profile import Profile
from dragoman_agent.pal.timings import Timings
from dragoman_kernels.triton.launches import GemmLaunch

UP, DOWN = (16384, 2048), (2048, 8192)  # of Llama-3.2-1B
Chain = Callable[[LayerCase], float | None]
Planned = tuple[Plan, dict[str, Decision], Timings]


@pytest.fixture
def planned(card: Callable[..., Profile], shapes: Callable[[str], ModelConfig]) -> Callable[[Chain], Planned]:
    """Llama-3.2-1B where the kernel of few rows wins two matrices alone, to 32 and to 8 rows; `chain` times the layers."""
    model, here = shapes("llama-3.2-1b"), card()
    first, _ = plan_for(here, model, Limits(), Switches())
    seconds = {}
    for case in tuning_cases(here, model, first):
        call = parse_key(case.key)
        is_own = call is not None and isinstance(call.config, GemmLaunch)
        size = (case.shape["n"], case.shape["k"]) if is_own else None
        wins = (size == UP and case.shape["m"] <= 32) or (size == DOWN and case.shape["m"] <= 8)
        seconds[case.key] = case.predicted_seconds * ((0.9 if wins else 1.2) if is_own else 1.0)

    def make(chain: Chain) -> Planned:
        timings = Timings(here.fingerprint, "k", seconds)
        for _ in range(3):
            cases = wanted_layers(here, model, Limits(), Switches(), timings)
            timings = timings.with_seconds({case.key: found for case in cases if (found := chain(case)) is not None})
        assert all(timings.knows(case.key) or chain(case) is None for case in cases), "asked again and again"
        plan, decisions = plan_for(here, model, Limits(), Switches(), timings)
        return plan, {decision.subject: decision for decision in decisions}, timings

    return make


def own(case: LayerCase) -> set[tuple[int, int]]:
    return {(one["n"], one["k"]) for one in case.config["gemm_decode"]}


def entries(plan: Plan) -> list[tuple[int, int, int]]:
    return [(one.n, one.k, one.max_rows) for one in plan.gemm_decode]


def test_without_timed_layers_the_kernels_alone_decide(planned: Callable[[Chain], Planned]) -> None:
    plan, decisions, _ = planned(lambda case: None)
    assert entries(plan) == [(*UP, 8), (*UP, 16), (*UP, 32), (*DOWN, 8)]
    assert "one of each matrix takes" in decisions["gemm-decode"].reason


def test_what_loses_in_the_chain_stays_with_the_library(planned: Callable[[Chain], Planned]) -> None:
    plan, decisions, _ = planned(lambda case: 1e-3 * (1 - 0.03 * (UP in own(case)) + 0.05 * (DOWN in own(case))))
    assert entries(plan) == [(*UP, 8), (*UP, 16), (*UP, 32)]
    decision = decisions["gemm-decode"]
    assert "-3.0% to 8 rows, -3.0% to 16 rows, -3.0% to 32 rows" in decision.reason
    assert {one.name: one.rejected_because for one in decision.candidates}[
        "2048x8192 to 8 rows"
    ] == "+5.0% of the layers"


def test_the_library_does_everything_where_all_lose(planned: Callable[[Chain], Planned]) -> None:
    plan, decisions, _ = planned(lambda case: 1e-3 * (1 + 0.02 * len(own(case))))
    assert plan.gemm_decode == () and decisions["gemm-decode"].chosen == "library"
    nearly, _, _ = planned(lambda case: 1e-3 * (1 - 0.002 * len(own(case))))
    assert nearly.gemm_decode == (), "less than measurements scatter"


def test_an_entry_ends_where_its_rows_lose(planned: Callable[[Chain], Planned]) -> None:
    plan, _, _ = planned(lambda case: 1e-3 * (1 + len(own(case)) * (0.02 if case.shape["batch"] == 16 else -0.02)))
    assert entries(plan) == [(*UP, 8), (*DOWN, 8)], "32 rows win, but an entry serves 16 rows too"


def test_an_early_start_may_be_what_makes_it_win(planned: Callable[[Chain], Planned]) -> None:
    def chain(case: LayerCase) -> float:
        gain = 0.1 if case.config["dependent"] and own(case) == {UP, DOWN} else 0.0
        return 1e-3 * (1 + 0.01 * len(own(case)) - gain)

    plan, _, _ = planned(chain)
    assert (*DOWN, 8) in entries(plan) and plan.dependent_max_batch == 8


@pytest.mark.parametrize("padded", [1, 8])
def test_padding_is_decided_by_the_chain_of_one_sequence(planned: Callable[[Chain], Planned], padded: int) -> None:
    def chain(case: LayerCase) -> float:
        return 1e-3 * (0.95 if case.shape["batch"] == 1 and case.config["min_gemm_rows"] == padded else 1.0)

    plan, decisions, _ = planned(chain)
    assert plan.min_gemm_rows == padded and "as a chain" in decisions["gemm-rows"].reason


def test_few_chains_are_asked_for_and_equal_work_once(planned: Callable[[Chain], Planned]) -> None:
    seen: dict[str, LayerCase] = {}

    def chain(case: LayerCase) -> float:
        assert seen.setdefault(case.key, case) == case, "one name for two pieces of work"
        return 1e-3

    planned(chain)
    works = [repr((case.shape, case.config)) for case in seen.values()]
    assert len(set(works)) == len(works) < 60
