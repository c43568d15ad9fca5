"""The list of controllers in etcd, with real processes: an agent that knows one controller finds the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from tests.controller.etcd_server import EtcdServer
from tests.gateway.stack import Process, start_agent, start_controller

from dragoman import AsyncClient
from dragoman.channel import channel_options
from dragoman.v1 import (
    fleet_service_pb2,
    fleet_service_pb2_grpc,
)


@pytest.fixture
def etcd() -> Iterator[EtcdServer]:
    server = EtcdServer()
    server.start()
    yield server
    server.close()


@pytest.fixture
def start(etcd: EtcdServer) -> Iterator[Callable[..., tuple[Process, str]]]:
    """Starts controllers of one cell, and agents that end with the test."""
    started: list[Process] = []

    def begin(controller: str = "", *arguments: str) -> tuple[Process, str]:
        if controller:
            process, address = start_agent(controller, *arguments), ""
        else:
            process, address = start_controller("--etcd", etcd.address, *arguments)
        started.append(process)
        return process, address

    yield begin
    for process in started:
        process.ask_to_stop()
    for process in started:
        process.stop()


async def members(address: str) -> list[str]:
    async with AsyncClient(address) as client:
        return [member.agent.agent_id for member in await client.agents()]


async def until(condition: Callable[[], Any], seconds: float = 15.0) -> Any:
    """Until the awaited condition is true; what it gave."""
    end = asyncio.get_running_loop().time() + seconds
    while not (result := await condition()):
        assert asyncio.get_running_loop().time() < end, "the condition did not come true in time"
        await asyncio.sleep(0.05)
    return result


async def controllers(address: str) -> fleet_service_pb2.ListControllersResponse:
    async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
        stub = fleet_service_pb2_grpc.FleetServiceStub(channel)
        return await stub.ListControllers(fleet_service_pb2.ListControllersRequest(), timeout=5)


async def test_an_agent_finds_every_controller_of_its_cell(start: Callable[..., tuple[Process, str]]) -> None:
    first, one = start()
    start(one, "--agent-id", "a")[0].wait_for("ready")

    async def is_known_to(address: str) -> bool:
        return await members(address) == ["a"]

    await until(lambda: is_known_to(one))
    _, two = start()
    await until(lambda: is_known_to(two))
    first.child.kill()
    first.child.wait()
    _, three = start()
    await until(lambda: is_known_to(three))
    async with AsyncClient(f"{one},{two}") as client:
        assert (await client.complete("x", max_output_tokens=3)).usage.output_tokens == 3

    async def is_forgotten() -> bool:
        return [c.address for c in (await controllers(two)).controllers if c.address == one] == []

    await until(is_forgotten)
