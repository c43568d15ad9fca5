"""The gateway's side of the controller and the agents, put together: what every route needs."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Protocol

from dragoman.controllers import Controllers
from dragoman.errors import DragomanError
from dragoman.tls import TlsIdentity
from dragoman.v1 import agent_pb2, error_pb2
from dragoman_gateway.admission import Admissions
from dragoman_gateway.attach import Links
from dragoman_gateway.channels import Channels
from dragoman_gateway.config import GatewaySettings
from dragoman_gateway.fleet import Fleet, Member
from dragoman_gateway.metrics import GatewayMetrics
from dragoman_gateway.models import Models
from dragoman_gateway.streaming import ActiveStreams


class Abortable(Protocol):
    """A request under way."""

    def abort(self, error: Exception) -> None:
        """End it early."""


class Backend:
    """Owns the connections of this process. `start` on the loop, `close` at the end."""

    def __init__(self, settings: GatewaySettings, tls: TlsIdentity | None = None) -> None:
        """`tls`: who the gateway is towards controllers and agents; None for loopback."""
        self.settings = settings
        self.metrics = GatewayMetrics()
        self.channels = Channels(tls.channel_credentials() if tls else None)
        self.controllers = Controllers(settings.controller)
        self.fleet = Fleet(self.channels, self.controllers, self._member_changed, self._member_left)
        self.admissions = Admissions(self.channels, self.controllers)
        self.links = Links(self.channels)
        self.models = Models(self.fleet, self.channels, settings.served_model_name, settings.accepts_any_model)
        self.active = ActiveStreams(settings.ping_interval, settings.write_timeout)
        self._jobs: set[Abortable] = set()
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self.is_draining = False
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to follow the fleet."""
        self._tasks = [asyncio.ensure_future(part.run()) for part in (self.fleet, self.admissions, self.active)]

    @property
    def num_jobs(self) -> int:
        """Requests under way."""
        return len(self._jobs)

    def job_began(self, job: Abortable) -> None:
        """Count a request."""
        self._jobs.add(job)
        self._is_idle.clear()
        self.metrics.running.set(len(self._jobs))

    def job_ended(self, job: Abortable) -> None:
        """It is over."""
        self._jobs.discard(job)
        self.metrics.running.set(len(self._jobs))
        if not self._jobs:
            self._is_idle.set()

    async def drain(self, timeout_seconds: float) -> None:
        """Refuse new requests and wait for those under way; what still runs after `timeout_seconds` is ended."""
        self.is_draining = True
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                await self._is_idle.wait()
        self.stop_now()

    def stop_now(self) -> None:
        """End every request under way, each with its terminal event."""
        self.is_draining = True
        for job in list(self._jobs):
            job.abort(
                DragomanError(
                    error_pb2.ERROR_REASON_AGENT_DRAINING, "the gateway is shutting down; try again", retry_delay=2.0
                )
            )

    async def close(self) -> None:
        """Close every connection."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.links.close()
        await self.models.close()
        await self.channels.close()

    def _member_changed(self, member: Member) -> None:
        # Only a verdict counts, not absence: a controller that has restarted does not know its agents yet.
        if member.state == agent_pb2.AGENT_STATE_DEAD:
            self.links.agent_is_dead(member.agent.agent_id, None)
        else:
            self.links.agent_is_dead(member.agent.agent_id, member.epoch)
        self.models.prefetch(member)

    def _member_left(self, member: Member) -> None:
        if not self.links.has_open(member.agent.agent_id):
            self.channels.drop(member.agent.data_address)
