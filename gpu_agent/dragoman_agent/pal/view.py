"""The hardware layer as protocol messages: what the HardwareService shows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import psutil
from google.protobuf import duration_pb2

from dragoman.v1 import hardware_pb2
from dragoman_agent.pal.decisions import DecisionLog
from dragoman_agent.pal.messages import decision_to_proto, device_to_proto, plan_to_proto, profile_to_proto
from dragoman_agent.pal.plan import Plan
from dragoman_agent.pal.profile import Profile
from dragoman_agent.pal.select import Selection


class HardwareView:
    """Read access to profile, plan, decisions and live limits, as messages."""

    def __init__(self, profile: Profile, selection: Selection | None, plan: Plan, log: DecisionLog) -> None:
        self._profile = profile
        self._selection = selection
        self._plan = plan
        self._log = log

    def profile(self) -> hardware_pb2.HardwareProfile:
        """The profile in force."""
        return profile_to_proto(self._profile)

    def candidates(self) -> list[hardware_pb2.DeviceCandidate]:
        """Every device that was looked at, the chosen one first."""
        if self._selection is None:
            device = device_to_proto(self._profile.device)
            return [hardware_pb2.DeviceCandidate(device=device, chosen=True, reason="asked for")]
        return [
            hardware_pb2.DeviceCandidate(
                device=device_to_proto(verdict.device.facts), chosen=verdict.chosen, reason=verdict.reason
            )
            for verdict in self._selection.verdicts
        ]

    def plan(self) -> hardware_pb2.Plan:
        """The plan in force."""
        return plan_to_proto(self._plan, {decision.subject: decision.decision_id for decision in self._log.all()})

    def decisions(self) -> list[hardware_pb2.Decision]:
        """The decisions held, oldest first."""
        return [decision_to_proto(decision) for decision in self._log.all()]

    async def watch_decisions(self) -> AsyncIterator[hardware_pb2.Decision]:
        """The decisions held, then each new or completed one."""
        async for decision in self._log.watch():
            yield decision_to_proto(decision)

    async def live_limits(self) -> hardware_pb2.LiveLimits:
        """A fresh sample of what changes while the device runs."""
        start = time.monotonic()
        own = await asyncio.to_thread(_own_memory)
        memory = psutil.virtual_memory()
        limits = hardware_pb2.LiveLimits(
            free_memory_bytes=memory.available, foreign_memory_bytes=max(memory.used - own, 0)
        )
        limits.age.CopyFrom(duration_pb2.Duration(nanos=int((time.monotonic() - start) * 1e9)))
        return limits


def _own_memory() -> int:
    """Resident bytes of this process and its children."""
    process = psutil.Process()
    total = 0
    for entry in (process, *process.children(recursive=True)):
        try:
            total += int(entry.memory_info().rss)
        except psutil.Error:  # it ended meanwhile
            continue
    return total
