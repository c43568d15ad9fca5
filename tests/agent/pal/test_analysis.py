"""The analysis behind the probe: known answers come back, whatever the constants; statistics against published ones."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman_agent.pal.analysis import (
    UNRESOLVED,
    UPPER_BOUND,
    find_knee,
    fit_line,
    kruskal_wallis,
    measured,
    measured_cost,
    measured_gain,
    measured_list,
    measured_rate,
    permutation_p,
    rates,
    resolution,
    significance_note,
    spread_of,
)
from dragoman_agent.pal.profile import Value

SIZES = [1 << i for i in range(20, 27)]
NUMBERS = st.floats(-1e30, 1e30) | st.sampled_from([0.0, -0.0, -1e-9, 5e-324, math.nan, math.inf, -math.inf])
REPEATS = st.lists(NUMBERS, min_size=1, max_size=12)


def numbers_of(value: Value) -> tuple[float, ...]:
    assert not isinstance(value.value, str)
    return value.value if isinstance(value.value, tuple) else (float(value.value),)


@given(REPEATS)
def test_whatever_came_in_no_measurement_is_0_negative_or_no_number(samples: list[float]) -> None:
    for make in (
        lambda: measured(samples, "s"),
        lambda: measured_rate(1e9, samples, "bytes/s"),
        lambda: measured_list([[1.0], samples], "s", ["a", "b"]),
    ):
        try:
            value = make()
        except ValueError as error:
            assert str(error)
            continue
        assert value.spread is not None and value.spread >= 0
        assert all(math.isfinite(number) and number > 0 for number in numbers_of(value))


@given(REPEATS, REPEATS, st.floats(1e-12, 1e-3))
def test_a_cost_is_measured_above_what_is_resolved_and_a_bound_below(
    longer: list[float], base: list[float], tick: float
) -> None:
    try:
        value = measured_cost(longer, base, "s", tick, "of a record")
    except ValueError:
        assert not all(map(math.isfinite, longer + base)) or not statistics.median(base) > 0
        return
    (number,) = numbers_of(value)
    limit = resolution(longer, base, tick)
    assert number >= limit >= tick > 0
    if value.provenance == "measured":
        assert number == statistics.median(longer) - statistics.median(base) > limit
        assert UPPER_BOUND not in value.note
    else:
        assert value.provenance == "derived" and number == limit and value.spread is None
        assert value.note.startswith(f"{UPPER_BOUND} (") and value.note.endswith("ns); of a record")


def test_a_record_that_costs_less_than_the_launches_scatter_is_a_bound() -> None:
    """As on the H200: launches of 1.4 us that differ by 7 %, with and without a record between them."""
    noise = random.Random(3)
    base, longer = ([1.4e-6 + noise.uniform(-5e-8, 5e-8) for _ in range(11)] for _ in range(2))
    value = measured_cost(longer, base, "s", 5e-9)
    assert value.provenance == "derived" and 2e-8 < numbers_of(value)[0] < 1.5e-7
    (cost,) = numbers_of(measured_cost([each + 4e-7 for each in longer], base, "s", 5e-9))
    assert cost == pytest.approx(4e-7, rel=0.1)
    late = [*longer[:-1], 1e-3]  # one repeat behind a hiccup of the host
    assert numbers_of(measured_cost(late, base, "s", 5e-9))[0] < 1.5e-7


def test_a_gain_may_be_negative_and_says_when_it_is_none() -> None:
    base, shorter = [5.5e-7] * 9, [4.7e-7] * 9
    assert numbers_of(measured_gain(base, shorter, "s", 1e-9)) == pytest.approx((8e-8,))
    lost = measured_gain(shorter, base, "s", 1e-9)
    assert lost.provenance == "measured" and numbers_of(lost) == pytest.approx((-8e-8,))
    none = measured_gain(base, [5.5e-7 - 1e-12] * 9, "s", 6e-10, "a node")
    assert none.provenance == "derived" and none.note == f"{UNRESOLVED}: 1 ns were resolved; a node"


@pytest.mark.parametrize("seconds", [[1.0, 0.0], [1.0, -1e-9], [1.0, math.nan]])
def test_a_rate_and_a_line_need_times_above_0(seconds: list[float]) -> None:
    with pytest.raises(ValueError, match="which no rate can be made of"):
        rates(10, seconds)
    with pytest.raises(ValueError, match="which no line can be drawn through"):
        fit_line([1.0, 2.0], seconds)


@given(st.lists(st.floats(1e-9, 1e15), min_size=1, max_size=20))
def test_a_median_lies_within_and_the_spread_is_no_less_than_its_distance(samples: list[float]) -> None:
    value = measured(samples, "s", "note")
    assert isinstance(value.value, float) and value.spread is not None
    assert min(samples) <= value.value <= max(samples)
    assert value.spread >= (max(samples) - value.value) / value.value - 1e-12
    assert value.provenance == "measured"


def test_spread_of_zero_and_of_negative_medians() -> None:
    assert spread_of([0.0, 0.0, 1.0]) == 0.0
    assert spread_of([-2.0, -1.0, -3.0]) == 1.0


def test_rates_and_lists() -> None:
    assert measured_rate(10, [1.0, 2.0, 5.0], "bytes/s").value == 5.0
    value = measured_list([[1.0, 2.0, 3.0], [10.0, 10.0, 10.0]], "s", ["a", "b"])
    assert value.value == (2.0, 10.0) and value.labels == ("a", "b") and value.spread == 1.0


@given(st.floats(1e-7, 1e-4), st.floats(1e10, 1e13))
def test_a_line_gives_its_intercept_and_slope_back(intercept: float, rate: float) -> None:
    line = fit_line(SIZES, [intercept + size / rate for size in SIZES])
    assert line.intercept == pytest.approx(intercept, rel=1e-4)
    assert line.rate == pytest.approx(rate, rel=1e-4)
    assert line.max_error < 1e-6


@given(st.integers(0, 2**32), st.floats(1e-6, 5e-6))
def test_noise_of_one_percent_moves_an_intercept_by_little(seed: int, intercept: float) -> None:
    noise = random.Random(seed)
    times = [(intercept + size / 4e12) * (1 + noise.uniform(-0.01, 0.01)) for size in SIZES]
    line = fit_line(SIZES, times)
    assert line.intercept == pytest.approx(intercept, rel=0.06)
    assert line.rate == pytest.approx(4e12, rel=0.03)
    assert line.max_error < 0.03


def test_a_line_needs_sizes_and_growth() -> None:
    with pytest.raises(ValueError, match="two sizes"):
        fit_line([5.0, 5.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="do not grow"):
        fit_line([1.0, 2.0, 3.0], [3.0, 2.0, 1.0])


@given(
    st.floats(4.0, 100.0),
    st.floats(1.1, 5.0),
    st.integers(0, 2**32),
)
def test_a_knee_is_found_between_the_sizes_around_it(knee: float, gain: float, seed: int) -> None:
    noise = random.Random(seed)
    sizes = [float(size) for size in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)]
    rates = [
        (0.5 if size < 2 else 1.0) * (gain if size <= knee else 1.0) * noise.uniform(0.995, 1.005) for size in sizes
    ]
    found = find_knee(sizes, rates)
    below = max(size for size in sizes if size <= knee)
    above = min(size for size in sizes if size > knee)
    assert below <= found.size <= above
    assert found.plateau == pytest.approx(gain, rel=0.01) and found.floor == pytest.approx(1.0, rel=0.01)
    assert found.full_size <= found.size


def test_no_knee_is_said() -> None:
    with pytest.raises(ValueError, match="no knee was seen"):
        find_knee([1.0, 2.0, 4.0], [1.0, 1.02, 1.0])
    with pytest.raises(ValueError, match="three sizes"):
        find_knee([1.0, 2.0], [2.0, 1.0])


def test_the_rank_test_on_figures_worked_by_hand() -> None:
    # Ranks 1, 2, 3 | 4, 5, 6 | 7, 8, 9: H = 12 / 90 * (36 + 225 + 576) / 3 - 30 = 7.2.
    assert kruskal_wallis([[1, 2, 3], [4, 5, 6], [7, 8, 9]]) == pytest.approx(7.2)
    # With ties 1 1 | 1 2: ranks 2 2 | 2 4; H = (12 / 20 * (8 + 18) - 15) / (1 - 24 / 60) = 1.0.
    assert kruskal_wallis([[1, 1], [1, 2]]) == pytest.approx(1.0)
    assert kruskal_wallis([[3, 3], [3, 3]]) == 0.0


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32))
def test_equal_groups_are_seldom_called_different_and_shifted_ones_are(seed: int) -> None:
    noise = random.Random(seed)
    groups = [[noise.gauss(100, 1) for _ in range(7)] for _ in range(16)]
    chance = permutation_p(groups, rounds=200, seed=seed)
    assert 0 < chance <= 1
    shifted = [[value + 4 * (i % 2) for value in group] for i, group in enumerate(groups)]
    assert permutation_p(shifted, rounds=200, seed=seed) < 0.01


def test_chance_is_spread_evenly_where_nothing_differs() -> None:
    noise = random.Random(7)
    chances = [
        permutation_p([[noise.gauss(0, 1) for _ in range(5)] for _ in range(4)], rounds=100, seed=i) for i in range(100)
    ]
    assert 2 <= sum(chance < 0.1 for chance in chances) <= 22  # 10 expected


def test_the_note_says_what_was_found() -> None:
    noise = random.Random(1)
    alike = [[noise.gauss(650, 2) for _ in range(9)] for _ in range(8)]
    assert "difference not significant at 0.01" in significance_note(alike)
    other = [[value * (1.1 if i > 3 else 1) for value in group] for i, group in enumerate(alike)]
    note = significance_note(other)
    assert "difference significant" in note and "Kruskal-Wallis" in note and "permutation p" in note
