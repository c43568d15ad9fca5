"""HardwareService: what was measured, what was planned from it, and why."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from dragoman.intervals import interval_of
from dragoman.serving import Context
from dragoman.v1 import hardware_pb2, hardware_service_pb2, hardware_service_pb2_grpc

DEFAULT_INTERVAL_SECONDS = 1.0


class HardwareSource(Protocol):
    """The hardware layer's view, see `pal.view.HardwareView`."""

    def profile(self) -> hardware_pb2.HardwareProfile:
        """The profile in force."""

    def candidates(self) -> list[hardware_pb2.DeviceCandidate]:
        """Every device that was looked at."""

    def plan(self) -> hardware_pb2.Plan:
        """The plan in force."""

    def decisions(self) -> list[hardware_pb2.Decision]:
        """The decisions held."""

    def watch_decisions(self) -> AsyncIterator[hardware_pb2.Decision]:
        """The decisions held, then each new one."""

    def watch_limits(self, interval: float) -> AsyncIterator[hardware_pb2.LiveLimits]:
        """The live limits at once, then at each interval and at each event."""


class HardwareServicer(hardware_service_pb2_grpc.HardwareServiceServicer):
    """Translates the hardware layer's view."""

    def __init__(self, view: HardwareSource) -> None:
        self._view = view

    async def GetHardware(
        self, request: hardware_service_pb2.GetHardwareRequest, context: Context
    ) -> hardware_service_pb2.GetHardwareResponse:
        """The profile and the candidates."""
        return hardware_service_pb2.GetHardwareResponse(
            profile=self._view.profile(), candidates=self._view.candidates()
        )

    async def WatchHardware(
        self, request: hardware_service_pb2.WatchHardwareRequest, context: Context
    ) -> AsyncIterator[hardware_service_pb2.WatchHardwareResponse]:
        """The live limits at once, then at each interval and at each event."""
        async for limits in self._view.watch_limits(interval_of(request, DEFAULT_INTERVAL_SECONDS)):
            yield hardware_service_pb2.WatchHardwareResponse(limits=limits)

    async def GetPlan(
        self, request: hardware_service_pb2.GetPlanRequest, context: Context
    ) -> hardware_service_pb2.GetPlanResponse:
        """The plan and the decisions that made it."""
        return hardware_service_pb2.GetPlanResponse(plan=self._view.plan(), decisions=self._view.decisions())

    async def WatchDecisions(
        self, request: hardware_service_pb2.WatchDecisionsRequest, context: Context
    ) -> AsyncIterator[hardware_service_pb2.WatchDecisionsResponse]:
        """The decisions held, then each new one."""
        async for decision in self._view.watch_decisions():
            if request.subject in ("", decision.subject):
                yield hardware_service_pb2.WatchDecisionsResponse(decision=decision)
