"""The three indices against their definitions, and the traffic model against the contracts summed kernel by kernel."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.step_model import StepModel
from dragoman_agent.engine.indices import (
    CacheView,
    StepFacts,
    bound_seconds,
    cache_factor,
    compute_saturation,
    link_score,
    memory_pressure,
)
from dragoman_agent.engine.traffic import Traffic, traffic_model
from dragoman_agent.model.config import ModelConfig
from dragoman_kernels.triton.contracts import TRITON_CONTRACTS

MODEL = StepModel((1, 8), (0, 1000), (1e-3, 2e-3, 2e-3, 4e-3), 10_000.0, 2e-3)
QWEN = ModelConfig("q", "qwen3", 28, 1024, 3072, 16, 8, 128, 151936, 40960, 1e6, 1e-6, True)


def facts(**changes: float) -> StepFacts:
    base: dict[str, float] = {
        "decode_tokens": 8,
        "prefill_tokens": 0,
        "running": 8,
        "context_tokens": 4000,
        "pending_prefill_tokens": 0,
        "step_seconds": 3e-3,
        "host_seconds": 1e-4,
        "unused_blocks": 50,
        "total_blocks": 100,
        "max_step_tokens": 512,
    }
    return StepFacts(**{**base, **changes})  # type: ignore[arg-type]


def test_csl_is_the_models_bound_over_the_measured_time() -> None:
    assert bound_seconds(MODEL, facts()) == pytest.approx(3e-3)
    index = compute_saturation(MODEL, facts(step_seconds=6e-3))
    assert (index.name, index.source) == ("csl", "model") and index.value == pytest.approx(0.5)
    mixed = facts(prefill_tokens=200, step_seconds=23e-3)
    assert compute_saturation(MODEL, mixed).value == pytest.approx((3e-3 + 20e-3) / 23e-3)
    assert compute_saturation(MODEL, facts(step_seconds=0.0)).value == 0.0


@pytest.mark.parametrize(
    ("predicted", "observed", "factor"),
    [
        (None, None, 1.0),
        (0.5, None, 1.0),
        (0.5, 0.6, 1.0),
        (0.5, 0.5, 1.0),
        (0.5, 0.46, 1.0),  # within the counters' error
        (0.8, 0.64, 1.25),  # 80 % of predicted: no penalty yet
        (0.8, 0.4, 2.0 * 1.25),  # 50 %: 2 x (1 + 0.75 - 0.5)
        (0.8, 0.0, 10.0 * 1.65),  # floored at a tenth
        (0.0, 0.0, 1.0),
    ],
)
def test_mpi_factor(predicted: float | None, observed: float | None, factor: float) -> None:
    assert cache_factor(predicted, observed) == pytest.approx(factor)


@given(st.floats(0.01, 1.0), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_mpi_grows_as_the_hit_rate_falls(predicted: float, first: float, second: float) -> None:
    low, high = sorted((first, second))
    assert cache_factor(predicted, low) >= cache_factor(predicted, high) >= 1.0


def test_mpi_is_used_over_total_times_the_factor_and_names_its_source() -> None:
    assert memory_pressure(50, 100, CacheView()).value == 0.5
    assert memory_pressure(50, 100, CacheView()).source == "model"
    seen = memory_pressure(90, 100, CacheView("gpm", 0.8, 0.4))
    assert seen.source == "gpm" and seen.value == pytest.approx(0.9 * 2.5)
    assert memory_pressure(0, 0, CacheView()).value == 0.0


def test_pbs_is_transfer_over_the_measured_link() -> None:
    assert link_score(44e9, 55e9, "gpm").value == pytest.approx(0.8)
    assert link_score(1.0, 0.0, "gpm").value == 0.0


def test_traffic_of_a_decode_step_is_the_contracts_summed() -> None:
    model = traffic_model(QWEN, 2 * QWEN.num_parameters, 60 << 20)
    batch, context = 64, 64 * 1000
    heads = {"num_heads": 16, "num_kv_heads": 8, "head_dim": 128}

    def cost(kernel: str, **shape: int) -> int:
        return TRITON_CONTRACTS[f"triton.{kernel}"][2].cost({"num_tokens": batch, **shape}).num_bytes

    layer = (
        2 * cost("rms_norm", width=1024, has_residual=1)
        + cost("rope_cache", **heads)
        + cost("silu_mul", width=3072)
        + cost("decode_split", **heads, num_seqs=batch, num_context_tokens=context, num_splits=1)
    )
    products = 2 * batch * ((1024 + 4096) + (2048 + 1024) + (1024 + 6144) + (3072 + 1024))
    logits = 3 * 2 * batch * QWEN.vocab_size
    by_hand = 28 * (layer + products) + 2 * QWEN.num_parameters + logits
    asked = model.step(batch, 0, context).asked_bytes
    assert asked == pytest.approx(by_hand, rel=0.01)


def test_what_fits_into_l2_is_predicted_to_stay_there() -> None:
    big = traffic_model(QWEN, 2 * QWEN.num_parameters, 60 << 20).step(1, 0, 100)
    assert big.hit_ratio is not None and big.hit_ratio < 0.05, "batch 1 streams its weights"
    small = traffic_model(QWEN, 2 * QWEN.num_parameters, 4 << 30).step(1, 0, 100)
    assert small.hit_ratio is not None and small.hit_ratio > 0.99
    prompt = traffic_model(QWEN, 2 * QWEN.num_parameters, 60 << 20).step(0, 2048, 2048)
    assert prompt.hit_ratio is not None and 0.4 < prompt.hit_ratio < 0.95, "activations pass through L2"


@given(st.integers(0, 512), st.integers(0, 8192), st.integers(0, 10**6), st.sampled_from([0.0, 6e7, 1e9]))
def test_memory_never_serves_more_than_is_asked_for(decodes: int, prefill: int, context: int, l2: float) -> None:
    traffic = traffic_model(QWEN, 2 * QWEN.num_parameters, l2).step(decodes, prefill, context)
    assert 0 <= traffic.dram_bytes <= traffic.asked_bytes and math.isfinite(traffic.asked_bytes)
    more = traffic + traffic_model(QWEN, 2 * QWEN.num_parameters, l2).step(decodes + 1, prefill, context + 1)
    assert more.asked_bytes > traffic.asked_bytes
    assert Traffic().hit_ratio is None


def test_products_whose_operands_do_not_fit_into_l2_are_not_certain() -> None:
    large = ModelConfig("8b", "qwen3", 36, 4096, 12288, 32, 8, 128, 151936, 40960, 1e6, 1e-6, False)
    model = traffic_model(large, 2 * large.num_parameters, 60 << 20)
    assert model.step(64, 0, 64_000).is_certain and not model.step(0, 2048, 2048).is_certain
    small = traffic_model(QWEN, 2 * QWEN.num_parameters, 60 << 20)
    assert small.step(0, 2048, 2048).is_certain
    assert not (small.step(0, 2048, 2048) + model.step(0, 2048, 2048)).is_certain
