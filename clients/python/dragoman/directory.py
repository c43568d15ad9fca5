"""Who serves what: the members of the fleet as the controller lists them, or the one agent of a direct client."""

from __future__ import annotations

import difflib
import time
from collections.abc import Sequence
from typing import Any

import grpc

from dragoman.controllers import Controllers
from dragoman.errors import DragomanError, from_rpc_error
from dragoman.ticket import CALL_SECONDS, Channels, ask_agent, ask_controller
from dragoman.v1 import (
    agent_pb2,
    error_pb2,
    fleet_service_pb2,
    fleet_service_pb2_grpc,
    telemetry_service_pb2,
    telemetry_service_pb2_grpc,
    tokenizer_service_pb2,
    tokenizer_service_pb2_grpc,
)

# How long a list of members is good enough to find an agent for a template or the name of the one model.
_FRESH_SECONDS = 2.0

# Address and agent id, as `Channels.get` takes them.
Address = tuple[str, str]


class Directory:
    """Finds models and agents. Owner of the member list, which is at most 2 s old where a model is looked up."""

    def __init__(self, channels: Channels, controllers: Controllers | None, agent: str | None) -> None:
        self._channels = channels
        self._controllers = controllers
        self._agent = agent
        self._members: list[fleet_service_pb2.FleetMember] = []
        self._read_time = float("-inf")
        self._agents_model: str | None = None

    async def members(self) -> list[fleet_service_pb2.FleetMember]:
        """Every member, read now."""
        assert self._controllers is not None
        request = fleet_service_pb2.ListAgentsRequest()

        def ask(address: str) -> Any:
            stub = fleet_service_pb2_grpc.FleetServiceStub(self._channels.get(address))
            return stub.ListAgents(request, timeout=CALL_SECONDS)

        answer = await ask_controller(self._controllers, ask)
        self._members, self._read_time = list(answer.members), time.monotonic()
        return self._members

    async def models(self) -> list[str]:
        """Names of the served models, sorted."""
        if self._agent is not None:
            return [await self._model_of_agent(self._agent)]
        return sorted({model.model for member in await self._fresh() for model in member.agent.models})

    async def resolve(self, model: str | None) -> str:
        """The model to ask for: the one named, or the only one served. Raises DragomanError."""
        if model:
            if not isinstance(model, str):
                message = f"model: must be a text, not {model!r:.80}"
                raise DragomanError(error_pb2.ERROR_REASON_INVALID_REQUEST, message, metadata={"param": "model"})
            return model
        if self._agent is not None:
            return await self._model_of_agent(self._agent)
        # An agent lists one model under each of its names; the first is the one it is shown by.
        by_digest: dict[bytes, str] = {}
        for member in await self._fresh():
            for served in member.agent.models:
                by_digest.setdefault(served.model_digest, served.model)
        names = sorted(by_digest.values())
        if len(names) == 1:
            return names[0]
        if not names:
            raise _no_agent("no agent has registered with the controller yet; start one, or wait until it is ready")
        raise DragomanError(
            error_pb2.ERROR_REASON_INVALID_REQUEST,
            f"model: several are served ({', '.join(names)}); name one",
            metadata={"param": "model"},
        )

    def digest_of(self, model: str) -> bytes:
        """The digest of a model as last heard, without asking; empty where it is not known."""
        served = (one for member in self._members for one in member.agent.models if one.model == model)
        return next((one.model_digest for one in served), b"")

    async def agent_of(self, model: str) -> Address:
        """A serving agent of the model. Raises DragomanError."""
        if self._agent is not None:
            return self._agent, ""
        members = await self._fresh()
        serving = [member for member in members if member.state == agent_pb2.AGENT_STATE_SERVING]
        for member in serving:
            if any(served.model == model for served in member.agent.models):
                return member.agent.data_address, member.agent.agent_id
        names = sorted({served.model for member in members for served in member.agent.models})
        if model in names or not names:
            raise _no_agent(f"no agent that serves {model!r} is ready now; see 'dragoman ps'")
        near = difflib.get_close_matches(model, names, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"served: {', '.join(names)}"
        raise DragomanError(error_pb2.ERROR_REASON_MODEL_NOT_SERVED, f"model {model!r} is not served; {hint}")

    async def agent_by_id(self, agent_id: str | None) -> Address:
        """The agent of that id; None is the only one there is. Raises DragomanError."""
        if self._agent is not None:
            return self._agent, ""
        members = await self.members()
        wanted = [member for member in members if agent_id in (None, member.agent.agent_id)]
        if len(wanted) == 1:
            return wanted[0].agent.data_address, wanted[0].agent.agent_id
        ids = ", ".join(member.agent.agent_id for member in members) or "none"
        if agent_id is None and wanted:
            message = f"agent_id: there are several agents ({ids}); name one"
        elif agent_id is None:
            raise _no_agent("no agent has registered with the controller yet")
        else:
            message = f"agent_id: there is no agent {agent_id!r} (agents: {ids})"
        raise DragomanError(error_pb2.ERROR_REASON_INVALID_REQUEST, message, metadata={"param": "agent_id"})

    async def addresses(self) -> Sequence[Address]:
        """Every agent that may run requests."""
        if self._agent is not None:
            return [(self._agent, "")]
        return [(member.agent.data_address, member.agent.agent_id) for member in await self.members()]

    async def load(self) -> list[telemetry_service_pb2.AgentLoadSample]:
        """One sample of each agent's load."""
        address = self._controllers.current if self._controllers is not None else self._agent
        assert address is not None
        stub = telemetry_service_pb2_grpc.TelemetryServiceStub(self._channels.get(address))
        call = stub.WatchLoad(telemetry_service_pb2.WatchLoadRequest(), timeout=CALL_SECONDS)
        try:
            response = await call.read()
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        finally:
            call.cancel()
        return [] if response is grpc.aio.EOF else list(response.agents)

    async def _fresh(self) -> list[fleet_service_pb2.FleetMember]:
        if time.monotonic() - self._read_time > _FRESH_SECONDS or not self._members:
            return await self.members()
        return self._members

    async def _model_of_agent(self, agent: str) -> str:
        if self._agents_model is None:
            stub = tokenizer_service_pb2_grpc.TokenizerServiceStub(self._channels.get(agent))
            call = stub.GetTokenizer(tokenizer_service_pb2.GetTokenizerRequest(), timeout=CALL_SECONDS)
            try:
                # The header comes first and is all that is wanted.
                self._agents_model = str((await ask_agent(agent, call.read)).header.model)
            finally:
                call.cancel()
        return self._agents_model


def _no_agent(message: str) -> DragomanError:
    return DragomanError(error_pb2.ERROR_REASON_NO_AGENT, message)
