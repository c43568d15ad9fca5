"""TelemetryService."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable

from google.protobuf import timestamp_pb2
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from dragoman.durations import seconds_of
from dragoman.errors import DragomanError
from dragoman.serving import Context
from dragoman.v1 import error_pb2
from dragoman.v1 import telemetry_service_pb2 as pb
from dragoman.v1 import telemetry_service_pb2_grpc as pb_grpc
from dragoman_controller.cell import Cell
from dragoman_controller.rpc.convert import invalid, load_message

_METRICS_SECONDS = 1.0
_LOAD_SECONDS = 0.2
_MIN_INTERVAL_SECONDS = 0.01


class TelemetryServicer(pb_grpc.TelemetryServiceServicer):
    """Reads only; any number of watchers."""

    def __init__(self, cell: Cell, registry: CollectorRegistry) -> None:
        self._cell = cell
        self._registry = registry

    async def StreamMetrics(
        self, request: pb.StreamMetricsRequest, context: Context
    ) -> AsyncIterator[pb.StreamMetricsResponse]:
        """A snapshot at once, then one at each interval."""
        interval = _interval(request, _METRICS_SECONDS)
        prefixes = tuple(request.name_prefixes)
        while True:
            now = timestamp_pb2.Timestamp()
            now.GetCurrentTime()
            samples = [
                sample
                for metric in self._registry.collect()
                for sample in metric_samples(metric)
                if not prefixes or sample.name.startswith(prefixes)
            ]
            yield pb.StreamMetricsResponse(sample_time=now, samples=samples)
            await asyncio.sleep(interval)

    async def WatchLoad(self, request: pb.WatchLoadRequest, context: Context) -> AsyncIterator[pb.WatchLoadResponse]:
        """The load of each member at once, then at each interval."""
        interval = _interval(request, _LOAD_SECONDS)
        while True:
            now = self._cell.clock()
            yield pb.WatchLoadResponse(
                agents=[
                    pb.AgentLoadSample(
                        agent_id=member.agent_id,
                        state=int(member.state),  # type: ignore[arg-type]
                        load=load_message(member, now),
                    )
                    for member in self._cell.fleet
                ]
            )
            await asyncio.sleep(interval)

    async def CaptureTrace(
        self, request: pb.CaptureTraceRequest, context: Context
    ) -> AsyncIterator[pb.CaptureTraceResponse]:
        """Not here: the controller runs no engine."""
        raise DragomanError(
            error_pb2.ERROR_REASON_UNIMPLEMENTED,
            "the controller runs no engine and has nothing to trace: ask an agent, its address is in ListAgents",
        )
        yield pb.CaptureTraceResponse()


def metric_samples(metric: Metric) -> Iterable[pb.MetricSample]:
    """The samples of one metric. A histogram's buckets, count and sum become one sample."""
    if metric.type != "histogram":
        for name, labels, value, *_ in metric.samples:
            if metric.type == "counter":
                yield pb.MetricSample(name=name, labels=labels, counter=value)
            else:
                yield pb.MetricSample(name=name, labels=labels, gauge=value)
        return
    series: dict[tuple[tuple[str, str], ...], pb.MetricSample] = {}
    cumulative: dict[tuple[tuple[str, str], ...], float] = {}
    for name, labels, value, *_ in metric.samples:
        others = {key: text for key, text in labels.items() if key != "le"}
        key = tuple(sorted(others.items()))
        sample = series.setdefault(key, pb.MetricSample(name=metric.name, labels=others, histogram=pb.Histogram()))
        if name.endswith("_bucket"):
            if labels["le"] != "+Inf":
                sample.histogram.upper_bounds.append(float(labels["le"]))
            sample.histogram.bucket_counts.append(int(value - cumulative.get(key, 0)))
            cumulative[key] = value
        elif name.endswith("_sum"):
            sample.histogram.sum = value
    yield from series.values()


def _interval(request: pb.StreamMetricsRequest | pb.WatchLoadRequest, default: float) -> float:
    if not request.HasField("interval"):
        return default
    seconds = seconds_of(request.interval)
    if seconds < _MIN_INTERVAL_SECONDS:
        raise invalid("interval", f"interval is {seconds:g} s, must be at least {_MIN_INTERVAL_SECONDS:g} s")
    return seconds
