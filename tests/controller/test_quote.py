"""Quotes: a wide interval at first, then the one the outcomes teach."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman_controller.quote import MAX_NUM_RATIOS, PRIOR_RATIOS, AgentQuotes, ErrorRatios, Quotes


def test_the_first_quote_is_the_prediction_with_the_prior_interval() -> None:
    quote = AgentQuotes().quote(0.2, 0.01, 1.2)
    assert quote.time_to_first_token == pytest.approx((0.2, 0.15, 0.3))
    assert quote.finish == pytest.approx((1.2, 0.9, 1.8))


def test_after_many_outcomes_the_interval_holds_eight_in_ten() -> None:
    rng = Random(3)
    quotes = AgentQuotes()

    def observed() -> float:
        return 1.4 * rng.lognormvariate(0, 0.1)

    for _ in range(400):
        quotes.learn((1.0, 0.1, 2.0), observed(), 1.4 * 2.0, 11)
    estimate = quotes.quote(1.0, 0.1, 2.0).time_to_first_token
    assert estimate.expected == pytest.approx(1.4, rel=0.05)
    inside = sum(estimate.p10 <= observed() <= estimate.p90 for _ in range(1000))
    assert 730 <= inside <= 870


def test_outcomes_are_judged_against_what_was_promised_before_they_teach() -> None:
    judgements = {one.quantity: one for one in AgentQuotes().learn((1.0, 0.1, 2.0), 1.2, 4.2, 11)}
    assert judgements["time_to_first_token"].error == pytest.approx(0.2)
    assert judgements["time_to_first_token"].inside
    assert judgements["time_per_output_token"].error == pytest.approx(2.0)
    assert not judgements["time_per_output_token"].inside
    assert judgements["finish"].error == pytest.approx(1.1)


def test_one_token_teaches_nothing_about_the_time_per_token() -> None:
    judged = AgentQuotes().learn((1.0, 0.1, 1.0), 1.0, 1.0, 1)
    assert [one.quantity for one in judged] == ["time_to_first_token", "finish"]


@given(count=st.integers(0, 700), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_quantiles_are_those_of_the_latest_256_ratios(count: int, seed: int) -> None:
    rng = Random(seed)
    # They drift, so that an old one that stays would show.
    ratios = [rng.lognormvariate(number / 200, 0.5) for number in range(count)]
    errors = ErrorRatios()
    for ratio in ratios:
        errors.add(ratio)
    window = sorted([*PRIOR_RATIOS, *ratios][-MAX_NUM_RATIOS:])
    assert [errors.p10, errors.p50, errors.p90] == [window[round(q * (len(window) - 1))] for q in (0.1, 0.5, 0.9)]


def test_agents_learn_apart() -> None:
    quotes = Quotes()
    for _ in range(300):
        quotes.of("a").learn((1.0, 0.1, 2.0), 3.0, 6.0, 11)
    assert quotes.of("a").quote(1.0, 0.1, 2.0).time_to_first_token.expected == pytest.approx(3.0)
    assert quotes.of("b").quote(1.0, 0.1, 2.0).time_to_first_token.expected == pytest.approx(1.0)
