"""A metrics registry as telemetry messages. Takes what prometheus_client collects, without importing it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dragoman.v1 import telemetry_service_pb2 as pb


def snapshot(families: Iterable[Any], name_prefixes: Iterable[str]) -> pb.StreamMetricsResponse:
    """The families of a registry now; those whose sample names begin with one of the prefixes, all without any."""
    prefixes = tuple(name_prefixes)
    response = pb.StreamMetricsResponse()
    response.sample_time.GetCurrentTime()
    for family in families:
        wanted = [s for s in metric_samples(family) if not prefixes or s.name.startswith(prefixes)]
        response.samples.extend(wanted)
    return response


def metric_samples(family: Any) -> Iterable[pb.MetricSample]:
    """The samples of one family under the names that /metrics shows; of a histogram, one sample a label set.

    /metrics has cumulative buckets, the message has each bucket's own count.
    """
    if family.type != "histogram":
        for name, labels, value, *_ in family.samples:
            if family.type == "counter":
                yield pb.MetricSample(name=name, labels=labels, counter=value)
            else:
                yield pb.MetricSample(name=name, labels=labels, gauge=value)
        return
    series: dict[tuple[tuple[str, str], ...], pb.MetricSample] = {}
    cumulative: dict[tuple[tuple[str, str], ...], float] = {}
    for name, labels, value, *_ in family.samples:
        others = {key: text for key, text in labels.items() if key != "le"}
        key = tuple(sorted(others.items()))
        sample = series.setdefault(key, pb.MetricSample(name=family.name, labels=others, histogram=pb.Histogram()))
        if name.endswith("_bucket"):
            if labels["le"] != "+Inf":
                sample.histogram.upper_bounds.append(float(labels["le"]))
            sample.histogram.bucket_counts.append(int(value - cumulative.get(key, 0)))
            cumulative[key] = value
        elif name.endswith("_sum"):
            sample.histogram.sum = value
    yield from series.values()
