"""PolicyService over the wire."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from google.protobuf import duration_pb2

from dragoman.errors import from_rpc_error
from dragoman.v1 import error_pb2
from dragoman.v1 import policy_service_pb2 as pb


async def current(clients: Any) -> pb.Policy:
    return (await clients.policy.GetPolicy(pb.GetPolicyRequest(), timeout=5)).policy


async def test_an_update_is_in_force_at_once_and_watchers_see_it(clients: Any, server: Any) -> None:
    policy = await current(clients)
    watch = clients.policy.WatchPolicy(pb.WatchPolicyRequest())
    assert (await asyncio.wait_for(watch.read(), 5)).policy == policy
    policy.max_queued_requests = 17
    policy.tenants.add(tenant="x", share=3, max_running_requests=2)
    policy.targets.add(priority_class="batch", time_to_first_token=duration_pb2.Duration(seconds=9))
    updated = (await clients.policy.UpdatePolicy(pb.UpdatePolicyRequest(policy=policy), timeout=5)).policy
    assert updated.revision == policy.revision + 1 and updated.max_queued_requests == 17
    assert (await asyncio.wait_for(watch.read(), 5)).policy == updated == await current(clients)
    in_force = server.cell.policy.current
    assert in_force.tenant("x").share == 3 and in_force.targets["batch"].time_to_first_token_seconds == 9
    watch.cancel()


async def test_an_update_of_an_old_revision_changes_nothing(clients: Any) -> None:
    policy = await current(clients)
    await clients.policy.UpdatePolicy(pb.UpdatePolicyRequest(policy=policy), timeout=5)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await clients.policy.UpdatePolicy(pb.UpdatePolicyRequest(policy=policy), timeout=5)
    error = from_rpc_error(raised.value)
    assert error.reason == error_pb2.ERROR_REASON_POLICY_CONFLICT and error.retryable
    assert (await current(clients)).revision == policy.revision + 1


@pytest.mark.parametrize(
    ("change", "param"),
    [
        (lambda policy: policy.targets.add(priority_class="vip"), "policy.targets"),
        (lambda policy: policy.tenants.add(tenant=""), "policy.tenants"),
        (lambda policy: [policy.tenants.add(tenant="x"), policy.tenants.add(tenant="x")], "policy.tenants"),
        (lambda policy: policy.max_queue_wait.FromSeconds(-1), "policy.max_queue_wait"),
    ],
)
async def test_a_bad_policy_is_refused_by_field(clients: Any, change: Any, param: str) -> None:
    policy = await current(clients)
    change(policy)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await clients.policy.UpdatePolicy(pb.UpdatePolicyRequest(policy=policy), timeout=5)
    assert from_rpc_error(raised.value).metadata["param"] == param
