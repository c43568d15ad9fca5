"""Prefill by tensor descriptors is taken where it was timed quicker, over a usual prompt and a part of a long one, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace

import pytest

from dragoman_agent.engine.config import EngineConfig
from dragoman_agent.model.config import ModelConfig
from dragoman_agent.pal.candidates import PrefillPoint, TuningCase, prefill_points, prefill_shortlist, tuning_cases
from dragoman_agent.pal.decisions import Decision
from dragoman_agent.pal.kernel_calls import parse_key, predicted_seconds
from dragoman_agent.pal.kernel_times import KernelTimes
from dragoman_agent.pal.plan import Plan, PrefillAttention
from dragoman_agent.pal.plan_fields import plan_fields
from dragoman_agent.pal.planner import Limits, Switches, plan_for
from dragoman_agent.pal.profile import Profile
from dragoman_agent.pal.rates import rates_of
from dragoman_agent.pal.timings import Timings
from dragoman_kernels.triton.launches import TMA_PREFILL_LAUNCHES, WS_PREFILL_LAUNCHES

MODEL = "qwen3-0.6b"
# Of what is predicted, by launch, context and number of prompts; None: not timed.
Factor = Callable[[PrefillAttention, int, int], float | None]
Planner = Callable[[Factor], tuple[Plan, Decision]]
Card, Shapes = Callable[..., Profile], Callable[[str], ModelConfig]


@pytest.fixture
def planned(card: Card, shapes: Shapes) -> Planner:
    """The plan where prefill by pointers takes what the first launch is predicted, the others `factor` times that."""

    def make(factor: Factor) -> tuple[Plan, Decision]:
        here, model = card(), shapes(MODEL)
        first, _ = plan_for(here, model, Limits(), Switches())
        same = {case.key: case.predicted_seconds for case in tuning_cases(here, model, first)}
        seconds: dict[str, float] = {}
        for key, predicted in same.items():
            call = parse_key(key)
            assert call is not None and call.key == key
            if isinstance(call.config, PrefillAttention):
                base = replace(call.config, block_m=64, block_n=64, num_warps=4, num_stages=3, tma=False)
                context = call.shape.get("context", call.shape["tokens"])
                over = factor(call.config, context, call.shape.get("prompts", 1))
                if over is None:
                    continue
                predicted = over * predicted_seconds(rates_of(here), replace(call, config=base))
            seconds[key] = predicted
        plan, decisions = plan_for(here, model, Limits(), Switches(), Timings("print", "hash", seconds))
        return plan, next(each for each in decisions if each.subject == "prefill-attention")

    return make


def of_prefill(cases: list[TuningCase]) -> list[PrefillAttention]:
    return [case.config for case in cases if isinstance(case.config, PrefillAttention)]


def test_untimed_a_card_with_an_h200s_instructions_takes_what_was_the_quickest_there(
    card: Card, shapes: Shapes
) -> None:
    for model, taken in (("qwen3-8b", (128, 64, 12, 4)), ("llama-3.2-1b", (64, 64, 4, 5))):
        plan, decisions = plan_for(card(), shapes(model), Limits(), Switches())
        assert plan.prefill_attention == PrefillAttention("paged", *taken, tma=True)
        (decision,) = (each for each in decisions if each.subject == "prefill-attention")
        assert "quickest on an H200" in decision.reason and "--tune now" in decision.reason
        assert len(decision.candidates) > 1
        eight, _ = plan_for(card(), shapes(model), Limits(kv_dtype="fp8"), Switches())
        assert eight.prefill_attention is not None and not eight.prefill_attention.tma


def test_untimed_no_other_card_takes_it(card: Card, shapes: Shapes) -> None:
    plan, decisions = plan_for(card({"compute.capability": "10.0"}), shapes(MODEL), Limits(), Switches())
    assert plan.prefill_attention is not None and not plan.prefill_attention.tma
    (decision,) = (each for each in decisions if each.subject == "prefill-attention")
    assert not any(candidate.name.endswith("-tma") for candidate in decision.candidates)
    assert "prefill_tma" not in {field.name for field in plan_fields(plan)}


def test_timed_quicker_it_is_taken_and_said(planned: Planner) -> None:
    plan, decision = planned(lambda one, context, prompts: 0.8 if one.tma and one.num_stages == 5 else 1.0)
    assert plan.prefill_attention == PrefillAttention("paged", 64, 64, 4, 5, tma=True)
    assert decision.chosen == "m64-n64-w4-g5-tma"
    assert decision.reason == (
        "the shortest for a prompt of 1,024 tokens, for the last 2,048 of 8,192 tokens, for 16 prompts of 1,024 tokens, "
        "measured on the device"
    )
    assert {"m64-n64-w4-g3", "m64-n64-w4-g3-tma"} <= {candidate.name for candidate in decision.candidates}
    assert ("prefill_tma", True) in {(field.name, field.value) for field in plan_fields(plan)}
    config = EngineConfig("cuda", "m", plan)
    assert EngineConfig.from_json(config.to_json()) == config


def test_timed_slower_or_as_quick_the_kernel_by_pointers_stays(planned: Planner) -> None:
    for factor in (1.0, 1.1):
        plan, _ = planned(lambda one, context, prompts, factor=factor: factor if one.tma else 1.0)
        assert plan.prefill_attention == PrefillAttention("paged", 64, 64, 4, 3)


def test_where_many_prompts_were_not_timed_a_usual_one_and_a_long_one_decide_together(planned: Planner) -> None:
    """A gain of a third on the long one is more than a loss of a tenth on the short one, and not the other way round."""

    def factor(short: float, long: float) -> Factor:
        return lambda one, context, prompts: (
            None if prompts > 1 else (long if context > 1024 else short) if one.tma and one.block_m == 128 else 1.0
        )

    gains, _ = planned(factor(1.1, 0.7))
    loses, _ = planned(factor(0.95, 1.1))
    assert gains.prefill_attention is not None and gains.prefill_attention.tma
    assert loses.prefill_attention is not None and not loses.prefill_attention.tma
    assert gains.long_prefill is None, "which the many would share is not known"


def test_one_that_could_not_run_is_not_chosen(planned: Planner) -> None:
    plan, decision = planned(lambda one, context, prompts: None if one.tma else 1.0)
    assert plan.prefill_attention is not None and not plan.prefill_attention.tma
    assert not any(candidate.name.endswith("-tma") for candidate in decision.candidates)


def test_times_of_usual_prompts_alone_are_enough(planned: Planner) -> None:
    """Another version timed no part of a long one."""
    plan, decision = planned(
        lambda one, context, prompts: None if context > 1024 or prompts > 1 else 0.8 if one.tma else 1.0
    )
    assert plan.prefill_attention is not None and plan.prefill_attention.tma
    assert decision.reason == "the shortest for a prompt of 1,024 tokens, measured on the device"


def test_where_it_is_timed(card: Card, shapes: Shapes) -> None:
    model, here = shapes(MODEL), card()
    plan, _ = plan_for(here, model, Limits(), Switches())
    cases = tuning_cases(here, model, plan)
    timed = {case.key for case in cases}
    apart = [PrefillPoint(2048, 2048), PrefillPoint(512, 8192), PrefillPoint(1024, 8192)]
    for launch in (*TMA_PREFILL_LAUNCHES, WS_PREFILL_LAUNCHES[0]):
        for point in (*prefill_points(plan.max_context_tokens), *apart):
            assert point.call(model, plan.page_size, PrefillAttention("paged", **asdict(launch))).key in timed
    fixed, _ = plan_for(here, model, Limits(deterministic=True), Switches())
    assert not any(one.tma for one in of_prefill(tuning_cases(here, model, fixed))), "such a plan runs another kernel"
    narrow = replace(model, kv_item_bytes=1)
    assert not any(one.tma for one in prefill_shortlist(KernelTimes(rates_of(here)), narrow, 64)), (
        "K and V in eight bits"
    )


@pytest.mark.parametrize(("capability", "page", "some"), [
    ("9.0", 64, True), ("9.0", 128, True), ("9.0", 16, False), ("8.0", 64, False), ("8.9", 64, False), ("12.0", 64, False),
])  # fmt: skip
def test_which_devices_and_pages_have_it(capability: str, page: int, some: bool, card: Card, shapes: Shapes) -> None:
    here = card({"compute.capability": capability})
    found = prefill_shortlist(KernelTimes(rates_of(here)), shapes(MODEL), page)
    assert any(one.tma for one in found) is some
    assert any(not one.tma for one in found)


def test_key_names_it() -> None:
    key = "prefill-attention/h16-k8-d128-p64/t1024/c1024/m128-n64-w4-g3-tma"
    call = parse_key(key)
    assert call is not None and call.config == PrefillAttention("paged", 128, 64, 4, 3, tma=True) and call.key == key
    many = "prefill-batch/h16-k8-d128-p64/q16/t1024/m128-n64-w4-g3-tma"
    batch = parse_key(many)
    assert batch is not None and batch.config == call.config and batch.key == many and batch.shape["prompts"] == 16
    assert parse_key(many.rpartition("/")[0]) is None, "a launch is part of it"
    assert parse_key("decode-attention/h16-k8-d128-p64/b1/c1024/s1-n64-w4-g3-tma") is None
