"""The written-out least squares do what the loops over a matrix of the textbook do."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman_controller.regression import FIRST_NOISE, FORGETTING, MAX_WEIGHT, MIN_NOISE, PRIOR_VARIANCE, Regression

number = st.floats(0, 1e6) | st.floats(0, 1)


class Loops:
    """Recursive least squares as loops, with the same limits."""

    def __init__(self, prior: list[float]) -> None:
        self.prior, self.turn, self.noise = prior, 0, FIRST_NOISE
        self.weights = list(prior)
        self.covariance = [[0.3 * (row == column) for column in range(len(prior))] for row in range(len(prior))]

    def learn(self, features: list[float], observed: float) -> None:
        size = max(observed, max(features) / 8)
        scaled = [feature / size for feature in features]
        predicted = sum(weight * x for weight, x in zip(self.weights, scaled, strict=True))
        error = min(max(observed / size - predicted, -1.0), 1.0)
        self.noise = max(FORGETTING * self.noise + (1 - FORGETTING) * error**2, MIN_NOISE)
        pulls = [sum(c * x for c, x in zip(row, scaled, strict=True)) for row in self.covariance]
        total = FORGETTING + sum(x * pull for x, pull in zip(scaled, pulls, strict=True))
        self.weights = [
            min(max(weight + pull / total * error, 0.0), MAX_WEIGHT)
            for weight, pull in zip(self.weights, pulls, strict=True)
        ]
        self.covariance = [
            [(c - own / total * pull) / FORGETTING for c, pull in zip(row, pulls, strict=True)]
            for row, own in zip(self.covariance, pulls, strict=True)
        ]
        for index in range(len(pulls)):
            variance = self.covariance[index][index]
            if variance > 10.0:
                for other in range(len(pulls)):
                    self.covariance[index][other] *= (10.0 / variance) ** 0.5
                    self.covariance[other][index] *= (10.0 / variance) ** 0.5
        self.lean()

    def lean(self) -> None:
        turn, size = self.turn, len(self.weights)
        self.turn = (turn + 1) % size
        pulls = [row[turn] for row in self.covariance]
        gains = [pull / (PRIOR_VARIANCE / self.noise + pulls[turn]) for pull in pulls]
        error = self.prior[turn] - self.weights[turn]
        self.weights = [
            min(max(w + gain * error, 0.0), MAX_WEIGHT) for w, gain in zip(self.weights, gains, strict=True)
        ]
        for i in range(size):
            for j in range(size):
                self.covariance[i][j] -= gains[i] * pulls[j]


@given(data=st.data(), size=st.integers(1, 4))
@settings(max_examples=150, deadline=None)
def test_the_weights_are_those_of_the_loops(data: st.DataObject, size: int) -> None:
    prior = data.draw(st.lists(st.floats(0, 2), min_size=size, max_size=size))
    ours, loops = Regression(prior), Loops(prior)
    for _ in range(data.draw(st.integers(1, 40))):
        features = data.draw(st.lists(number, min_size=size, max_size=size))
        observed = data.draw(st.floats(1e-3, 1e6))
        for one in (ours, loops):
            one.learn(features, observed)
        # In 3.12 a sum of the loops is rounded less often.
        assert ours.weights == pytest.approx(loops.weights, rel=1e-6, abs=1e-9)
    assert len(ours.weights) == size


def test_a_feature_that_never_varies_is_not_believed_for_ever() -> None:
    ours, loops = Regression([1.0, 1.0, 1.0]), Loops([1.0, 1.0, 1.0])
    for _ in range(400):
        for one in (ours, loops):
            one.learn([0.2, 0.0, 0.05], 0.3)
    assert ours.weights == pytest.approx(loops.weights, rel=1e-9)
    for _ in range(10):
        for one in (ours, loops):
            one.learn([0.0, 1.0, 0.0], 3.0)
    assert ours.weights == pytest.approx(loops.weights, rel=1e-9)
    assert ours.weights[1] > 2.0


def test_weights_that_observations_leave_open_stay_near_what_was_thought_of_them() -> None:
    rng, regression = Random(5), Regression((1.0, 1.0, 1.0, 0.0))
    for _ in range(2000):
        # The first feature is not there, and the others are near constants, as where every prompt takes the floor of a step.
        features = (0.0, 0.032, 0.01 * rng.lognormvariate(0, 0.1), 0.05)
        regression.learn(features, 0.036 * rng.lognormvariate(0, 0.3))
        assert max(regression.weights) < 3.0
        assert 0.015 < regression.predict(features) < 0.06
    assert regression.weights[0] == pytest.approx(1.0)
