"""AgentRegistryService over the wire."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from tests.controller.held import held_by

from dragoman.errors import DragomanError, from_rpc_error
from dragoman.v1 import agent_pb2, agent_registry_service_pb2, error_pb2, fleet_service_pb2, policy_service_pb2
from dragoman_controller.tickets import CellKey


async def wait_for(condition: Any, seconds: float = 5.0) -> None:
    for _ in range(int(seconds * 100)):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the condition did not come true in time")


async def failure(call: Any) -> DragomanError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return from_rpc_error(raised.value)


async def test_a_beating_agent_is_listed_as_it_registered(clients: Any, join: Any) -> None:
    agent = await join("agent-a")
    agent.load = agent_pb2.AgentLoad(running_requests=3, free_kv_blocks=9)
    await asyncio.sleep(0.15)
    listed = (await clients.fleet.ListAgents(fleet_service_pb2.ListAgentsRequest(), timeout=5)).members
    assert [member.agent for member in listed] == [agent.message]
    member = listed[0]
    assert (member.epoch, member.state) == (agent.epoch, agent_pb2.AGENT_STATE_SERVING)
    assert (member.load.running_requests, member.load.free_kv_blocks) == (3, 9)
    assert 0 <= member.heartbeat_age.ToTimedelta().total_seconds() < 1
    assert agent.registration.heartbeat_interval.ToTimedelta().total_seconds() == pytest.approx(0.2)
    assert len(agent.registration.ticket_key) == 32 and agent.policy_revision == 1


async def test_a_second_live_agent_with_the_id_is_refused_and_the_first_unharmed(
    clients: Any, join: Any, server: Any
) -> None:
    first = await join("agent-a")
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await join("agent-a")
    error = from_rpc_error(raised.value)
    assert (error.reason, error.grpc_code) == (error_pb2.ERROR_REASON_DUPLICATE_AGENT, grpc.StatusCode.ALREADY_EXISTS)
    beats = first.num_answers
    await wait_for(lambda: first.num_answers > beats)
    assert server.cell.fleet.get("agent-a").epoch == first.epoch


async def test_a_killed_agent_may_come_back_at_once_and_its_earlier_life_is_refused(
    clients: Any, join: Any, server: Any
) -> None:
    first = await join("agent-a")
    await first.vanish()
    await wait_for(lambda: not server.cell.fleet.get("agent-a").connected)
    second = await join("agent-a")
    assert second.registration.lease_id != first.registration.lease_id
    assert second.registration.ticket_key != first.registration.ticket_key
    error = await failure(first.register())
    assert error.reason == error_pb2.ERROR_REASON_EPOCH_STALE


async def test_a_reconnect_of_the_same_life_keeps_lease_and_key(clients: Any, join: Any, server: Any) -> None:
    agent = await join("agent-a")
    before = agent.registration
    await agent.vanish()
    await agent.join()
    assert (agent.registration.lease_id, agent.registration.ticket_key) == (before.lease_id, before.ticket_key)
    await wait_for(lambda: server.cell.fleet.get("agent-a").state.label == "serving")


async def test_a_beat_without_a_lease_must_register_again(clients: Any) -> None:
    call = clients.registry.Heartbeat(iter([agent_registry_service_pb2.HeartbeatRequest(lease_id="none", epoch=1)]))
    error = await failure(call.read())
    assert (error.reason, error.retryable) == (error_pb2.ERROR_REASON_LEASE_EXPIRED, True)


async def test_a_beat_of_another_epoch_is_stale(clients: Any, join: Any) -> None:
    agent = await join()
    beat = agent_registry_service_pb2.HeartbeatRequest(lease_id=agent.registration.lease_id, epoch=agent.epoch + 1)
    assert (await failure(clients.registry.Heartbeat(iter([beat])).read())).reason == error_pb2.ERROR_REASON_EPOCH_STALE


@pytest.mark.parametrize("change", ["step_model", "agent_id", "models"])
async def test_an_agent_that_cannot_be_used_is_told_why(clients: Any, join: Any, change: str) -> None:
    good = (await join("agent-a")).message
    message = agent_pb2.Agent.FromString(good.SerializeToString())
    message.agent_id = "agent-b"
    if change == "step_model":
        message.models[0].step_model.decode_seconds.pop()
    elif change == "agent_id":
        message.agent_id = "b" * 64
    else:
        del message.models[:]
    error = await failure(
        clients.registry.RegisterAgent(
            agent_registry_service_pb2.RegisterAgentRequest(agent=message, epoch=5), timeout=5
        )
    )
    assert error.reason == error_pb2.ERROR_REASON_INVALID_REQUEST
    assert change in error.metadata["param"]


async def test_deregistering_ends_the_membership_at_once(clients: Any, join: Any, server: Any) -> None:
    agent = await join("agent-a")
    request = agent_registry_service_pb2.DeregisterAgentRequest(lease_id=agent.registration.lease_id)
    for _ in range(2):
        await clients.registry.DeregisterAgent(request, timeout=5)
    assert server.cell.fleet.get("agent-a") is None


async def test_a_gap_in_kv_events_asks_for_a_snapshot_and_heals(clients: Any, join: Any, server: Any) -> None:
    agent = await join("agent-a")
    call = clients.registry.PublishKvEvents()

    async def publish(sequence: int, stored: list[int], snapshot: bool = False) -> None:
        await call.write(
            agent_registry_service_pb2.PublishKvEventsRequest(
                lease_id=agent.registration.lease_id,
                epoch=agent.epoch,
                sequence=sequence,
                stored_block_hashes=stored,
                snapshot=snapshot,
            )
        )

    await publish(1, [11, 22], snapshot=True)
    await publish(3, [44])
    wish = await asyncio.wait_for(call.read(), 5)
    assert wish.snapshot_wanted and wish.acknowledged_sequence == 1
    await publish(4, [11, 33, 44], snapshot=True)
    await wait_for(lambda: held_by(server.cell.index, "agent-a") == {11, 33, 44})
    call.cancel()


async def test_a_key_rotation_reaches_the_agent_and_is_used_once_confirmed(
    clients: Any, join: Any, server: Any
) -> None:
    agent = await join("agent-a")
    old = server.cell.minter.key_ids[0]
    server.cell.rotate_keys((CellKey(20_000, b"n" * 32), *server.cell.minter._keys))
    await wait_for(lambda: agent.commands)
    command = agent.commands[0]
    assert [key.key_id for key in command.rotate_keys.keys] == [20_000, old]
    assert server.cell.fleet.get("agent-a").confirmed_key_ids == (old,)
    agent.results.append(agent_registry_service_pb2.CommandResult(command_id=command.command_id))
    await wait_for(lambda: server.cell.fleet.get("agent-a").confirmed_key_ids == (20_000, old))


async def test_an_unanswered_command_is_sent_again_on_a_new_stream(clients: Any, join: Any, server: Any) -> None:
    agent = await join("agent-a")
    server.cell.rotate_keys(server.cell.minter._keys)
    await wait_for(lambda: agent.commands)
    await asyncio.sleep(0.2)
    assert len(agent.commands) == 1
    await agent.vanish()
    await agent.join()
    await wait_for(lambda: len(agent.commands) == 2)
    assert agent.commands[0] == agent.commands[1]


async def test_beats_carry_the_policy_revision(clients: Any, join: Any) -> None:
    agent = await join("agent-a")
    policy = (await clients.policy.GetPolicy(policy_service_pb2.GetPolicyRequest(), timeout=5)).policy
    await clients.policy.UpdatePolicy(policy_service_pb2.UpdatePolicyRequest(policy=policy), timeout=5)
    await wait_for(lambda: agent.policy_revision == 2)
