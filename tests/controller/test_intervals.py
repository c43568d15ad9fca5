"""Intervals around predictions: quantiles of the latest ratios, of all requests and by length."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman_controller.intervals import (
    MAX_NUM_RATIOS,
    NUM_LENGTHS,
    OUTPUT_LENGTHS,
    PRIOR_RATIOS,
    PROMPT_LENGTHS,
    TAIL,
    ErrorRatios,
    Quantiles,
    RatiosByLength,
    Window,
    lengths_of,
)


@pytest.mark.parametrize("upper", [PROMPT_LENGTHS, OUTPUT_LENGTHS])
def test_a_length_ends_with_its_bound_and_the_last_one_never(upper: tuple[int, ...]) -> None:
    index = 0 if upper is PROMPT_LENGTHS else 1
    for number, bound in enumerate(upper):
        assert lengths_of(bound, bound)[index] == number and lengths_of(bound + 1, bound + 1)[index] == number + 1
    assert lengths_of(0, 0) == (0, 0) and lengths_of(1 << 40, 1 << 40)[index] == NUM_LENGTHS - 1 == len(upper)


@given(count=st.integers(0, 700), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_quantiles_are_those_of_the_latest_128_ratios(count: int, seed: int) -> None:
    rng = Random(seed)
    # They drift, so that an old one that stays would show.
    ratios = [rng.lognormvariate(number / 200, 0.5) for number in range(count)]
    errors = ErrorRatios()
    for ratio in ratios:
        errors.add(ratio, errors.quantiles)
    window = sorted([*PRIOR_RATIOS, *ratios][-MAX_NUM_RATIOS:])
    gaps = len(window) + 1
    num_below, num_above = max(round(errors.low_level * gaps), 1), max(round(errors.high_level * gaps), 1)
    middle = window[round(0.5 * (len(window) - 1))]
    assert list(errors.quantiles) == [window[num_below - 1], middle, window[len(window) - num_above]]
    assert 0.0 < errors.low_level <= 0.2 and 0.0 < errors.high_level <= 0.2


def test_eight_in_ten_are_inside_however_few_came_before() -> None:
    rng, num_inside, num_rounds = Random(8), 0, 3000
    for _ in range(num_rounds):
        window = Window()
        for _ in range(19):
            window.push(rng.random())
        p10, _, p90 = window.quantiles(TAIL, TAIL)
        num_inside += p10 <= rng.random() <= p90
    assert num_inside / num_rounds == pytest.approx(0.8, abs=0.025)


def test_an_interval_of_the_past_that_is_too_narrow_for_what_comes_is_widened() -> None:
    rng, errors = Random(6), ErrorRatios()
    inside = []
    for number in range(3000):
        # The middle drifts as fast as the window follows: fixed quantiles of the window hold well under eight in ten.
        ratio = rng.lognormvariate(0.3 * math.sin(number / 40), 0.1)
        inside.append(errors.quantiles.p10 <= ratio <= errors.quantiles.p90)
        errors.add(ratio, errors.quantiles)
    assert 0.77 <= sum(inside[500:]) / len(inside[500:]) <= 0.83


def test_what_all_lengths_missed_widens_the_interval_of_each() -> None:
    rng, ratios, window = Random(9), RatiosByLength(), Window()
    for _ in range(MAX_NUM_RATIOS):
        ratio = rng.lognormvariate(0.0, 0.3)
        window.push(ratio)
        ratios.add(0, ratio, Quantiles(1.0, 1.0, 1.0))
        ratios.add(1, rng.random(), Quantiles(2.0, 2.0, 2.0))
    own, usual = ratios.own(0), window.quantiles(TAIL, TAIL)
    assert own is not None and own.p50 == usual.p50
    assert own.p10 < usual.p10 and own.p90 > usual.p90
