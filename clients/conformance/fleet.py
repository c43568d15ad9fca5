"""Cells of real processes: one shared and not to be harmed, one with agents that a case kills, and an open agent."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc
from clients.conformance.processes import Server, StartError, start_agent, start_controller
from clients.conformance.proxy import Fault, Proxy

from dragoman.v1 import admission_service_pb2 as admission_pb
from dragoman.v1 import (
    agent_pb2,
    fleet_service_pb2,
    fleet_service_pb2_grpc,
    telemetry_service_pb2,
    telemetry_service_pb2_grpc,
)

_REGISTER_SECONDS = 20.0
NAMES = ("left", "right")


class Fleet:
    """A controller and two agents; their streams and tickets pass through proxies that a case may have break them."""

    def __init__(self, folder: Path, *agent_arguments: str, proxied: bool) -> None:
        self._folder, self._arguments, self._proxied = folder, agent_arguments, proxied
        self._controller: Server | None = None
        self._agents: dict[str, Server] = {}
        self._proxies: list[Proxy] = []
        self._faults: list[Fault | None] = []
        self._tampers: list[str | None] = []
        self._first_grant: bytes | None = None
        self._harmed: set[str] = set()
        self.address = ""

    async def start(self) -> None:
        """Starts what is not up, and waits until both agents serve."""
        if self._controller is None:
            self._controller = await asyncio.to_thread(start_controller, self._folder)
            self.address = self._controller.address
            if self._proxied:
                front = Proxy(tamper=self._tamper)
                front.forward_to(self._controller.address)
                await front.start()
                self._proxies.append(front)
                self.address = front.address
        for name in NAMES:
            if name not in self._agents or self._agents[name].process.poll() is not None:
                self._agents[name] = await self._start_agent(name)
        await self._registered()

    def prepare(self, stage: Mapping[str, Any]) -> None:
        """Sets what is to break: `faults`, one a Generate, and `tampers`, one a grant; null breaks nothing."""
        self._faults = [None if fault is None else Fault(**fault) for fault in stage.get("faults", [])]
        self._tampers = list(stage.get("tampers", []))
        self._first_grant = None

    async def running(self) -> dict[str, int]:
        """Running and waiting requests of each agent that lives, by its own word."""
        found = {}
        for name, server in self._agents.items():
            if server.process.poll() is None:
                async with grpc.aio.insecure_channel(server.address) as channel:
                    stub = telemetry_service_pb2_grpc.TelemetryServiceStub(channel)
                    call = stub.WatchLoad(telemetry_service_pb2.WatchLoadRequest(), timeout=5)
                    load = (await call.read()).agents[0].load
                    call.cancel()
                found[name] = load.running_requests + load.waiting_requests
        return found

    async def harm(self, signal_number: int) -> None:
        """Sends a signal to the agent that runs something."""
        for name, running in (await self.running()).items():
            if running:
                self._agents[name].process.send_signal(signal_number)
                self._harmed.add(name)

    async def bury(self) -> None:
        """Kills what was harmed, a frozen agent too; `start` puts others in their place."""
        for name in self._harmed:
            self._agents[name].process.kill()
            await asyncio.to_thread(self._agents[name].stop)  # its pipe is closed too
        self._harmed.clear()

    async def stop(self) -> None:
        """Stops everything."""
        for proxy in self._proxies:
            await proxy.stop()
        servers = [*self._agents.values(), *([self._controller] if self._controller else [])]
        await asyncio.gather(*(asyncio.to_thread(server.stop) for server in servers))

    async def _start_agent(self, name: str) -> Server:
        assert self._controller is not None
        arguments = ["--controllers", self._controller.address, "--agent-id", name, *self._arguments]
        if not self._proxied:
            return await asyncio.to_thread(start_agent, self._folder, *arguments)
        proxy = Proxy(next_fault=self._next_fault)
        await proxy.start()
        self._proxies.append(proxy)
        server = await asyncio.to_thread(start_agent, self._folder, *arguments, "--advertise", proxy.address)
        proxy.forward_to(server.address)
        return server

    async def _registered(self) -> None:
        try:
            async with asyncio.timeout(_REGISTER_SECONDS):
                await self._until_serving()
        except TimeoutError:
            raise StartError(f"the agents {', '.join(NAMES)} did not register within {_REGISTER_SECONDS:g} s") from None

    async def _until_serving(self) -> None:
        assert self._controller is not None
        async with grpc.aio.insecure_channel(self._controller.address) as channel:
            stub = fleet_service_pb2_grpc.FleetServiceStub(channel)
            while True:
                answer = await stub.ListAgents(fleet_service_pb2.ListAgentsRequest(), timeout=5)
                serving = [m for m in answer.members if m.state == agent_pb2.AGENT_STATE_SERVING]
                # A new life of an agent is there once the address listed is the one it has now.
                current = {server.address for server in self._agents.values()} | {p.address for p in self._proxies}
                if sum(member.agent.data_address in current for member in serving) == len(NAMES):
                    return
                if any(server.process.poll() is not None for server in self._agents.values()):
                    raise StartError("an agent ended before it had registered")
                await asyncio.sleep(0.05)

    def _next_fault(self) -> Fault | None:
        return self._faults.pop(0) if self._faults else None

    def _tamper(self, granted: admission_pb.AcquireTicketResponse) -> None:
        kind = self._tampers.pop(0) if self._tampers else None
        if kind == "flip":
            token = bytearray(granted.ticket.token)
            token[len(token) // 2] ^= 1
            granted.ticket.token = bytes(token)
        elif kind == "swap":
            granted.ticket.token = granted.fallback_ticket.token
        elif kind == "keep":
            self._first_grant = granted.SerializeToString()
        elif kind == "replay" and self._first_grant is not None:
            granted.ParseFromString(self._first_grant)
