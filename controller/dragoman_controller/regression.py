"""Least squares that forget: a few weights learnt from one observation after the other. Pure."""

from __future__ import annotations

from collections.abc import Sequence

# The last hundred observations count for most.
FORGETTING = 0.99
# One observation that is off by more than its own size is taken for off by that.
_MAX_ERROR = 1.0
# A feature that is more than so many times what was observed counts as so much: else it would be believed for ever.
_MAX_FEATURE = 8.0
MAX_WEIGHT = 64.0
_MAX_VARIANCE = 10.0
# With each observation one weight in turn is seen once more to be what it was thought to be, give or take the root of this. Where
# features hardly vary, or only together, observations leave open how much is whose; weights would wander off along what is
# left open, the further the noisier the observations, until one meets a limit and the sum that fitted is lost.
PRIOR_VARIANCE = 1.0
# Mean square of the errors before any was seen, and what it is taken for at least.
FIRST_NOISE, MIN_NOISE = 0.01, 1e-6
_NOISE_GAIN = 1.0 - FORGETTING
_SIZE = 4


class Regression:
    """observed ~ sum of weight * feature, with relative errors: an observation of 1 ms counts as much as one of 10 s.

    Recursive least squares with exponential forgetting (Haykin, Adaptive Filter Theory), leaning on the prior as ridge
    regression does. Weights stay within 0 and 64, and their variances within what a few surprises can move.
    """

    __slots__ = ("_covariance", "_noise", "_num_features", "_padding", "_prior", "_turn", "_weights")

    def __init__(self, prior: Sequence[float], variance: float = 0.3) -> None:
        """`prior`: the weights before anything was observed, four at most; `variance`: how little is thought of them."""
        # A feature that is never there, with a weight and a variance of 0, changes nothing.
        self._padding = (0.0,) * (_SIZE - len(prior))
        self._num_features = len(prior)
        self._prior = self._weights = (*prior, *self._padding)
        self._turn, self._noise = 0, FIRST_NOISE
        self._covariance: tuple[float, ...] = tuple(
            variance if row == column < len(prior) else 0.0 for row in range(_SIZE) for column in range(_SIZE)
        )
        """Row by row."""

    @property
    def weights(self) -> tuple[float, ...]:
        """One for each feature."""
        return self._weights[: self._num_features]

    def predict(self, features: Sequence[float]) -> float:
        """The expected observation."""
        return sum([weight * feature for weight, feature in zip(self.weights, features, strict=True)])

    def learn(self, features: Sequence[float], observed: float) -> None:
        """Takes one observation > 0. Written out: it is done twice for each request that ends, and loops take three times as long."""
        size = max(observed, max(features) / _MAX_FEATURE)
        x0, x1, x2, x3 = (*[feature / size for feature in features], *self._padding)
        w0, w1, w2, w3 = self._weights
        error = observed / size - (w0 * x0 + w1 * x1 + w2 * x2 + w3 * x3)
        error = _MAX_ERROR if error > _MAX_ERROR else -_MAX_ERROR if error < -_MAX_ERROR else error
        noise = self._noise + _NOISE_GAIN * (error * error - self._noise)
        self._noise = noise if noise > MIN_NOISE else MIN_NOISE
        c00, c01, c02, c03, c10, c11, c12, c13, c20, c21, c22, c23, c30, c31, c32, c33 = self._covariance
        p0 = c00 * x0 + c01 * x1 + c02 * x2 + c03 * x3
        p1 = c10 * x0 + c11 * x1 + c12 * x2 + c13 * x3
        p2 = c20 * x0 + c21 * x1 + c22 * x2 + c23 * x3
        p3 = c30 * x0 + c31 * x1 + c32 * x2 + c33 * x3
        total = FORGETTING + (x0 * p0 + x1 * p1 + x2 * p2 + x3 * p3)
        g0, g1, g2, g3 = p0 / total, p1 / total, p2 / total, p3 / total
        w0, w1, w2, w3 = w0 + g0 * error, w1 + g1 * error, w2 + g2 * error, w3 + g3 * error
        if not (
            0.0 <= w0 <= MAX_WEIGHT and 0.0 <= w1 <= MAX_WEIGHT and 0.0 <= w2 <= MAX_WEIGHT and 0.0 <= w3 <= MAX_WEIGHT
        ):
            w0, w1, w2, w3 = (min(max(weight, 0.0), MAX_WEIGHT) for weight in (w0, w1, w2, w3))
        self._weights = w0, w1, w2, w3
        f = FORGETTING
        self._covariance = (
            (c00 - g0 * p0) / f, (c01 - g0 * p1) / f, (c02 - g0 * p2) / f, (c03 - g0 * p3) / f,
            (c10 - g1 * p0) / f, (c11 - g1 * p1) / f, (c12 - g1 * p2) / f, (c13 - g1 * p3) / f,
            (c20 - g2 * p0) / f, (c21 - g2 * p1) / f, (c22 - g2 * p2) / f, (c23 - g2 * p3) / f,
            (c30 - g3 * p0) / f, (c31 - g3 * p1) / f, (c32 - g3 * p2) / f, (c33 - g3 * p3) / f,
        )  # fmt: skip
        if max(self._covariance[:: _SIZE + 1]) > _MAX_VARIANCE:
            self._limit()
        self._lean()

    def _lean(self) -> None:
        """Sees the weight whose turn it is at its prior, once more than it was."""
        turn = self._turn
        self._turn = turn + 1 if turn + 1 < self._num_features else 0
        c00, c01, c02, c03, c10, c11, c12, c13, c20, c21, c22, c23, c30, c31, c32, c33 = self._covariance
        p0, p1, p2, p3 = self._covariance[turn::_SIZE]
        w0, w1, w2, w3 = self._weights
        total = PRIOR_VARIANCE / self._noise + (p0, p1, p2, p3)[turn]
        error = self._prior[turn] - (w0, w1, w2, w3)[turn]
        g0, g1, g2, g3 = p0 / total, p1 / total, p2 / total, p3 / total
        w0, w1, w2, w3 = w0 + g0 * error, w1 + g1 * error, w2 + g2 * error, w3 + g3 * error
        if not (
            0.0 <= w0 <= MAX_WEIGHT and 0.0 <= w1 <= MAX_WEIGHT and 0.0 <= w2 <= MAX_WEIGHT and 0.0 <= w3 <= MAX_WEIGHT
        ):
            w0, w1, w2, w3 = (min(max(weight, 0.0), MAX_WEIGHT) for weight in (w0, w1, w2, w3))
        self._weights = w0, w1, w2, w3
        self._covariance = (
            c00 - g0 * p0, c01 - g0 * p1, c02 - g0 * p2, c03 - g0 * p3,
            c10 - g1 * p0, c11 - g1 * p1, c12 - g1 * p2, c13 - g1 * p3,
            c20 - g2 * p0, c21 - g2 * p1, c22 - g2 * p2, c23 - g2 * p3,
            c30 - g3 * p0, c31 - g3 * p1, c32 - g3 * p2, c33 - g3 * p3,
        )  # fmt: skip

    def _limit(self) -> None:
        """Where a feature does not vary its variance would grow for ever: shrink its row and column to the limit."""
        covariance = list(self._covariance)
        for index in range(_SIZE):
            variance = covariance[index * (_SIZE + 1)]
            if variance > _MAX_VARIANCE:
                ratio = (_MAX_VARIANCE / variance) ** 0.5
                for other in range(_SIZE):
                    covariance[index * _SIZE + other] *= ratio
                    covariance[other * _SIZE + index] *= ratio
        self._covariance = tuple(covariance)
