"""F17: etcd is lost under load and comes back; streams, new requests and membership go on, and all controllers agree again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import grpc
import pytest
from tests.controller.etcd_server import EtcdServer
from tests.faults.conftest import Figures
from tests.faults.etcd_cluster import EtcdCluster
from tests.gateway.stack import Process, start_agent, start_controller

from dragoman import AsyncClient, DragomanError
from dragoman.channel import channel_options
from dragoman.errors import from_rpc_error
from dragoman.v1 import (
    error_pb2,
    fleet_service_pb2,
    fleet_service_pb2_grpc,
    policy_service_pb2,
    policy_service_pb2_grpc,
)

NUM_STREAMS, NUM_TOKENS = 8, 2500
QUORUM_LOST_SECONDS = 60.0
CLUSTER_TOKENS = 6000  # at 18 ms each


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


async def update_policy(address: str, max_queued: int) -> int:
    """The new revision."""
    async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
        stub = policy_service_pb2_grpc.PolicyServiceStub(channel)
        policy = (await stub.GetPolicy(policy_service_pb2.GetPolicyRequest(), timeout=5)).policy
        policy.max_queued_requests = max_queued
        try:
            answer = await stub.UpdatePolicy(policy_service_pb2.UpdatePolicyRequest(policy=policy), timeout=10)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        return answer.policy.revision


async def max_queued(address: str) -> int:
    async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
        stub = policy_service_pb2_grpc.PolicyServiceStub(channel)
        return (await stub.GetPolicy(policy_service_pb2.GetPolicyRequest(), timeout=5)).policy.max_queued_requests


async def test_f17_without_etcd_everything_goes_on_and_afterwards_all_agree(
    start: Callable[..., tuple[Process, str]], etcd: EtcdServer, figures: Figures
) -> None:
    (_, one), (_, two) = start(), start()
    start(one, "--agent-id", "a", "--null-speed", "2")[0].wait_for("ready")
    async with AsyncClient(f"{one},{two}") as client, AsyncClient(f"{two},{one}") as other:
        streams = [client.generate(f"{i}", max_output_tokens=NUM_TOKENS, ignore_eos=True) for i in range(NUM_STREAMS)]
        running = [asyncio.create_task(stream.result()) for stream in streams]
        await asyncio.sleep(0.3)
        etcd.kill()

        async def is_frozen() -> bool:
            return (await controllers(one)).frozen and (await controllers(two)).frozen

        await until(is_frozen)
        assert not any(task.done() for task in running), "the fault came while streams ran"
        assert len((await controllers(one)).controllers) == 2, "nobody is taken off the list by it"
        for each in (client, other):
            assert (await each.complete("new", max_output_tokens=3)).usage.output_tokens == 3
        with pytest.raises(DragomanError) as raised:
            await update_policy(one, 7)
        assert raised.value.reason == error_pb2.ERROR_REASON_STATE_UNAVAILABLE
        assert await max_queued(one) == await max_queued(two) == 4096

        etcd.start()

        async def is_well() -> bool:
            lists = [await controllers(address) for address in (one, two)]
            return all(not listing.frozen and len(listing.controllers) == 2 for listing in lists)

        await until(is_well)
        assert await update_policy(two, 7) == 2

        async def agree() -> bool:
            return await max_queued(one) == await max_queued(two) == 7

        await until(agree)
        results = await asyncio.gather(*running)
        assert [result.usage.output_tokens for result in results] == [NUM_TOKENS] * NUM_STREAMS
        assert not any(result.num_resumes for result in results)
        figures.add(
            "F17", f"client-{NUM_STREAMS}", in_flight=NUM_STREAMS, lost=0, duplicated=0,
            resumed=sum(result.num_resumes for result in results),
        )  # fmt: skip


@pytest.fixture
def cluster() -> Iterator[EtcdCluster]:
    made = EtcdCluster()
    yield made
    made.close()


async def test_f17_a_leader_is_killed_and_then_the_quorum_is_lost_for_a_minute(
    cluster: EtcdCluster, figures: Figures, num_runs: int
) -> None:
    started: list[Process] = []
    try:
        members = ",".join(cluster.addresses)
        addresses = []
        for _ in range(2):
            controller, address = start_controller("--etcd", members)
            started.append(controller)
            addresses.append(address)
        started.append(start_agent(addresses[0], "--agent-id", "a", "--null-speed", "20"))
        started[-1].wait_for("ready")
        for run in range(num_runs):
            await lose_members(cluster, addresses, 100 * run, figures)
    finally:
        for process in started:
            process.ask_to_stop()
        for process in started:
            process.stop()


async def lose_members(cluster: EtcdCluster, addresses: list[str], base: int, figures: Figures) -> None:
    """`base`: of the values that are written, so that each is new."""
    one, two = addresses

    async def are_frozen() -> bool:
        return all([(await controllers(address)).frozen for address in addresses])

    async def are_well() -> bool:
        return all([not (listing := await controllers(a)).frozen and len(listing.controllers) == 2 for a in addresses])

    async def agree(value: int) -> bool:
        return all([await max_queued(address) == value for address in addresses])

    async def writes(value: int) -> bool:
        try:
            await update_policy(one, value)
        except DragomanError as error:
            assert error.reason == error_pb2.ERROR_REASON_STATE_UNAVAILABLE
            return False
        return True

    async with AsyncClient(f"{one},{two}") as client, AsyncClient(f"{two},{one}") as other:
        streams = [
            client.generate(f"{i}", max_output_tokens=CLUSTER_TOKENS, ignore_eos=True) for i in range(NUM_STREAMS)
        ]
        running = [asyncio.create_task(stream.result()) for stream in streams]
        await asyncio.sleep(0.5)
        first = await asyncio.to_thread(cluster.leader)
        begun = time.monotonic()
        await asyncio.to_thread(cluster.kill, first)
        await until(partial(writes, base + 11))
        led_again = time.monotonic() - begun
        await until(partial(agree, base + 11))
        second = await asyncio.to_thread(cluster.leader)
        assert second != first, "the leader was not killed"

        await asyncio.to_thread(cluster.kill, second)
        await until(are_frozen)
        lost_until = time.monotonic() + QUORUM_LOST_SECONDS
        while time.monotonic() < lost_until:
            for each in (client, other):
                assert (await each.complete("new", max_output_tokens=3)).usage.output_tokens == 3
            await asyncio.sleep(1)
        assert not await writes(base + 12) and await agree(base + 11)
        assert not any(task.done() for task in running), "the streams had ended before"

        for member in (first, second):
            await asyncio.to_thread(cluster.start, member)
        begun = time.monotonic()
        await until(are_well, 40)
        converged = time.monotonic() - begun
        await until(partial(writes, base + 13))
        await until(partial(agree, base + 13))
        results = await asyncio.gather(*running)
    assert [result.usage.output_tokens for result in results] == [CLUSTER_TOKENS] * NUM_STREAMS
    num_resumed = sum(result.num_resumes for result in results)
    figures.add(
        "F17", f"three-members-{NUM_STREAMS}", in_flight=NUM_STREAMS, lost=0, duplicated=0, resumed=num_resumed,
        led_again_seconds=led_again, converged_seconds=converged,
    )  # fmt: skip
    assert num_resumed == 0, "a stream was moved for nothing"
