"""The figures of a soak: what is growth, what is drift, and when there is too little to tell."""

from __future__ import annotations

import pytest
from benchmarks.soak import Sample, p99_drift, rss_slope


def test_slope_is_bytes_a_minute_of_the_second_half() -> None:
    warm_up = [Sample(time=float(second), rss_bytes=second * 10_000, num_fds=9) for second in range(0, 60, 5)]
    steady = [Sample(time=float(second), rss_bytes=900_000 + 5 * second, num_fds=9) for second in range(60, 120, 5)]
    assert rss_slope(warm_up + steady) == pytest.approx(5 * 60)
    with pytest.raises(ValueError, match="soak longer"):
        rss_slope(steady[:4])


def test_drift_compares_the_last_quarter_with_the_second() -> None:
    def latencies(early: float, late: float) -> list[tuple[float, float]]:
        return [(float(second), early if second < 60 else late) for second in range(100)]

    assert p99_drift(latencies(0.2, 0.2)) == 1.0
    assert p99_drift(latencies(0.2, 0.5)) == pytest.approx(2.5)
    with pytest.raises(ValueError, match="soak longer"):
        p99_drift([(0.0, 0.1), (1.0, 0.1)])
