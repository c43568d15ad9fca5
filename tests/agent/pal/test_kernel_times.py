"""Measured seconds take the place of predicted ones, and correct what lies between and beside them."""

from collections.abc import Callable

import pytest

from dragoman_agent.pal.kernel_calls import KernelCall, predicted_seconds
from dragoman_agent.pal.kernel_times import KernelTimes, step_key
from dragoman_agent.pal.plan import DecodeAttention
from dragoman_agent.pal.profile import Profile
from dragoman_agent.pal.rates import Rates, rates_of
from dragoman_agent.pal.timings import Timings

HEADS = {"num_heads": 16, "num_kv_heads": 8, "head_dim": 128, "page_size": 64}
CONFIG = DecodeAttention(8, 1, 64, 4, 5)


@pytest.fixture
def rates(card: Callable[..., Profile]) -> Rates:
    return rates_of(card())


def product(rows: int) -> KernelCall:
    return KernelCall("gemm", {"m": rows, "n": 4096, "k": 1024})


def attention(batch: int, context: int) -> KernelCall:
    return KernelCall("decode-attention", {**HEADS, "batch": batch, "context": context}, CONFIG)


def timed(rates: Rates, ratios: dict[KernelCall, float] | list[tuple[KernelCall, float]]) -> KernelTimes:
    entries = dict(ratios) if isinstance(ratios, dict) else ratios
    pairs = entries.items() if isinstance(entries, dict) else entries
    return KernelTimes(rates, Timings("print", "hash", {c.key: r * predicted_seconds(rates, c) for c, r in pairs}))


def test_without_timings_the_prediction_stands(rates: Rates) -> None:
    times = KernelTimes(rates)
    assert times.seconds(product(8)) == predicted_seconds(rates, product(8))
    assert times.measured(product(8)) is None and not times.has_measurements


def test_what_was_timed_is_taken_as_it_was(rates: Rates) -> None:
    times = KernelTimes(rates, Timings("print", "hash", {product(8).key: 4.5e-6}))
    assert times.seconds(product(8)) == times.measured(product(8)) == 4.5e-6
    assert times.has_measurements


def test_between_rows_the_ratio_is_linear_in_their_logarithm(rates: Rates) -> None:
    times = timed(rates, [(product(1), 1.0), (product(64), 2.0)])
    assert times.ratio(product(8)) == pytest.approx(1.5)
    assert times.seconds(product(8)) == pytest.approx(1.5 * predicted_seconds(rates, product(8)))
    assert times.ratio(product(1000)) == 2.0


def test_between_contexts_the_ratio_is_linear(rates: Rates) -> None:
    times = timed(
        rates,
        [(attention(1, 1024), 1.0), (attention(1, 3072), 3.0), (attention(64, 1024), 2.0), (attention(64, 3072), 4.0)],
    )
    assert times.ratio(attention(1, 2048)) == pytest.approx(2.0)
    assert times.ratio(attention(8, 2048)) == pytest.approx(2.5)
    assert times.ratio(attention(8, 100_000)) == pytest.approx(3.5)


def test_families_do_not_mix(rates: Rates) -> None:
    times = timed(rates, [(product(8), 3.0)])
    assert times.ratio(KernelCall("gemm", {"m": 8, "n": 4096, "k": 2048})) == 1.0
    assert times.ratio(attention(8, 1024)) == 1.0


def test_keys_of_other_versions_are_passed_over(rates: Rates) -> None:
    times = KernelTimes(rates, Timings("print", "hash", {"conv/m8": 1.0, "decode-step/nonsense": 2.0}))
    assert not times.has_measurements


def test_whole_steps_correct_the_sum_of_their_kernels(rates: Rates) -> None:
    seconds = {step_key("a/model", 1, 256): 2.0, step_key("a/model", 64, 256): 6.0}
    times = KernelTimes(rates, Timings("print", "hash", seconds))
    assert sorted(times.timed_steps("a/model")) == [(1, 256), (64, 256)]
    predicted = [(1, 256, 1.0), (64, 256, 2.0)]
    assert times.step_ratio("a/model", predicted, 1, 256) == 2.0
    assert times.step_ratio("a/model", predicted, 8, 9999) == pytest.approx(2.5)
    assert times.step_ratio("another", [], 8, 256) == 1.0
