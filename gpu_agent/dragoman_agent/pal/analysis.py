"""What repeated measurements say: medians and spreads, a line's intercept, the knee of a cache, a test of significance. Pure.

No number leaves here that was not seen: 0, negative or no number raises ValueError, and a cost too small to be told from
none becomes an upper bound.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from dragoman_agent.pal.profile import Value


def spread_of(samples: Sequence[float]) -> float:
    """(max - min) / median; 0 where the median is."""
    median = statistics.median(samples)
    return (max(samples) - min(samples)) / abs(median) if median else 0.0


def positive_median(samples: Sequence[float]) -> float:
    """The median. Raises ValueError unless every sample is finite and the median is above 0: a time of 0 was not resolved."""
    if not all(map(math.isfinite, samples)):
        raise ValueError(f"a sample is no finite number ({', '.join(f'{each:.3g}' for each in samples)})")
    median = statistics.median(samples)
    if not median > 0:
        raise ValueError(f"the median of {len(samples)} samples is {median:.3g}, so nothing was resolved")
    return median


def measured(samples: Sequence[float], unit: str, note: str = "") -> Value:
    """The median of the repeats, with their spread. Raises ValueError as `positive_median` does."""
    return Value(positive_median(samples), unit, "measured", spread=spread_of(samples), note=note)


def rates(amount: float, seconds: Sequence[float]) -> list[float]:
    """`amount` over each time. Raises ValueError where a time is not above 0, for its rate would be without bound."""
    if not all(each > 0 for each in seconds):
        raise ValueError(f"a time of {min(seconds):.3g} s came out, which no rate can be made of")
    return [amount / each for each in seconds]


def measured_rate(amount: float, seconds: Sequence[float], unit: str, note: str = "") -> Value:
    """`amount` over each time: median and spread of the rates. Raises ValueError as `rates` does."""
    return measured(rates(amount, seconds), unit, note)


def measured_list(samples: Sequence[Sequence[float]], unit: str, labels: Sequence[str], note: str = "") -> Value:
    """The median of each entry's repeats; the spread is the widest of theirs. Raises ValueError as `positive_median` does."""
    medians = tuple(positive_median(each) for each in samples)
    return Value(medians, unit, "measured", spread=max(map(spread_of, samples)), note=note, labels=tuple(labels))


UPPER_BOUND = "an upper bound: below what was resolved"  # how the note of such a value begins
UNRESOLVED = "not told apart from 0"


def measured_cost(longer: Sequence[float], base: Sequence[float], unit: str, tick: float, note: str = "") -> Value:
    """What `longer` takes beyond `base`, of repeats of both; `tick` is the least step of the clock between two of them.

    A cost below `resolution` is not shown as a measurement: the value is then the resolution itself, derived, an upper bound by
    its note. Raises ValueError for samples that are no finite numbers.
    """
    cost, limit = statistics.median(longer) - positive_median(base), resolution(longer, base, tick)
    if cost > limit:
        start = statistics.median(base)
        return Value(cost, unit, "measured", spread=spread_of([each - start for each in longer]), note=note)
    return Value(limit, unit, "derived", note=f"{UPPER_BOUND} ({_resolved(limit, unit)}); {note}")


def measured_gain(base: Sequence[float], shorter: Sequence[float], unit: str, tick: float, note: str = "") -> Value:
    """What `shorter` saves of `base`, negative where it costs. Below `resolution` the note says that it may be none."""
    gains = [a - b for a, b in zip(base, shorter, strict=True)]
    gain, limit = statistics.median(gains), resolution(base, shorter, tick)
    positive_median(base)
    if abs(gain) > limit:
        return Value(gain, unit, "measured", spread=spread_of(gains), note=note)
    return Value(gain, unit, "derived", note=f"{UNRESOLVED}: {_resolved(limit, unit)} were resolved; {note}")


def is_unresolved(value: Value) -> bool:
    """Whether a 0 is called a measurement, as a probe once did with what it could not resolve."""
    numbers = value.value if isinstance(value.value, tuple) else (value.value,)
    return value.provenance == "measured" and any(
        number == 0 for number in numbers if not isinstance(number, str | bool)
    )


def resolution(one: Sequence[float], other: Sequence[float], tick: float) -> float:
    """The least difference of two medians that is told from none: the clock's step, or how far the middle half of each scatters."""
    return max(tick, _middle_half(one) + _middle_half(other))


def _middle_half(samples: Sequence[float]) -> float:
    """The interquartile range, which one late repeat does not move."""
    if not all(map(math.isfinite, samples)):
        raise ValueError("a sample is no finite number")
    if len(samples) < 2:
        return 0.0
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return high - low


def _resolved(limit: float, unit: str) -> str:
    return f"{limit * 1e9:.0f} ns" if unit == "s" else f"{limit:.3g} {unit}".strip()


@dataclass(frozen=True, slots=True)
class Line:
    """t(bytes) = intercept + bytes / rate."""

    intercept: float  # seconds
    rate: float  # bytes/s
    max_error: float  # the largest |predicted / measured - 1|


def fit_line(sizes: Sequence[float], seconds: Sequence[float]) -> Line:
    """Least squares of the relative error, so that the short ones count as much as the long ones.

    Raises ValueError where fewer than two sizes differ, a time is not above 0, or time does not grow with size.
    """
    if not all(each > 0 for each in seconds):
        raise ValueError(f"a time of {min(seconds):.3g} s came out, which no line can be drawn through")
    weights = [1 / each**2 for each in seconds]
    total = sum(weights)
    mean_size = sum(w * x for w, x in zip(weights, sizes, strict=True)) / total
    mean_time = sum(w * t for w, t in zip(weights, seconds, strict=True)) / total
    variance = sum(w * (x - mean_size) ** 2 for w, x in zip(weights, sizes, strict=True))
    if len(set(sizes)) < 2 or variance <= 0:
        raise ValueError("a line needs times of two sizes at least")
    covariance = sum(w * (x - mean_size) * (t - mean_time) for w, x, t in zip(weights, sizes, seconds, strict=True))
    slope = covariance / variance
    if slope <= 0:
        raise ValueError("the times do not grow with the size")
    intercept = mean_time - slope * mean_size
    error = max(abs((intercept + slope * x) / t - 1) for x, t in zip(sizes, seconds, strict=True))
    return Line(intercept, 1 / slope, error)


@dataclass(frozen=True, slots=True)
class Knee:
    """Where repeated reads of a buffer stop being served by a cache."""

    size: float  # bytes: the rate is halfway between the cache's and the memory's
    plateau: float  # bytes/s in the cache: the best of the sizes before the knee
    floor: float  # bytes/s of the largest buffers
    full_size: float  # bytes: the largest measured size before it that keeps nine tenths of what the cache gains


_MIN_KNEE = 1.05  # several times the spread of a rate; L2 is only a quarter quicker than the memory of some cards


def find_knee(sizes: Sequence[float], rates: Sequence[float]) -> Knee:
    """The knee of rates over ascending sizes, interpolated between the two sizes around it.

    The rise at small sizes, where too few bytes are in flight, is left out: the search begins at the best rate. Raises
    ValueError where the best rate is hardly above that of the largest size: nothing is cached, or no size was larger
    than the cache.
    """
    if len(sizes) < 3 or len(sizes) != len(rates):
        raise ValueError("a knee needs the rates of three sizes at least")
    best = max(range(len(rates)), key=rates.__getitem__)
    plateau, floor = rates[best], rates[-1]
    if plateau < _MIN_KNEE * floor:
        raise ValueError(
            f"repeated reads are nowhere {_MIN_KNEE - 1:.0%} quicker than those of the largest buffer: no knee was seen"
        )
    halfway = (plateau + floor) / 2
    after = next(i for i in range(best + 1, len(rates)) if rates[i] < halfway)
    high, low = rates[after - 1], rates[after]
    size = sizes[after - 1] + (sizes[after] - sizes[after - 1]) * (high - halfway) / (high - low)
    full = max(sizes[i] for i in range(best, after) if rates[i] >= floor + 0.9 * (plateau - floor))
    return Knee(size, plateau, floor, full)


def kruskal_wallis(groups: Sequence[Sequence[float]]) -> float:
    """The statistic H of the rank test for equal medians of independent groups, corrected for ties (Kruskal and Wallis, 1952)."""
    pooled = sorted(value for group in groups for value in group)
    count = len(pooled)
    ranks: dict[float, float] = {}
    ties = 0
    start = 0
    while start < count:
        end = start
        while end < count and pooled[end] == pooled[start]:
            end += 1
        ranks[pooled[start]] = (start + 1 + end) / 2
        ties += (end - start) ** 3 - (end - start)
        start = end
    correction = 1 - ties / (count**3 - count) if count > 1 else 0.0
    if correction == 0:
        return 0.0
    total = sum(sum(ranks[value] for value in group) ** 2 / len(group) for group in groups)
    return (12 / (count * (count + 1)) * total - 3 * (count + 1)) / correction


def permutation_p(groups: Sequence[Sequence[float]], rounds: int = 2000, seed: int = 0) -> float:
    """How often groups dealt at random have an H as high as these: (1 + hits) / (1 + rounds)."""
    observed = kruskal_wallis(groups) - 1e-9
    pooled = [value for group in groups for value in group]
    generator = random.Random(seed)
    hits = 0
    for _ in range(rounds):
        generator.shuffle(pooled)
        dealt, start = [], 0
        for group in groups:
            dealt.append(pooled[start : start + len(group)])
            start += len(group)
        hits += kruskal_wallis(dealt) >= observed
    return (1 + hits) / (1 + rounds)


SIGNIFICANCE = 0.01


def significance_note(groups: Sequence[Sequence[float]]) -> str:
    """One sentence: do the groups differ, by which test, and by how much."""
    statistic, chance = kruskal_wallis(groups), permutation_p(groups)
    medians = [statistics.median(group) for group in groups]
    width = (max(medians) - min(medians)) / statistics.median(medians)
    verdict = "significant" if chance < SIGNIFICANCE else "not significant"
    return (
        f"difference {verdict} at {SIGNIFICANCE:g} (Kruskal-Wallis H = {statistic:.1f}, permutation p = {chance:.4f}); "
        f"medians within {width:.1%}"
    )
