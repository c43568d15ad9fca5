"""TelemetryService."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from prometheus_client import CollectorRegistry

from dragoman.errors import DragomanError
from dragoman.intervals import interval_of
from dragoman.metric_samples import snapshot
from dragoman.serving import Context
from dragoman.v1 import error_pb2
from dragoman.v1 import telemetry_service_pb2 as pb
from dragoman.v1 import telemetry_service_pb2_grpc as pb_grpc
from dragoman_controller.cell import Cell
from dragoman_controller.rpc.convert import load_message

_METRICS_SECONDS = 1.0
_LOAD_SECONDS = 0.2


class TelemetryServicer(pb_grpc.TelemetryServiceServicer):
    """Reads only; any number of watchers."""

    def __init__(self, cell: Cell, registry: CollectorRegistry) -> None:
        self._cell = cell
        self._registry = registry

    async def StreamMetrics(
        self, request: pb.StreamMetricsRequest, context: Context
    ) -> AsyncIterator[pb.StreamMetricsResponse]:
        """A snapshot at once, then one at each interval."""
        interval = interval_of(request, _METRICS_SECONDS)
        while True:
            yield snapshot(self._registry.collect(), request.name_prefixes)
            await asyncio.sleep(interval)

    async def WatchLoad(self, request: pb.WatchLoadRequest, context: Context) -> AsyncIterator[pb.WatchLoadResponse]:
        """The load of each member at once, then at each interval."""
        interval = interval_of(request, _LOAD_SECONDS)
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
