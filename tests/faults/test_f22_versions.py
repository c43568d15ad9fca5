"""F22: peers of another version, both ways: fields that are missing and fields that nobody knows, on every connection of a cell."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import grpc
import pytest
from benchmarks.cell import Cell
from tests.faults import skew_relay
from tests.faults.checks import check_streams
from tests.faults.conftest import FULL, Figures
from tests.faults.drive import disturb, figures_of

from dragoman import AsyncClient, DragomanError
from dragoman.v1 import agent_registry_service_pb2, fleet_service_pb2, fleet_service_pb2_grpc

ROOT = Path(__file__).parents[2]
NUM_STREAMS = 32 if FULL else 6
NUM_TOKENS = 300 if FULL else 100
SPEED = ("--null-speed", "10")
PROMPTS = [f"stream {index}" for index in range(NUM_STREAMS)]


class RelayProcess:
    """A relay of calls to one address."""

    def __init__(self, target: str, version: str) -> None:
        command = [sys.executable, "-m", "tests.faults.skew_relay", "--target", target, "--version", version]
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}
        )
        assert self._process.stdout is not None
        self.address = str(json.loads(self._process.stdout.readline())["address"])

    def close(self) -> int:
        """End it; how many messages it has changed."""
        self._process.terminate()
        output, _ = self._process.communicate(timeout=20)
        return int(json.loads(output)["num_changed"])


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@contextmanager
def skewed_cell(version: str, num_changed: list[int]) -> Iterator[Cell]:
    """A cell in which every call passes a relay; how many messages each has changed is added to the list at the end."""
    cell = Cell()
    relays = [RelayProcess(cell.controller_address, version)]
    try:
        cell.controller.close()
        cell.start_controller("--advertise", relays[0].address)  # so that agents do not find a way past the relay
        cell.controller_address = relays[0].address
        for index in range(2):
            port = free_port()
            relays.append(RelayProcess(f"127.0.0.1:{port}", version))
            flags = (*SPEED, "--port", str(port), "--advertise", relays[-1].address)
            cell.start_agent(f"agent-{index}", *flags, wait=False)
        for agent_id in list(cell.agents):
            cell.wait_agent(agent_id)
        cell.start_gateway()
        yield cell
    finally:
        cell.close()
        num_changed.extend(relay.close() for relay in relays)


async def kill(cell: Cell, agent_id: str) -> None:
    cell.agents[agent_id].kill_family()


@pytest.mark.parametrize("version", ["older", "newer"] if FULL else ["older"])
async def test_f22_every_peer_speaks_another_version(version: str, figures: Figures, num_runs: int) -> None:
    """Streams, and their resumes when an agent dies, go on as among equals."""
    for _ in range(num_runs):
        num_changed: list[int] = []
        with skewed_cell(version, num_changed) as cell:
            run = await disturb(cell, "both", PROMPTS, NUM_TOKENS, partial(kill, cell))
            cell.remove_agent(run.agent_id)
            cell.quiesce()
        assert num_changed[0] > 0, "nothing passed the relay"
        assert version == "older" or all(num_changed), "a relay saw no stream"
        figures.add("F22", f"{version}-{NUM_STREAMS}", **figures_of(run))
        check_streams(run.streams, run.expected)
        assert run.num_resumed >= len(run.victims) > 0


async def test_f22_a_peer_that_speaks_none_of_it_is_refused_in_plain_words() -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with AsyncClient(f"127.0.0.1:{port}") as client:
            with pytest.raises(DragomanError) as raised:
                await client.complete("hello", max_output_tokens=2)
        assert raised.value.reason_name == "unimplemented" and "another version" in raised.value.message
    finally:
        await server.stop(None)


def test_the_first_version_is_described_by_what_came_since() -> None:
    """Each field that is named still exists; a message without them is what the first version knew."""
    for name, fields in skew_relay.ADDED.items():
        kind = skew_relay.descriptor_pool.Default().FindMessageTypeByName(f"{skew_relay.PACKAGE}{name}")  # type: ignore[no-untyped-call]
        assert set(fields) <= set(kind.fields_by_name), name
    for method in skew_relay.ADDED_METHODS:
        assert all(skew_relay.types_of(f"/{skew_relay.PACKAGE}{method}"))


def test_what_a_version_changes() -> None:
    response = agent_registry_service_pb2.RegisterAgentResponse(lease_id=b"x", controller_id="c")
    assert skew_relay.older(response) and response == agent_registry_service_pb2.RegisterAgentResponse(lease_id=b"x")
    assert not skew_relay.older(response)
    known = response.SerializeToString()
    assert skew_relay.newer(response) and response.SerializeToString() == known + skew_relay.UNKNOWN_FIELDS


async def test_f22_a_method_that_is_not_there_yet_is_unimplemented() -> None:
    cell = Cell()
    relay = RelayProcess(cell.controller_address, "older")
    try:
        async with grpc.aio.insecure_channel(relay.address) as channel:
            stub = fleet_service_pb2_grpc.FleetServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await stub.ListControllers(fleet_service_pb2.ListControllersRequest(), timeout=10)
            assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED
            assert len((await stub.ListAgents(fleet_service_pb2.ListAgentsRequest(), timeout=10)).members) == 0
    finally:
        cell.close()
        relay.close()
