"""Quotes: a wide interval at first, then the one the outcomes teach."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman_controller.intervals import MIN_NUM_OWN, MIN_NUM_SPREAD, lengths_of
from dragoman_controller.quote import AgentQuotes, Features, Quotes, Went
from dragoman_controller.regression import MAX_WEIGHT, Regression

SHORT, LONG, UNSEEN = lengths_of(20, 10), lengths_of(800, 200), lengths_of(5000, 5000)


def test_the_first_quote_is_the_prediction_with_the_prior_interval() -> None:
    quote = AgentQuotes().quote(0.2, 0.01, 1.2, SHORT)
    assert quote.time_to_first_token == pytest.approx((0.2, 0.12, 0.4))
    assert quote.finish == pytest.approx((1.2, 0.72, 2.4))


def test_after_many_outcomes_the_interval_holds_eight_in_ten() -> None:
    rng = Random(3)
    quotes = AgentQuotes()

    def observed() -> float:
        return 1.4 * rng.lognormvariate(0, 0.1)

    for _ in range(400):
        quotes.judge((1.0, 0.1, 2.0), Went(observed(), 1.4 * 2.0, 11), SHORT)
    estimate = quotes.quote(1.0, 0.1, 2.0, SHORT).time_to_first_token
    assert estimate.expected == pytest.approx(1.4, rel=0.05)
    inside = sum(estimate.p10 <= observed() <= estimate.p90 for _ in range(1000))
    assert 730 <= inside <= 870


def test_outcomes_are_judged_against_what_was_promised_before_they_teach() -> None:
    judgements = {one.quantity: one for one in AgentQuotes().judge((1.0, 0.1, 2.0), Went(1.2, 4.2, 11), SHORT)}
    assert judgements["time_to_first_token"].error == pytest.approx(0.2)
    assert judgements["time_to_first_token"].inside
    assert judgements["time_per_output_token"].error == pytest.approx(2.0)
    assert not judgements["time_per_output_token"].inside
    assert judgements["finish"].error == pytest.approx(1.1)


def test_one_token_teaches_nothing_about_the_time_per_token() -> None:
    judged = AgentQuotes().judge((1.0, 0.1, 1.0), Went(1.0, 1.0, 1), SHORT)
    assert [one.quantity for one in judged] == ["time_to_first_token", "finish"]


def test_each_length_of_prompts_and_answers_has_its_own_interval() -> None:
    rng, quotes = Random(5), AgentQuotes()
    for _ in range(300):
        # First tokens of long prompts take three times what was thought, the pace of short answers hangs on luck.
        quotes.judge((1.0, 0.1, 2.0), Went(1.0, 1.0 + rng.uniform(0.5, 1.5), 11), SHORT)
        quotes.judge((1.0, 0.1, 20.9), Went(3.0, 3.0 + 19.9 * rng.uniform(0.9, 1.1), 200), LONG)
    short, long = (quotes.quote(1.0, 0.1, 2.0, lengths) for lengths in (SHORT, LONG))
    assert short.time_to_first_token == pytest.approx((1.0, 1.0, 1.0))
    assert long.time_to_first_token == pytest.approx((3.0, 3.0, 3.0))
    assert short.time_per_output_token.p90 - short.time_per_output_token.p10 == pytest.approx(0.08, rel=0.3)
    assert long.time_per_output_token.p90 - long.time_per_output_token.p10 == pytest.approx(0.016, rel=0.3)
    mixed = quotes.ratios_of((SHORT[0], LONG[1]))
    assert mixed == (quotes.ratios_of(SHORT)[0], *quotes.ratios_of(LONG)[1:])


def test_a_length_of_which_little_is_known_is_quoted_as_all_are() -> None:
    quotes = AgentQuotes()
    for number in range(1, MIN_NUM_OWN):
        for _ in range(20):
            quotes.judge((1.0, 0.1, 2.0), Went(2.0, 4.0, 11), SHORT)
        quotes.judge((1.0, 0.1, 20.9), Went((4.0, 5.0, 6.0)[number % 3], 20.0, 200), LONG)
        estimate = quotes.quote(1.0, 0.1, 2.0, LONG).time_to_first_token
        assert estimate.expected == pytest.approx(2.0)
        if number < MIN_NUM_SPREAD:
            assert estimate == quotes.quote(1.0, 0.1, 2.0, UNSEEN).time_to_first_token
        else:  # enough to say how far they lie apart
            assert (estimate.p10, estimate.p90) == pytest.approx((2.0 * 4 / 5, 2.0 * 6 / 5))
    quotes.judge((1.0, 0.1, 20.9), Went(5.0, 20.0, 200), LONG)
    assert quotes.quote(1.0, 0.1, 2.0, LONG).time_to_first_token == pytest.approx((5.0, 4.0, 6.0))
    assert quotes.quote(1.0, 0.1, 2.0, SHORT).time_to_first_token == pytest.approx((2.0, 2.0, 2.0))


def test_agents_learn_apart() -> None:
    quotes = Quotes()
    for _ in range(300):
        quotes.of("a").judge((1.0, 0.1, 2.0), Went(3.0, 6.0, 11), SHORT)
    assert quotes.of("a").quote(1.0, 0.1, 2.0, SHORT).time_to_first_token.expected == pytest.approx(3.0)
    assert quotes.of("b").quote(1.0, 0.1, 2.0, SHORT).time_to_first_token.expected == pytest.approx(1.0)


def test_weights_learn_an_engine_that_waits_for_steps_and_prefills_at_another_speed() -> None:
    rng, quotes = Random(4), AgentQuotes()

    def request() -> tuple[Features, Went]:
        batch = rng.randrange(1, 30)
        features = Features(
            rng.choice((0.0, rng.random())),
            rng.uniform(0.01, 0.3),
            rng.uniform(0.01, 0.1),
            0.01 + batch * 1e-4,
            0.03 + batch * 3e-4,
        )
        ttft = 0.03 + 0.8 * features.queue + 0.25 * features.prefill + 1.6 * features.step
        tpot = 0.5 * features.decode + 0.7 * features.observed_step
        return features, Went(ttft * rng.lognormvariate(0, 0.03), ttft + 49 * tpot, 50)

    for second in range(400):
        assert quotes.learn(*request(), float(second))
    learnt = quotes.weights
    assert learnt.queue == pytest.approx(0.8, rel=0.15) and learnt.prefill == pytest.approx(0.25, rel=0.15)
    assert learnt.step == pytest.approx(1.6, rel=0.15) and learnt.overhead * 0.05 == pytest.approx(0.03, abs=0.01)
    features, went = request()
    assert quotes.expect(features)[1] == pytest.approx(went.tpot_seconds, rel=0.05)


def test_weights_follow_a_few_outcomes_a_second_however_many_come() -> None:
    quotes, features = AgentQuotes(), Features(0.0, 0.1, 0.0, 0.01, 0.01)
    learnt = [quotes.learn(features, Went(0.2, 1.2, 51), at / 1000) for at in range(1000)]
    assert 15 <= sum(learnt) <= 21


@given(rows=st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e6), st.floats(1e-9, 1e9)), min_size=1, max_size=60))
@settings(max_examples=100, deadline=None)
def test_weights_stay_bounded_whatever_an_agent_says(rows: list[tuple[float, float, float]]) -> None:
    regression = Regression((1.0, 1.0))
    for first, second, observed in rows:
        regression.learn((first, second), observed)
    assert all(0.0 <= weight <= MAX_WEIGHT for weight in regression.weights)
    # It can still learn afterwards.
    for number in range(400):
        regression.learn((1.0, float(number % 7)), 2.0 + 0.5 * (number % 7))
    assert regression.predict((1.0, 3.0)) == pytest.approx(3.5, rel=0.1)
