"""Which batches may let short sequences share a program: those that were timed to gain, with the reason where none is."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

import pytest

from dragoman_agent.engine.config import EngineConfig
from dragoman_agent.model.config import ModelConfig
from dragoman_agent.pal.decisions import Decision
from dragoman_agent.pal.group_timing import GROUP_ROWS, GroupCase, group_batches
from dragoman_agent.pal.plan import Plan
from dragoman_agent.pal.plan_fields import plan_fields
from dragoman_agent.pal.planner import Limits, Switches, plan_for
from dragoman_agent.pal.planner_cuda import wanted_groups
from dragoman_agent.pal.profile import Profile, Value
from dragoman_agent.pal.timings import Timings

Seconds = Callable[[int, int], float | None]  # of a batch and rows a program, 0 without groups; None: not timed
Planned = tuple[Plan, Decision]
MODEL = "qwen3-0.6b"


@pytest.fixture
def planned(card: Callable[..., Profile], shapes: Callable[[str], ModelConfig]) -> Callable[..., Planned]:
    """A plan from times of grouping alone."""
    model, here = shapes(MODEL), card()

    def make(seconds: Seconds, switches: Switches | None = None, **limits: object) -> Planned:
        bounds = Limits(**limits)  # type: ignore[arg-type]
        cases = wanted_groups(here, model, Limits(), Switches(), Timings(here.fingerprint, "k"))
        times = {case.key: seconds(case.shape["batch"], case.shape["rows"]) for case in cases}
        timings = Timings(here.fingerprint, "k", {key: found for key, found in times.items() if found is not None})
        plan, decisions = plan_for(here, model, bounds, switches or Switches(), timings)
        return plan, next(one for one in decisions if one.subject == "attention-grouping")

    return make


def gaining(batch: int, rows: int) -> float:
    """Two sequences a program are quickest at 64, four at 128; at 256 nothing gains."""
    best = {64: 2, 128: 4}.get(batch)
    return 1e-5 if rows <= 1 or best is None else 8e-6 + 1e-7 * abs(rows - best)


def test_few_cases_are_asked_for_each_planned_launch_with_and_without_groups(
    card: Callable[..., Profile], shapes: Callable[[str], ModelConfig]
) -> None:
    here, model = card(), shapes(MODEL)
    cases = wanted_groups(here, model, Limits(), Switches(), Timings(here.fingerprint, "k"))
    plan, _ = plan_for(here, model, Limits(), Switches())
    assert plan.max_num_seqs == 256 and len({case.key for case in cases}) == len(cases) == 15
    assert {(case.shape["batch"], case.shape["rows"]) for case in cases} == {
        (batch, rows) for batch in (64, 128, 256) for rows in (0, *GROUP_ROWS)
    }
    for case in cases:
        launch = plan.decode_for(case.shape["batch"])
        assert {**case.config, "max_batch": launch.max_batch} == dataclasses.asdict(launch)
        assert case.shape["context"] == 128 and case.shape["page_size"] == plan.page_size
    for bounds in (Limits(deterministic=True), Limits(kv_dtype="fp8"), Limits(max_num_seqs=63)):
        assert wanted_groups(here, model, bounds, Switches(), Timings(here.fingerprint, "k")) == []


@pytest.mark.parametrize(
    ("most", "batches"),
    [(63, []), (64, [64]), (200, [64, 128]), (256, [64, 128, 256]), (512, [64, 256, 512]), (1024, [64, 256, 1024])],
)
def test_the_batches_that_are_timed(most: int, batches: list[int]) -> None:
    assert group_batches(most) == batches


def test_batches_where_it_was_quicker_get_their_number_of_rows(planned: Callable[..., Planned]) -> None:
    plan, decision = planned(gaining)
    first, second = plan.short_groups
    assert (first.min_batch, first.max_batch, first.rows) == (64, min(127, plan.decode_for(64).max_batch), 2)
    assert (second.min_batch, second.rows, second.context_tokens) == (128, 4, 128)
    assert second.max_batch == min(255, plan.decode_for(128).max_batch)
    assert (second.ungrouped_seconds, second.grouped_seconds) == (1e-5, 8e-6)
    assert plan.groups_for(63) is None and plan.groups_for(64) is first and plan.groups_for(128) is second
    assert plan.groups_for(256) is None
    assert decision.chosen.startswith("2 a program from 64 to") and "4 a program from 128" in decision.chosen
    assert "8.0 us where 4 share a program, 10.0 where none do, +20.0%" in decision.reason
    assert decision.predicted == 8e-6 and len(decision.candidates) == 15
    chosen = {one.name for one in decision.candidates if not one.rejected_because}
    assert chosen == {"2 a program at 64", "4 a program at 128", "no groups at 256"}
    shown = next(field for field in plan_fields(plan) if field.name == "short_groups")
    assert shown.value == (2, 4) and shown.labels == (f"64-{first.max_batch}", f"128-{second.max_batch}")


def test_times_make_another_plan_but_not_other_tokens(planned: Callable[..., Planned]) -> None:
    plan, _ = planned(gaining)
    plain, _ = planned(lambda batch, rows: None)
    assert plan != plain and plan.digest() == plain.digest()
    config = EngineConfig("cuda", f"random:{MODEL}", plan)
    assert EngineConfig.from_json(json.dumps(json.loads(config.to_json()))) == config


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (lambda batch, rows: None, "not timed on this device, which --tune now does"),
        (lambda batch, rows: None if rows == 0 else 1e-5, "not timed on this device"),
        (lambda batch, rows: 1e-5 * (1 if rows <= 1 else 1.3), "10.0 where none do, -30.0% (under the 2% that count)"),
        (lambda batch, rows: 1e-5 * (1 if rows <= 1 else 0.985), "+1.5% (under the 2% that count)"),
        # The kernel that groups would cost all the steps in which nothing is grouped.
        (lambda batch, rows: 1e-5 * (0.9, 0.95, 0.8, 0.8, 0.8, 0, 0, 0, 0.8)[rows], "takes 5.6% longer, and 1% is"),
        (lambda batch, rows: 1e-5 if rows <= 1 else None, "at 64 no groups could be timed"),
    ],
)
def test_without_a_timed_gain_there_is_none(planned: Callable[..., Planned], seconds: Seconds, words: str) -> None:
    plan, decision = planned(seconds)
    assert plan.short_groups == () and decision.chosen == "none" and words in decision.reason


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"deterministic": True}, "deterministic"),
        ({"kv_dtype": "fp8"}, "eight bits"),
        ({"max_num_seqs": 32}, "at most 32 sequences run at once"),
        ({"switches": Switches(launch_tuning=False)}, "switched off by --pal-launch-tuning off"),
        ({"switches": Switches.off()}, "switched off by --pal off"),
    ],
)
def test_where_it_is_out_of_the_question_the_decision_says_why(
    planned: Callable[..., Planned], changes: dict[str, object], words: str
) -> None:
    plan, decision = planned(gaining, **changes)
    assert plan.short_groups == () and decision.chosen == "none" and words in decision.reason


def test_a_case_has_the_same_name_whichever_plan_asks(
    card: Callable[..., Profile], shapes: Callable[[str], ModelConfig]
) -> None:
    def keys(**limits: int) -> set[str]:
        cases: list[GroupCase] = wanted_groups(
            card(), shapes(MODEL), Limits(**limits), Switches(), Timings("print", "k")
        )
        return {case.key for case in cases}

    assert keys(max_num_seqs=64) < keys()
    assert all(key.startswith("decode-grouped/h16-k8-d128-p64/b64/c128/s") for key in keys(max_num_seqs=64))


def test_a_card_of_another_maker_has_none(card: Callable[..., Profile], shapes: Callable[[str], ModelConfig]) -> None:
    held = card({"compute.warp_size": 64})
    held = dataclasses.replace(held, device=dataclasses.replace(held.device, kind="hip"))
    plan, decisions = plan_for(
        held.with_values({"compute.warp_size": Value(64, "", "reported")}), shapes(MODEL), Limits(), Switches()
    )
    (decision,) = [one for one in decisions if one.subject == "attention-grouping"]
    assert plan.short_groups == () and "no kernel was ever timed on a hip device" in decision.reason
