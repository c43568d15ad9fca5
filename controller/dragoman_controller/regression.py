"""Least squares that forget: a few weights learnt from one observation after the other. Pure."""

from __future__ import annotations

from collections.abc import Sequence

# The last fifty observations count for most.
FORGETTING = 0.98
# One observation that is off by more than its own size is taken for off by that.
_MAX_ERROR = 1.0
# A feature that is more than so many times what was observed counts as so much: else it would be believed for ever.
_MAX_FEATURE = 8.0
MAX_WEIGHT = 64.0
_MAX_VARIANCE = 10.0


class Regression:
    """observed ~ sum of weight * feature, with relative errors: an observation of 1 ms counts as much as one of 10 s.

    Recursive least squares with exponential forgetting (Haykin, Adaptive Filter Theory). Weights stay within 0 and 64, and
    their variances within what a few surprises can move, however little the features vary.
    """

    __slots__ = ("_covariance", "weights")

    def __init__(self, prior: Sequence[float], variance: float = 0.3) -> None:
        """`prior`: the weights before anything was observed; `variance`: how little is thought of them."""
        self.weights = list(prior)
        self._covariance = [
            [variance if row == column else 0.0 for column in range(len(prior))] for row in range(len(prior))
        ]

    def predict(self, features: Sequence[float]) -> float:
        """The expected observation."""
        return sum([weight * feature for weight, feature in zip(self.weights, features, strict=True)])

    def learn(self, features: Sequence[float], observed: float) -> None:
        """Takes one observation > 0."""
        size = max(observed, max(features) / _MAX_FEATURE)
        scaled = [feature / size for feature in features]
        error = min(max(observed / size - self.predict(scaled), -_MAX_ERROR), _MAX_ERROR)
        covariance = self._covariance
        pulls = [sum([c * x for c, x in zip(row, scaled, strict=True)]) for row in covariance]
        total = FORGETTING + sum([x * pull for x, pull in zip(scaled, pulls, strict=True)])
        gains = [pull / total for pull in pulls]
        self.weights = [
            min(max(weight + gain * error, 0.0), MAX_WEIGHT) for weight, gain in zip(self.weights, gains, strict=True)
        ]
        self._covariance = [
            [(c - gain * pull) / FORGETTING for c, pull in zip(row, pulls, strict=True)]
            for row, gain in zip(covariance, gains, strict=True)
        ]
        self._limit()

    def _limit(self) -> None:
        """Where a feature does not vary its variance would grow for ever: shrink its row and column to the limit."""
        for index in range(len(self.weights)):
            variance = self._covariance[index][index]
            if variance > _MAX_VARIANCE:
                ratio = (_MAX_VARIANCE / variance) ** 0.5
                for other in range(len(self.weights)):
                    self._covariance[index][other] *= ratio
                    self._covariance[other][index] *= ratio
