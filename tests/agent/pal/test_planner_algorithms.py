"""An algorithm of the library other than its own choice is planned where it was timed quicker under load."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest

from dragoman_agent.model.config import ModelConfig
from dragoman_agent.pal import step_cost
from dragoman_agent.pal.candidates import LIBRARY_BANDS, library_gemm_matrices, tuning_cases
from dragoman_agent.pal.decisions import Decision
from dragoman_agent.pal.kernel_calls import LibraryAlgorithm, parse_key
from dragoman_agent.pal.plan import MAX_LIBRARY_ALGORITHMS, LibraryGemm, Plan
from dragoman_agent.pal.planner import Limits, Switches, plan_for
from dragoman_agent.pal.profile import Profile
from dragoman_agent.pal.timings import Timings

QKV, OUT, GATE_UP, DOWN = (6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)
Factors = Mapping[
    tuple[int, int], Mapping[int, float]
]  # of the seconds of the library's own choice, by matrix and rank
Planner = Callable[..., tuple[Plan, Decision]]


@pytest.fixture
def planned(card: Callable[..., Profile], shapes: Callable[[str], ModelConfig]) -> Planner:
    """The plan where each algorithm takes `factors` times what the library's own choice takes at 8,192 rows, 1.02 where it says
    nothing; `few` are those at 2,048.
    """

    def make(factors: Factors, few: Factors | None = None, *, drop: Callable[[int | None], bool] = lambda rank: False, limits: Limits | None = None, switches: Switches | None = None) -> tuple[Plan, Decision]:  # fmt: skip
        model, here = shapes("qwen3-8b"), card()
        first, _ = plan_for(here, model, Limits(), Switches())
        seconds = {}
        for case in tuning_cases(here, model, first):
            factor = 1.0
            if case.kind == "gemm-library":
                rank = case.config.rank if isinstance(case.config, LibraryAlgorithm) else None
                if drop(rank):
                    continue
                matrix = (case.shape["n"], case.shape["k"])
                factor = (
                    1.0
                    if rank is None
                    else (factors if case.shape["m"] > 4096 else few or {}).get(matrix, {}).get(rank, 1.02)
                )
            seconds[case.key] = case.predicted_seconds * factor
        plan, decisions = plan_for(
            here, model, limits or Limits(), switches or Switches(), Timings(here.fingerprint, "k", seconds)
        )
        return plan, next(decision for decision in decisions if decision.subject == "gemm-library")

    return make


def test_the_quickest_of_each_matrix_where_it_is_worth_it(planned: Planner) -> None:
    plan, decision = planned({GATE_UP: {5: 0.95, 6: 0.97}, QKV: {3: 0.969}, DOWN: {1: 0.98}})
    assert plan.library_gemm == (LibraryGemm(*QKV, 4096, 0, 8192, 3), LibraryGemm(*GATE_UP, 4096, 0, 8192, 5))
    assert decision.chosen == "6144x4096 from 4096 rows by number 4, 24576x4096 from 4096 rows by number 6"
    assert "-3.1%, -5.0%" in decision.reason
    names = {candidate.name: candidate.rejected_because for candidate in decision.candidates}
    assert names["24576x4096 at 8192 by number 6"] == "" and names["24576x4096 at 8192 by its own choice"] == "+5.3%"
    assert names["4096x12288 at 8192 by its own choice"] == "" and names["4096x12288 at 8192 by number 2"] == "-2.0%"
    assert len(names) == len(LIBRARY_BANDS) * 4 * (MAX_LIBRARY_ALGORITHMS + 1)


def test_fewer_rows_have_an_algorithm_of_their_own_or_none(planned: Planner) -> None:
    plan, _ = planned({QKV: {3: 0.9}}, {QKV: {2: 0.9}, DOWN: {1: 0.9}})
    assert plan.library_gemm == (
        LibraryGemm(*QKV, 1536, 4095, 2048, 2), LibraryGemm(*DOWN, 1536, 4095, 2048, 1), LibraryGemm(*QKV, 4096, 0, 8192, 3),
    )  # fmt: skip


def test_only_rows_that_a_step_has_are_timed(
    card: Callable[..., Profile], shapes: Callable[[str], ModelConfig]
) -> None:
    def timed(chunk: int) -> set[int]:
        plan, _ = plan_for(card(), shapes("qwen3-8b"), Limits(), Switches())
        cases = tuning_cases(card(), shapes("qwen3-8b"), replace(plan, max_batch_tokens=chunk))
        return {case.shape["m"] for case in cases if case.kind == "gemm-library"}

    assert (timed(1024), timed(2048), timed(8192)) == (set(), {2048}, {2048, 8192})


def test_what_scatters_as_much_is_no_reason(planned: Planner) -> None:
    plan, decision = planned({GATE_UP: {5: 0.975}})
    assert plan.library_gemm == () and decision.chosen == "none"
    assert "own choice is the quickest" in decision.reason


@pytest.mark.parametrize("drop", [lambda rank: rank is None, lambda rank: rank is not None, lambda rank: True])
def test_nothing_is_chosen_where_the_library_or_its_rivals_were_not_timed(
    planned: Planner, drop: Callable[[int | None], bool]
) -> None:
    plan, decision = planned({GATE_UP: {5: 0.5}}, drop=drop)
    assert plan.library_gemm == () and "not timed on this device" in decision.reason


def test_a_deterministic_plan_and_one_without_tuning_have_none(planned: Planner) -> None:
    quick = {GATE_UP: {5: 0.5}}
    fixed, why = planned(quick, limits=Limits(deterministic=True))
    assert fixed.library_gemm == () and "deterministic" in why.reason
    off, why = planned(quick, switches=Switches(launch_tuning=False))
    assert off.library_gemm == () and "--pal-launch-tuning off" in why.reason


def test_matrices_with_a_bias_are_left_to_torch(shapes: Callable[[str], ModelConfig]) -> None:
    model = shapes("qwen3-8b")
    assert library_gemm_matrices(model) == [QKV, OUT, GATE_UP, DOWN]
    assert library_gemm_matrices(replace(model, attention_bias=True)) == [OUT, GATE_UP, DOWN]
    assert library_gemm_matrices(replace(model, attention_output_bias=True)) == [QKV, GATE_UP, DOWN]


@pytest.mark.parametrize("rank", [None, 0, 7])
def test_keys_are_read_again(rank: int | None) -> None:
    call = step_cost.library_gemm_call(8192, *GATE_UP, rank)
    assert call.key == "gemm-library/m8192/n24576/k4096" + ("" if rank is None else f"/a{rank}")
    assert parse_key(call.key) == call
