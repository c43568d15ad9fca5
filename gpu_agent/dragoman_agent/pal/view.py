"""The hardware layer as protocol messages: what the HardwareService shows."""

from __future__ import annotations

from collections.abc import AsyncIterator

from dragoman.v1 import hardware_pb2
from dragoman_agent.pal.decisions import DecisionLog
from dragoman_agent.pal.live_feed import LiveFeed
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
        self.feed = LiveFeed()

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

    def use(self, profile: Profile, plan: Plan) -> None:
        """From now on these are in force: a live limit changed them."""
        self._profile, self._plan = profile, plan

    def watch_limits(self, interval: float) -> AsyncIterator[hardware_pb2.LiveLimits]:
        """The live limits at once, then every `interval` seconds and at each event."""
        return self.feed.watch(interval)
