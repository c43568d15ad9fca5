"""A registry as telemetry messages."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from dragoman.metric_samples import metric_samples, snapshot


def test_a_histogram_is_one_sample_with_buckets_of_their_own() -> None:
    registry = CollectorRegistry()
    histogram = Histogram("h", "help", ["kind"], buckets=(1.0, 2.0), registry=registry)
    for value in (0.5, 0.7, 1.5, 9.0):
        histogram.labels("x").observe(value)
    (sample,) = [sample for metric in registry.collect() for sample in metric_samples(metric)]
    assert (sample.name, dict(sample.labels)) == ("h", {"kind": "x"})
    assert list(sample.histogram.upper_bounds) == [1.0, 2.0]
    assert list(sample.histogram.bucket_counts) == [2, 1, 1]
    assert sample.histogram.sum == pytest.approx(11.7)


def test_a_snapshot_holds_the_names_asked_for_as_metrics_shows_them() -> None:
    registry = CollectorRegistry()
    Counter("a_requests", "help", registry=registry).inc(3)
    Gauge("b_running", "help", registry=registry).set(2)
    everything = snapshot(registry.collect(), ())
    assert {"a_requests_total", "b_running"} <= {sample.name for sample in everything.samples}
    assert everything.HasField("sample_time")
    (counter,) = snapshot(registry.collect(), ["a_requests_total"]).samples
    assert (counter.name, counter.counter) == ("a_requests_total", 3)
