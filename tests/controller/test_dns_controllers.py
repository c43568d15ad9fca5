"""`--controllers dns:NAME:PORT` with a real agent and the system's own resolver, which reads a hosts file of the test."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import pytest
from tests.needs import need, skip_without

from dragoman.channel import channel_options
from dragoman.prefix_hash import prompt_digest_of_ids
from dragoman.v1 import admission_service_pb2 as pb
from dragoman.v1 import admission_service_pb2_grpc, generation_service_pb2, generation_service_pb2_grpc
from dragoman_controller.config import ControllerSettings
from dragoman_controller.fleet import AgentState
from dragoman_controller.server import ControllerServer

NAME = "controllers.dragoman.test"
PROMPT = list(range(1, 40))
AGENT = ("-P", "-c", "from dragoman_agent.main import main; main()")
FLAGS = ("--device", "null", "--model", "null", "--port", "0", "--metrics-port", "0", "--announce")


def private_hosts(file: Path) -> tuple[str, ...]:
    """Put before a command, it sees `file` as /etc/hosts; nobody else does."""
    unshare = need("unshare")
    tried = subprocess.run(
        [unshare, "-m", "mount", "--bind", str(file), "/etc/hosts"], capture_output=True, text=True, check=False
    )
    if tried.returncode:
        skip_without("mounts", f"needs a mount namespace, which may not be made here: {tried.stderr.strip()}")
    return unshare, "-m", "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"', str(file)


def write_hosts(file: Path, *addresses: str) -> None:
    """In place: a mount shows the file, not its name."""
    file.write_text("".join(f"{address} {NAME}\n" for address in addresses))


async def until(condition: Callable[[], bool], what: str, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what
        await asyncio.sleep(0.02)


def serves(controller: ControllerServer) -> bool:
    return [member.state for member in controller.cell.fleet] == [AgentState.SERVING]


async def start(host: str, port: int = 0) -> ControllerServer:
    controller = ControllerServer(ControllerSettings(host=host, port=port, metrics_port=0))
    await controller.start()
    return controller


@pytest.fixture
async def two_controllers() -> AsyncIterator[list[ControllerServer]]:
    """On two addresses of this machine and one port, as a name in DNS has them."""
    first = await start("127.0.0.1")
    controllers = [first, await start("127.0.0.2", first.port)]
    yield controllers
    for controller in controllers:
        await controller.stop()


async def run_by(controller: ControllerServer, host: str) -> int:
    """Tokens of a request that this controller admits."""
    (member,) = controller.cell.fleet
    request = pb.AcquireTicketRequest(
        request_id=str(uuid.uuid4()), model=member.spec.models[0].name, prompt_tokens=len(PROMPT), max_output_tokens=5,
        prompt_digest=prompt_digest_of_ids(PROMPT),
    )  # fmt: skip
    async with grpc.aio.insecure_channel(f"{host}:{controller.port}", options=channel_options()) as channel:
        ticket = (
            await admission_service_pb2_grpc.AdmissionServiceStub(channel).AcquireTicket(request, timeout=10)
        ).ticket
    wanted = generation_service_pb2.GenerateRequest(
        request_id=request.request_id, ticket_token=ticket.token, model=request.model
    )
    wanted.token_ids.ids.extend(PROMPT)
    wanted.stop.max_output_tokens = 5
    async with grpc.aio.insecure_channel(ticket.data_address, options=channel_options()) as channel:
        stub = generation_service_pb2_grpc.GenerationServiceStub(channel)
        events = [event async for event in stub.Generate(wanted, timeout=20)]
    num_tokens: int = events[-1].finished.usage.output_tokens
    return num_tokens


async def test_an_agent_serves_every_controller_of_a_name_and_follows_it(
    two_controllers: list[ControllerServer], tmp_path: Path
) -> None:
    hosts = tmp_path / "hosts"
    write_hosts(hosts, "127.0.0.1", "127.0.0.2")
    port = two_controllers[0].port
    agent = await asyncio.create_subprocess_exec(
        *private_hosts(hosts), sys.executable, *AGENT, *FLAGS, "--controllers", f"dns:{NAME}:{port}",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        await until(lambda: all(map(serves, two_controllers)), "one of the two controllers was not found by the name")
        for controller, host in zip(two_controllers, ("127.0.0.1", "127.0.0.2"), strict=True):
            assert await run_by(controller, host) == 5
        # The second controller is replaced by one at another address: the name is looked up again and again.
        await two_controllers.pop().stop()
        two_controllers.append(await start("127.0.0.3", port))
        write_hosts(hosts, "127.0.0.1", "127.0.0.3")
        await until(lambda: all(map(serves, two_controllers)), "a new address of the name was not taken up")
        assert await run_by(two_controllers[1], "127.0.0.3") == 5
    finally:
        agent.terminate()
        assert await asyncio.wait_for(agent.wait(), 30) == 0


async def test_a_name_that_does_not_exist_is_said_once_and_tried_again(tmp_path: Path) -> None:
    controller = await start("127.0.0.1")
    hosts = tmp_path / "hosts"
    write_hosts(hosts)
    agent = await asyncio.create_subprocess_exec(
        *private_hosts(hosts), sys.executable, *AGENT, *FLAGS, "--controllers", f"dns:{NAME}:{controller.port}",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        assert agent.stdout is not None and agent.stderr is not None
        while json.loads(await asyncio.wait_for(agent.stdout.readline(), 30))["event"] != "ready":
            pass
        await asyncio.sleep(2.5)  # two look-ups fail
        write_hosts(hosts, "127.0.0.1")
        await until(lambda: serves(controller), "the name was not tried again")
    finally:
        agent.terminate()
        log = (await agent.communicate())[1].decode()
        await controller.stop()
    assert log.count("the name cannot be looked up") == 1 and NAME in log
