"""Several controllers on one store, in memory and in a real etcd: one policy, one set of keys, one list; a lost store freezes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.controller.etcd_server import EtcdServer

from dragoman.channel import channel_options
from dragoman.errors import DragomanError, from_rpc_error
from dragoman.v1 import error_pb2, fleet_service_pb2, policy_service_pb2
from dragoman_controller.config import ControllerSettings
from dragoman_controller.policy import Policy, TenantPolicy
from dragoman_controller.policy_codec import parse_policy, write_policy
from dragoman_controller.server import ControllerServer

Start = Callable[..., Awaitable[ControllerServer]]


@pytest.fixture
def etcd() -> Iterator[EtcdServer]:
    server = EtcdServer()
    server.start()
    yield server
    server.close()


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Starts controllers of one cell."""
    started: list[ControllerServer] = []

    async def start_one(etcd: EtcdServer | None = None, **settings: Any) -> ControllerServer:
        endpoints = (etcd.address,) if etcd is not None else ()
        server = ControllerServer(ControllerSettings(port=0, metrics_port=0, etcd=endpoints, **settings))
        started.append(server)
        await server.start()
        return server

    yield start_one
    for server in started:
        await server.stop()


async def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    for _ in range(round(seconds * 100)):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the condition did not come true in time")


def addresses(server: ControllerServer) -> set[str]:
    return {one.address for one in server.cell.controllers}


async def test_controllers_of_a_cell_share_keys_policy_and_their_list(etcd: EtcdServer, start: Start) -> None:
    one, two, other = await start(etcd), await start(etcd), await start(etcd, cell="elsewhere")
    both = {f"127.0.0.1:{server.port}" for server in (one, two)}
    await until(lambda: addresses(one) == addresses(two) == both)
    assert addresses(other) == {f"127.0.0.1:{other.port}"}
    assert one.cell.minter.keys == two.cell.minter.keys != other.cell.minter.keys

    await one.shared.update_policy(Policy(max_queued_requests=5, tenants={"x": TenantPolicy(share=3)}))
    await until(lambda: two.cell.policy.current.revision == 2)
    assert two.cell.policy.current == one.cell.policy.current and two.cell.policy.current.tenant("x").share == 3
    assert other.cell.policy.current.revision == 1
    third = await start(etcd)
    assert third.cell.policy.current == one.cell.policy.current, "a later controller begins with the policy in force"

    await two.stop()
    await until(lambda: f"127.0.0.1:{two.port}" not in addresses(one), 3.0)


async def test_of_two_updates_at_once_one_is_refused(etcd: EtcdServer, start: Start) -> None:
    one, two = await start(etcd), await start(etcd)
    done = await asyncio.gather(
        one.shared.update_policy(Policy(max_queued_requests=5)),
        two.shared.update_policy(Policy(max_queued_requests=6)),
        return_exceptions=True,
    )
    (refused,) = [result for result in done if isinstance(result, DragomanError)]
    assert refused.reason == error_pb2.ERROR_REASON_POLICY_CONFLICT
    await until(lambda: one.cell.policy.current == two.cell.policy.current)
    assert one.cell.policy.current.revision == 2


async def test_a_key_file_of_one_rotates_the_keys_of_all(etcd: EtcdServer, start: Start, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("7 " + "ab" * 32 + "\n")
    one, two = await start(etcd, cell_key_file=path), await start(etcd)
    assert two.cell.minter.key_ids == (7,)
    path.write_text("8 " + "cd" * 32 + "\n7 " + "ab" * 32 + "\n")
    one.reload()
    await until(lambda: one.cell.minter.key_ids == two.cell.minter.key_ids == (8, 7))
    path.write_text("9 " + "ef" * 32 + "\n8 " + "cd" * 32 + "\n")
    three = await start(etcd, cell_key_file=path)
    await until(lambda: all(server.cell.minter.key_ids == (9, 8) for server in (one, two, three)))


async def test_a_lost_etcd_freezes_and_stops_nothing(
    etcd: EtcdServer, start: Start, agent_messages: Callable[..., Any]
) -> None:
    one, two = await start(etcd), await start(etcd)
    await until(lambda: len(addresses(one)) == 2)
    etcd.kill()
    await until(lambda: one.shared.is_frozen and two.shared.is_frozen)
    await asyncio.sleep(0.3)
    assert len(addresses(one)) == 2, "losing the store is no news about the other controller"
    with pytest.raises(DragomanError) as raised:
        await one.shared.update_policy(Policy(max_queued_requests=5))
    assert raised.value.reason == error_pb2.ERROR_REASON_STATE_UNAVAILABLE and etcd.address in raised.value.message
    assert one.cell.policy.current.revision == 1
    late = await start(etcd)
    assert late.shared.is_frozen and late.cell.minter.key_ids != one.cell.minter.key_ids
    async with grpc.aio.insecure_channel(f"127.0.0.1:{late.port}", options=channel_options()) as channel:
        stub = _fleet(channel)
        answer = await stub.ListControllers(fleet_service_pb2.ListControllersRequest(), timeout=5)
        assert answer.frozen and [c.address for c in answer.controllers] == [f"127.0.0.1:{late.port}"]

    etcd.start()
    await until(lambda: all(len(addresses(server)) == 3 for server in (one, two, late)))
    await until(lambda: not any(server.shared.is_frozen for server in (one, two, late)))
    assert late.cell.minter.keys == one.cell.minter.keys
    await late.shared.update_policy(Policy(max_queued_requests=9))
    await until(lambda: one.cell.policy.current.max_queued_requests == 9)


async def test_garbage_in_the_store_changes_nothing(etcd: EtcdServer, start: Start) -> None:
    one = await start(etcd)
    keys = one.cell.minter.keys
    store = one.shared._store
    for key, value in (("policy", b"{nonsense"), ("policy", b'{"maxQueueWait": "-3s"}'), ("keys", b"7 secret-not-hex")):
        await store.write(f"dragoman/default/{key}", value)
    await asyncio.sleep(0.3)
    assert one.cell.policy.current == Policy() and one.cell.minter.keys == keys and not one.shared.is_frozen


async def test_the_policy_file_is_followed_and_a_bad_one_leaves_the_old_in_force(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "policy.toml"
    path.write_text("max_queued_requests = 10\n")
    server = await start(policy_file=path)
    assert server.cell.policy.current.max_queued_requests == 10
    path.write_text("max_queued_requests = 11\n")
    await until(lambda: server.cell.policy.current.max_queued_requests == 11, 3.0)
    assert server.cell.policy.current.revision == 2
    path.write_text("[tenants.x]\nshares = 11\n")
    await until(lambda: "unknown key tenants.x.shares" in caplog.text, 3.0)
    assert server.cell.policy.current.max_queued_requests == 11 and server.cell.policy.current.revision == 2
    path.write_text("[tenants.x]\nshare = 11\n")
    server.reload()
    await until(lambda: server.cell.policy.current.tenant("x").share == 11, 3.0)
    path.unlink()
    await asyncio.sleep(0.6)
    assert server.cell.policy.current.revision == 3


async def test_a_watch_sees_what_another_controller_was_told(etcd: EtcdServer, start: Start) -> None:
    from dragoman.v1 import policy_service_pb2_grpc

    one, two = await start(etcd), await start(etcd)
    async with (
        grpc.aio.insecure_channel(f"127.0.0.1:{one.port}") as first,
        grpc.aio.insecure_channel(f"127.0.0.1:{two.port}") as second,
    ):
        watch = policy_service_pb2_grpc.PolicyServiceStub(first).WatchPolicy(policy_service_pb2.WatchPolicyRequest())
        policy = (await asyncio.wait_for(watch.read(), 5)).policy
        policy.max_queued_requests = 17
        update = policy_service_pb2.UpdatePolicyRequest(policy=policy)
        stub = policy_service_pb2_grpc.PolicyServiceStub(second)
        await stub.UpdatePolicy(update, timeout=5)
        seen = (await asyncio.wait_for(watch.read(), 5)).policy
        assert (seen.revision, seen.max_queued_requests) == (policy.revision + 1, 17)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.UpdatePolicy(update, timeout=5)
        assert from_rpc_error(raised.value).reason == error_pb2.ERROR_REASON_POLICY_CONFLICT
        watch.cancel()


def test_a_policy_survives_being_written() -> None:
    policy = Policy(
        revision=9, max_queued_requests=7, max_queue_wait_seconds=1.25, tenants={"x": TenantPolicy(1, 2, 3)}
    )
    assert parse_policy(write_policy(policy)) == policy


def _fleet(channel: grpc.aio.Channel) -> Any:
    from dragoman.v1 import fleet_service_pb2_grpc

    return fleet_service_pb2_grpc.FleetServiceStub(channel)
