"""Intervals around predictions: the latest ratios of observed to predicted seconds, by how long requests are."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from dragoman_controller.tuples import new

# Observed over predicted before anything was observed: eleven values whose median is 1, p10 0.6 and p90 2.
# Chosen wide, so that the first quotes promise little; each observation moves the interval, and these fade out.
PRIOR_RATIOS = (0.6, 0.75, 0.85, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.5, 2.0)
MAX_NUM_RATIOS = 128
# Of the outcomes so many should be below the interval, and as many above it.
TAIL = 0.1
_LEVEL_GAIN, _LOWEST_LEVEL, _HIGHEST_LEVEL = 0.005, 0.01, 0.2
_INSIDE_STEP, _OUTSIDE_STEP = _LEVEL_GAIN * TAIL, _LEVEL_GAIN * (TAIL - 1.0)
# How far off a prediction is hangs on how long a request is: a few tokens see few steps, of which each may be one with the prompts
# of others, and prompts of many tokens take other steps than short ones. Upper ends of all lengths but the last, four times apart.
PROMPT_LENGTHS = (128, 512, 2048)
OUTPUT_LENGTHS = (32, 128, 512)
NUM_LENGTHS = len(PROMPT_LENGTHS) + 1
# Once a length has so many outcomes of its own they say how far ratios lie apart, and once it has so many also where they lie: the
# middle of few is further off than that of all is.
MIN_NUM_SPREAD, MIN_NUM_OWN = 32, MAX_NUM_RATIOS


class Estimate(NamedTuple):
    """One prediction in seconds; one in ten is below `p10`, one in ten above `p90`."""

    expected: float
    p10: float
    p90: float


class Quantiles(NamedTuple):
    """Of the ratios of observed to predicted seconds of one quantity."""

    p10: float
    p50: float
    p90: float

    def estimate(self, predicted_seconds: float) -> Estimate:
        """The calibrated prediction."""
        return Estimate(predicted_seconds * self.p50, predicted_seconds * self.p10, predicted_seconds * self.p90)


Ratios: TypeAlias = tuple[Quantiles, Quantiles, Quantiles]
"""Of TTFT, TPOT and finish."""

Lengths: TypeAlias = tuple[int, int]
"""Which of PROMPT_LENGTHS and of OUTPUT_LENGTHS a request is of, by index; one past the last for longer ones."""


class Window:
    """The latest ratios, up to 128."""

    __slots__ = ("_latest", "_sorted")

    def __init__(self, prior: Sequence[float] = ()) -> None:
        """`prior`: in ascending order."""
        self._latest, self._sorted = deque(prior), list(prior)

    def __len__(self) -> int:
        return len(self._latest)

    def push(self, ratio: float) -> None:
        """Takes one, and forgets the oldest beyond 128."""
        latest, ordered = self._latest, self._sorted
        latest.append(ratio)
        insort(ordered, ratio)
        if len(latest) > MAX_NUM_RATIOS:
            del ordered[bisect_left(ordered, latest.popleft())]

    def quantiles(self, low_level: float, high_level: float) -> Quantiles:
        """With such shares taken to lie below p10 and above p90. There must be a ratio."""
        # The next one falls into each of the `count` + 1 gaps that these leave as likely as into any other.
        ordered, count = self._sorted, len(self._sorted)
        num_below, num_above = round(low_level * (count + 1)), round(high_level * (count + 1))
        p10, p90 = ordered[num_below - 1 if num_below else 0], ordered[count - (num_above or 1)]
        return new(Quantiles, (p10, ordered[round(0.5 * (count - 1))], p90))


class ErrorRatios:
    """The latest ratios of observed to predicted seconds of one quantity, and how much of them an interval leaves out."""

    __slots__ = ("_window", "high_level", "low_level", "quantiles")

    def __init__(self) -> None:
        self._window = Window(PRIOR_RATIOS)
        self.low_level = self.high_level = TAIL
        """Share of a window taken to lie below p10, and above p90."""
        self.quantiles = self._window.quantiles(TAIL, TAIL)

    def add(self, ratio: float, promised: Quantiles) -> None:
        """Takes one observation, of which `promised` was said.

        What is to come differs from what was: more than one in ten may fall outside the quantiles of the past. So the
        levels follow how often that happened (adaptive conformal inference, Gibbs and Candes 2021) to what was promised: the
        quantiles of now have already seen those that ran beside it, and would look too good.
        """
        p10, _, p90 = promised
        low = self.low_level + (_OUTSIDE_STEP if ratio < p10 else _INSIDE_STEP)
        high = self.high_level + (_OUTSIDE_STEP if ratio > p90 else _INSIDE_STEP)
        self.low_level = _LOWEST_LEVEL if low < _LOWEST_LEVEL else _HIGHEST_LEVEL if low > _HIGHEST_LEVEL else low
        self.high_level = _LOWEST_LEVEL if high < _LOWEST_LEVEL else _HIGHEST_LEVEL if high > _HIGHEST_LEVEL else high
        self._window.push(ratio)
        self.quantiles = self._window.quantiles(self.low_level, self.high_level)


def lengths_of(uncached_tokens: int, output_tokens: int) -> Lengths:
    """Of a request by what it asked for: prompt tokens to compute, and output tokens at most."""
    return bisect_left(PROMPT_LENGTHS, uncached_tokens), bisect_left(OUTPUT_LENGTHS, output_tokens)


class RatiosByLength:
    """The latest ratios of one quantity, of all requests and of each length apart."""

    __slots__ = ("_own", "all")

    def __init__(self) -> None:
        self.all = ErrorRatios()
        self._own = tuple([Window() for _ in range(NUM_LENGTHS)])

    def add(self, length: int, ratio: float, promised: Quantiles) -> None:
        """Takes one observation of a request of this length, see ErrorRatios."""
        self.all.add(ratio, promised)
        self._own[length].push(ratio)

    def own(self, length: int) -> Quantiles | None:
        """Of those of this length alone, their spread around the middle of all where they are not many; None while they are few."""
        window, ratios = self._own[length], self.all
        if len(window) < MIN_NUM_SPREAD:
            return None
        own = window.quantiles(ratios.low_level, ratios.high_level)
        if len(window) >= MIN_NUM_OWN:
            return own
        p10, p50, p90 = own
        middle = ratios.quantiles.p50
        scale = middle / p50
        return new(Quantiles, (scale * p10, middle, scale * p90))
