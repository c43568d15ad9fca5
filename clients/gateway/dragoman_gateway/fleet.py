"""The fleet as this gateway last heard of it: which models are served, by which agents, and in what state."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from dragoman.controllers import Controllers
from dragoman.ticket import plain_details
from dragoman.v1 import agent_pb2, fleet_service_pb2, fleet_service_pb2_grpc
from dragoman_gateway.channels import Channels

logger = logging.getLogger(__name__)

_FIRST_RETRY_SECONDS = 0.1
_MAX_RETRY_SECONDS = 2.0
_LIST_SECONDS = 2.0
_USABLE = (
    agent_pb2.AGENT_STATE_SERVING,
    agent_pb2.AGENT_STATE_SUSPECT,
    agent_pb2.AGENT_STATE_DRAINING,
)

Member = fleet_service_pb2.FleetMember


class Fleet:
    """Follows WatchFleet. The last known members are kept while the controller is away: the agents are still there."""

    def __init__(
        self,
        channels: Channels,
        controllers: Controllers,
        on_change: Callable[[Member], None],
        on_left: Callable[[Member], None],
    ) -> None:
        self._channels = channels
        self._controllers = controllers
        self._on_change = on_change
        self._on_left = on_left
        self.members: dict[str, Member] = {}
        self.is_connected = False

    async def run(self) -> None:
        """Follow the fleet until cancelled."""
        delay = _FIRST_RETRY_SECONDS
        while True:
            address = self._controllers.current
            try:
                call = self._stub(address).WatchFleet(fleet_service_pb2.WatchFleetRequest())
                await call.wait_for_connection()
                first = True
                async for change in call:
                    self._apply(change, replace=first)
                    self.is_connected, first, delay = True, False, _FIRST_RETRY_SECONDS
            except grpc.aio.AioRpcError as error:
                if self.is_connected:
                    logger.warning("controller at %s lost: %s; running streams go on", address, plain_details(error))
                self._controllers.failed(address)
            except Exception:
                logger.exception("the fleet's watch failed and is started again")  # without it nothing is ever served
            self.is_connected = False
            await asyncio.sleep(delay)
            delay = min(delay * 2, _MAX_RETRY_SECONDS)

    def _apply(self, change: fleet_service_pb2.WatchFleetResponse, *, replace: bool) -> None:
        if replace:
            self.members.clear()
        for member in change.changed:
            self.members[member.agent.agent_id] = member
            self._on_change(member)
        for agent_id in change.removed_agent_ids:
            left = self.members.pop(agent_id, None)
            if left is not None:
                self._on_left(left)

    async def current(self) -> list[Member]:
        """The members with their load as the controller knows it now. Raises AioRpcError when it does not answer."""
        answer = await self._stub(self._controllers.current).ListAgents(
            fleet_service_pb2.ListAgentsRequest(), timeout=_LIST_SECONDS
        )
        return list(answer.members)

    def _stub(self, address: str) -> Any:
        return fleet_service_pb2_grpc.FleetServiceStub(self._channels.get(address))

    def served(self) -> Iterator[tuple[Member, agent_pb2.ServedModel]]:
        """Every (member, model) of the fleet, agents that take requests first."""
        ordered = sorted(
            self.members.values(), key=lambda m: (m.state != agent_pb2.AGENT_STATE_SERVING, m.agent.agent_id)
        )
        for member in ordered:
            for model in member.agent.models:
                yield member, model

    def model_names(self) -> list[str]:
        """Names of all models that some agent serves, sorted."""
        return sorted({model.model for _, model in self.served()})

    def holders(self, name: str) -> list[tuple[Member, agent_pb2.ServedModel]]:
        """The agents that hold the model and answer, those that take requests first."""
        return [(m, model) for m, model in self.served() if model.model == name and m.state in _USABLE]

    @property
    def has_serving_agent(self) -> bool:
        """Whether any agent takes requests."""
        return any(member.state == agent_pb2.AGENT_STATE_SERVING for member in self.members.values())

    @property
    def phase(self) -> str:
        """Why nothing is served, or "serving": for /health."""
        if self.has_serving_agent:
            return "serving"
        if not self.is_connected:
            return "controller_unreachable"
        states = {member.state for member in self.members.values()}
        for state, phase in (
            (agent_pb2.AGENT_STATE_STARTING, "model_loading"),
            (agent_pb2.AGENT_STATE_SUSPECT, "agent_suspect"),
            (agent_pb2.AGENT_STATE_DRAINING, "agent_draining"),
        ):
            if state in states:
                return phase
        return "no_agent"
