"""Shortlists are short, fit the device and hold what is known to be good; what is to be timed covers the plan."""

import dataclasses
import json
import math
from collections.abc import Callable

import pytest

from dragoman_agent.model.config import ModelConfig
from dragoman_agent.pal import step_cost
from dragoman_agent.pal.candidates import decode_shortlist, prefill_shortlist, tuning_cases
from dragoman_agent.pal.kernel_times import KernelTimes
from dragoman_agent.pal.planner import Limits, Switches, plan_for
from dragoman_agent.pal.profile import Profile
from dragoman_agent.pal.rates import rates_of
from dragoman_kernels.triton.launches import DECODE_SPLITS, DecodeLaunch, decode_resources

Card = Callable[..., Profile]
Shapes = Callable[[str], ModelConfig]
MODELS = ("smollm2-135m", "qwen3-0.6b", "llama-3.2-1b", "qwen3-8b")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("batch", [1, 8, 64, 256])
def test_a_shortlist_has_four_to_eight_that_fit(name: str, batch: int, card: Card, shapes: Shapes) -> None:
    model = shapes(name)
    for shared in (99 << 10, 227 << 10):
        rates = rates_of(card({"memory.shared_per_block": shared, "memory.shared_per_multiprocessor": shared + 1024}))
        options = decode_shortlist(KernelTimes(rates), model, 64, batch)
        assert 4 <= len(options) <= 8
        assert len(set(options)) == len(options)
        group = model.num_heads // model.num_kv_heads
        for one in options:
            launch = DecodeLaunch(one.block_n, one.num_warps, one.num_stages)
            assert decode_resources(launch, group, model.head_dim, 64).shared_bytes <= shared
            assert one.num_splits in DECODE_SPLITS and one.max_batch == batch


def test_what_was_measured_best_on_an_h200_is_on_the_list(card: Card, shapes: Shapes) -> None:
    """Own table: 16 splits, 4 warps and 5 stages alone; no split, 2 warps and 3 stages at 256 sequences."""
    times = KernelTimes(rates_of(card()))
    alone = decode_shortlist(times, shapes("qwen3-8b"), 64, 1)
    assert any((one.num_splits, one.block_n, one.num_warps, one.num_stages) == (16, 64, 4, 5) for one in alone)
    full = decode_shortlist(times, shapes("qwen3-8b"), 64, 256)
    assert any((one.num_splits, one.block_n, one.num_warps, one.num_stages) == (1, 64, 2, 3) for one in full)
    first = prefill_shortlist(times, shapes("qwen3-8b"), 64)
    assert any((one.block_m, one.block_n, one.num_warps, one.num_stages) == (64, 64, 4, 3) for one in first[:3])


def test_a_device_that_runs_none_gets_an_empty_list(card: Card, shapes: Shapes) -> None:
    times = KernelTimes(rates_of(card({"memory.shared_per_block": 8 << 10})))
    assert decode_shortlist(times, shapes("qwen3-8b"), 64, 1) == []
    assert prefill_shortlist(times, shapes("qwen3-8b"), 64) == []


@pytest.mark.parametrize("name", MODELS)
def test_what_is_to_be_timed_covers_every_kernel_of_the_plans_steps(name: str, card: Card, shapes: Shapes) -> None:
    model = shapes(name)
    plan, _ = plan_for(card(), model, Limits(), Switches())
    cases = tuning_cases(card(), model, plan)
    keys = {case.key for case in cases}
    assert len(keys) == len(cases) <= 592
    assert {case.kind for case in cases} == {
        "decode-attention", "prefill-attention", "prefill-batch", "prefill-library", "gemm", "gemm-library", "rms-norm", "add-rms-norm", "silu-mul",
        "rope-cache", "sample",
    }  # fmt: skip
    for batch in (1, 8, 64, 256):
        config = plan.decode_for(batch)
        for context in (entry for entry in (256, 1024, 4096) if batch * entry < plan.num_blocks * plan.page_size):
            assert step_cost.decode_attention_call(model, plan.page_size, config, batch, context).key in keys
        for call, _ in (
            *step_cost.gemm_calls(model, max(batch, plan.min_gemm_rows)),
            *step_cost.row_calls(model, batch),
        ):
            assert call.key in keys
    assert all(math.isfinite(case.predicted_seconds) and case.predicted_seconds > 0 for case in cases)
    # What the tuner gets on its standard input.
    again = json.loads(json.dumps([dataclasses.asdict(case) for case in cases]))
    assert [entry["key"] for entry in again] == [case.key for case in cases]


def test_no_case_needs_more_kv_than_the_plan_has(card: Card, shapes: Shapes) -> None:
    model = shapes("qwen3-0.6b")
    plan, _ = plan_for(card({"memory.free": 3 << 30}), model, Limits(), Switches())
    for case in tuning_cases(card(), model, plan):
        if case.kind == "decode-attention":
            assert case.shape["batch"] * case.shape["context"] <= plan.num_blocks * plan.page_size
