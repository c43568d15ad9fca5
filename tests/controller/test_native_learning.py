"""What C++ learns of an agent is what the Python code learns, number for number."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman_controller.intervals import NUM_LENGTHS, Lengths, Ratios
from dragoman_controller.native.learning import Learning
from dragoman_controller.native.library import load
from dragoman_controller.quote import AgentQuotes, Features, Quotes, Went

LIBRARY = load()
LENGTHS: list[Lengths] = [(prompt, output) for prompt in range(NUM_LENGTHS) for output in range(NUM_LENGTHS)]
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="no C++ compiler is on PATH")


def some_seconds(rng: Random) -> float:
    return rng.choice((0.0, rng.lognormvariate(-3, 2), rng.lognormvariate(-3, 0.2), 1e5))


@given(seed=st.integers(0, 1 << 32), count=st.integers(1, 400))
@settings(max_examples=60, deadline=None)
def test_judgements_quotes_weights_and_pace_are_equal(seed: int, count: int) -> None:
    assert LIBRARY is not None
    rng, ours, theirs = Random(seed), Learning(LIBRARY).make(), AgentQuotes()
    assert all(ours.ratios_of(lengths) == theirs.ratios_of(lengths) for lengths in LENGTHS)
    promised: Ratios | None = None
    now, steady = 0.0, Features(*(some_seconds(rng) for _ in range(5)))
    for _ in range(count):
        now += rng.choice((0.0, 0.01, 1.0))
        ttft = some_seconds(rng)
        went = Went(ttft, ttft + some_seconds(rng), rng.choice((0, 1, 2, 300)))
        predicted = some_seconds(rng), some_seconds(rng), some_seconds(rng)
        features = steady if rng.random() < 0.7 else Features(*(some_seconds(rng) for _ in range(5)))
        if rng.random() < 0.2:
            promised = theirs.ratios_of(rng.choice(LENGTHS))  # of a request that ends later
        lengths = rng.choice(LENGTHS[:6] if rng.random() < 0.9 else LENGTHS)  # some are rare
        assert ours.judge(predicted, went, lengths, promised) == theirs.judge(predicted, went, lengths, promised)
        assert ours.learn(features, went, now) == theirs.learn(features, went, now)
        assert ours.ratios_of(lengths) == theirs.ratios_of(lengths) and ours.pace == theirs.pace
        assert ours.weights == theirs.weights and ours.expect(features) == theirs.expect(features)
    assert all(ours.ratios_of(lengths) == theirs.ratios_of(lengths) for lengths in LENGTHS)


def test_agents_learn_apart() -> None:
    assert LIBRARY is not None
    quotes = Quotes(make=Learning(LIBRARY).make)
    for _ in range(300):
        quotes.of("a").judge((1.0, 0.1, 2.0), Went(3.0, 6.0, 11), (0, 0))
    assert quotes.of("a").quote(1.0, 0.1, 2.0, (0, 0)).time_to_first_token.expected == pytest.approx(3.0)
    assert quotes.of("b").quote(1.0, 0.1, 2.0, (0, 0)).time_to_first_token.expected == pytest.approx(1.0)
