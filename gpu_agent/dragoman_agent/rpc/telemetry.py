"""TelemetryService: the metrics registry, the load and a timeline of engine steps, as streams."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable

from prometheus_client import CollectorRegistry

from dragoman.errors import DragomanError
from dragoman.intervals import interval_of
from dragoman.metric_samples import snapshot
from dragoman.serving import Context
from dragoman.v1 import error_pb2, telemetry_service_pb2, telemetry_service_pb2_grpc
from dragoman_agent.engine.messages import Step
from dragoman_agent.rpc.engine_client import EngineClient
from dragoman_agent.rpc.validate import seconds_of

DEFAULT_METRICS_SECONDS = 1.0
DEFAULT_LOAD_SECONDS = 0.2
MAX_TRACE_SECONDS = 60.0
CHUNK_BYTES = 256 << 10
LoadSample = Callable[[], telemetry_service_pb2.AgentLoadSample]


class TelemetryServicer(telemetry_service_pb2_grpc.TelemetryServiceServicer):
    """Reads only; any number of watchers."""

    def __init__(self, registry: CollectorRegistry, load_sample: LoadSample, engine: EngineClient) -> None:
        self._registry = registry
        self._load_sample = load_sample
        self._engine = engine

    async def StreamMetrics(
        self, request: telemetry_service_pb2.StreamMetricsRequest, context: Context
    ) -> AsyncIterator[telemetry_service_pb2.StreamMetricsResponse]:
        """A snapshot at once, then one at each interval."""
        interval = interval_of(request, DEFAULT_METRICS_SECONDS)
        while True:
            yield snapshot(self._registry.collect(), request.name_prefixes)
            await asyncio.sleep(interval)

    async def WatchLoad(
        self, request: telemetry_service_pb2.WatchLoadRequest, context: Context
    ) -> AsyncIterator[telemetry_service_pb2.WatchLoadResponse]:
        """The load of this agent at once, then at each interval."""
        interval = interval_of(request, DEFAULT_LOAD_SECONDS)
        while True:
            yield telemetry_service_pb2.WatchLoadResponse(agents=[self._load_sample()])
            await asyncio.sleep(interval)

    async def CaptureTrace(
        self, request: telemetry_service_pb2.CaptureTraceRequest, context: Context
    ) -> AsyncIterator[telemetry_service_pb2.CaptureTraceResponse]:
        """Record engine steps for a while, then send them as a Chrome trace (JSON), which Perfetto opens."""
        if request.kind == telemetry_service_pb2.TRACE_KIND_MEMORY:
            raise DragomanError(
                error_pb2.ERROR_REASON_UNIMPLEMENTED,
                "kind: this device has no memory trace; ask for TRACE_KIND_TIMELINE",
                metadata={"param": "kind"},
            )
        seconds = seconds_of(request.duration, "duration", maximum=MAX_TRACE_SECONDS)
        recorder = TimelineRecorder(self._engine.pid)
        end = self._engine.on_step(recorder.take)
        try:
            await asyncio.sleep(seconds)
        finally:
            end()
        trace = await asyncio.to_thread(recorder.to_json)
        for start in range(0, len(trace), CHUNK_BYTES):
            yield telemetry_service_pb2.CaptureTraceResponse(chunk=trace[start : start + CHUNK_BYTES])


class TimelineRecorder:
    """Engine steps as Chrome trace events: device time, host time around it, and counters."""

    _DEVICE, _HOST = 1, 2

    def __init__(self, pid: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._pid = pid
        self._clock = clock
        self._origin = clock()
        self._steps: list[tuple[float, Step]] = []

    def take(self, step: Step) -> None:
        """One frame, at the moment it arrived: its step has just ended."""
        self._steps.append((self._clock() - self._origin, step))

    def to_json(self) -> bytes:
        """The trace file."""
        events: list[dict[str, object]] = [
            self._named("process_name", 0, f"dragoman engine {self._pid}"),
            self._named("thread_name", self._DEVICE, "device"),
            self._named("thread_name", self._HOST, "host"),
        ]
        for end, step in self._steps:
            events.extend(self._step_events(end * 1e6, step))
        return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}).encode()

    def _named(self, kind: str, thread: int, name: str) -> dict[str, object]:
        return {"name": kind, "ph": "M", "pid": self._pid, "tid": thread, "args": {"name": name}}

    def _step_events(self, end_us: float, step: Step) -> Iterable[dict[str, object]]:
        load = step.load
        device_us, host_us = step.step_seconds * 1e6, step.host_seconds * 1e6
        facts = {
            "step": step.number,
            "decode_tokens": load.decode_tokens,
            "prefill_tokens": load.prefill_tokens,
            "events": len(step.events),
        }
        base = {"pid": self._pid, "cat": "engine"}
        if load.decode_tokens or load.prefill_tokens:
            name = f"step {step.number}"
            start = max(end_us - device_us, 0.0)
            yield {**base, "name": name, "ph": "X", "tid": self._DEVICE, "ts": start, "dur": device_us, "args": facts}
            yield {**base, "name": name, "ph": "X", "tid": self._HOST, "ts": end_us, "dur": host_us, "args": facts}
        counters = {
            "sequences": {"running": load.running, "waiting": load.waiting},
            "KV blocks": {"used": load.total_blocks - load.free_blocks, "cached": load.cached_blocks},
        }
        for name, values in counters.items():
            yield {**base, "name": name, "ph": "C", "tid": 0, "ts": end_us, "args": values}
