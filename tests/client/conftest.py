"""Real processes: a controller and two null agents, for the tests of this folder."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.client.scripted import Script, Scripted, ScriptedAgent, ScriptedController

from dragoman.channel import server_options
from dragoman.v1 import admission_service_pb2_grpc, generation_service_pb2_grpc


@dataclass
class Server:
    """A process that announced itself."""

    process: subprocess.Popen[str]
    serving: dict[str, Any]
    log: Path

    @property
    def address(self) -> str:
        return str(self.serving["grpc"])

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate() if os.name == "nt" else self.process.send_signal(2)
        try:
            self.process.wait(6)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@dataclass
class Fleet:
    """Starts servers and stops what it started."""

    folder: Path
    servers: list[Server] = field(default_factory=list)

    def start(self, module: str, *arguments: str, until: str = "serving") -> Server:
        log = self.folder / f"{len(self.servers)}.log"
        environ = {name: value for name, value in os.environ.items() if not name.startswith("DRAGOMAN_")}
        with log.open("w") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, *arguments, "--port", "0", "--metrics-port", "0", "--announce"],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=environ,
            )
        assert process.stdout is not None
        serving: dict[str, Any] = {}
        for line in process.stdout:
            event = json.loads(line)
            if event["event"] == "serving":
                serving = event
            if event["event"] == until:
                server = Server(process, serving, log)
                self.servers.append(server)
                return server
        process.wait()
        process.stdout.close()
        raise AssertionError(f"{module} did not start: {log.read_text()[-2000:]}")

    def controller(self) -> Server:
        return self.start("dragoman_controller.main")

    def agent(self, *arguments: str) -> Server:
        return self.start("dragoman_agent.main", "--device", "null", *arguments, until="ready")

    def stop(self) -> None:
        for server in reversed(self.servers):
            server.stop()


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A fleet for the whole folder."""
    made = Fleet(tmp_path_factory.mktemp("fleet"))
    yield made
    made.stop()


@pytest.fixture(scope="session")
def controller(fleet: Fleet) -> str:
    """Address of a controller with one null agent, which is not to be harmed."""
    server = fleet.controller()
    fleet.agent("--controllers", server.address, "--agent-id", "steady")
    return server.address


@pytest.fixture(scope="session")
def open_agent(fleet: Fleet) -> str:
    """Address of a null agent that takes requests without a ticket."""
    return fleet.agent("--open", "--agent-id", "open").address


@pytest.fixture
def own_fleet(tmp_path: Path) -> Iterator[Fleet]:
    """A fleet of one test, to be harmed."""
    made = Fleet(tmp_path)
    yield made
    made.stop()


@pytest.fixture
async def scripted() -> AsyncIterator[Scripted]:
    """scripted([scripts of agent a], [scripts of agent b], ...) -> the controller, serving."""
    async with contextlib.AsyncExitStack() as stack:

        async def serve(add: Callable[[grpc.aio.Server], None]) -> str:
            server = grpc.aio.server(options=server_options())
            add(server)
            port = server.add_insecure_port("127.0.0.1:0")
            await server.start()
            stack.push_async_callback(server.stop, 0)
            return f"127.0.0.1:{port}"

        async def make(*scripts: list[Script]) -> ScriptedController:
            controller = ScriptedController()
            for index, script in enumerate(scripts):
                agent = ScriptedAgent(f"agent-{index}", 100 + index, list(script))
                agent.address = await serve(
                    lambda server, agent=agent: generation_service_pb2_grpc.add_GenerationServiceServicer_to_server(
                        agent, server
                    )
                )
                controller.agents.append(agent)
            controller.address = await serve(
                lambda server: admission_service_pb2_grpc.add_AdmissionServiceServicer_to_server(controller, server)
            )
            return controller

        yield make
