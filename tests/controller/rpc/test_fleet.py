"""FleetService over the wire."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from google.protobuf import duration_pb2

from dragoman.errors import from_rpc_error
from dragoman.v1 import (
    admission_service_pb2,
    agent_pb2,
    agent_registry_service_pb2,
    error_pb2,
    fleet_service_pb2,
)


async def eventually(condition: Callable[[], bool]) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the condition did not come true in time")


def ask(request_id: str, **fields: Any) -> admission_service_pb2.AcquireTicketRequest:
    return admission_service_pb2.AcquireTicketRequest(
        request_id=request_id,
        model="tiny",
        prompt_tokens=100,
        max_output_tokens=50,
        prompt_digest=hashlib.sha256(b"prompt").digest(),
        **fields,
    )


async def read(call: Any) -> Any:
    return await asyncio.wait_for(call.read(), 5)


async def test_a_watch_shows_everyone_then_each_change(clients: Any, join: Any) -> None:
    call = clients.fleet.WatchFleet(fleet_service_pb2.WatchFleetRequest())
    assert await read(call) == fleet_service_pb2.WatchFleetResponse()
    agent = await join("agent-a")
    states = []
    while not states or states[-1] != agent_pb2.AGENT_STATE_SERVING:
        states += [member.state for member in (await read(call)).changed]
    agent.state = agent_pb2.AGENT_STATE_DRAINING
    assert [member.state for member in (await read(call)).changed] == [agent_pb2.AGENT_STATE_DRAINING]
    await agent.vanish()
    assert [member.state for member in (await read(call)).changed] == [agent_pb2.AGENT_STATE_SUSPECT]
    call.cancel()


async def test_a_watch_tells_who_left(clients: Any, join: Any, server: Any) -> None:
    agent = await join("agent-a")
    call = clients.fleet.WatchFleet(fleet_service_pb2.WatchFleetRequest())
    assert [member.agent.agent_id for member in (await read(call)).changed] == ["agent-a"]
    server.cell.fleet.deregister(agent.registration.lease_id)
    assert list((await read(call)).removed_agent_ids) == ["agent-a"]
    call.cancel()


async def test_a_drain_stops_grants_orders_the_agent_and_reports_until_it_is_empty(clients: Any, join: Any) -> None:
    agent = await join("agent-a")
    agent.load = agent_pb2.AgentLoad(running_requests=1)
    await clients.admission.AcquireTicket(ask("stays"), timeout=5)
    call = clients.fleet.DrainAgent(
        fleet_service_pb2.DrainAgentRequest(agent_id="agent-a", grace_period=duration_pb2.Duration(seconds=7))
    )
    progress = await read(call)
    assert not progress.drained
    assert [stream.request_id for stream in progress.streams] == ["stays"]
    assert 0 < progress.streams[0].predicted_remaining.ToTimedelta().total_seconds() < 5
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await clients.admission.AcquireTicket(ask("new"), timeout=5)
    assert from_rpc_error(raised.value).reason == error_pb2.ERROR_REASON_NO_AGENT
    await agent.hears_a_command()
    assert agent.commands[0].drain.grace_period.seconds == 7
    agent.state, agent.load = agent_pb2.AGENT_STATE_DRAINING, agent_pb2.AgentLoad()
    while not progress.drained:
        progress = await read(call)
    assert await call.read() is grpc.aio.EOF


async def test_an_agent_that_refuses_to_drain_serves_on_and_the_caller_is_told(clients: Any, join: Any) -> None:
    agent = await join("agent-a")
    call = clients.fleet.DrainAgent(fleet_service_pb2.DrainAgentRequest(agent_id="agent-a"))
    await read(call)
    await agent.hears_a_command()
    agent.results.append(
        agent_registry_service_pb2.CommandResult(command_id=agent.commands[0].command_id, code=12, message="too old")
    )
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        while True:
            await read(call)
    assert "too old" in from_rpc_error(raised.value).message
    await clients.admission.AcquireTicket(ask("new"), timeout=5)


async def test_a_drain_is_taken_back_once_the_agent_says_so(clients: Any, join: Any) -> None:
    agent = await join("agent-a")
    drain = clients.fleet.DrainAgent(fleet_service_pb2.DrainAgentRequest(agent_id="agent-a"))
    await read(drain)
    await agent.hears_a_command()
    agent.state, agent.load = agent_pb2.AGENT_STATE_DRAINING, agent_pb2.AgentLoad(running_requests=1)
    undrain = clients.fleet.UndrainAgent(fleet_service_pb2.UndrainAgentRequest(agent_id="agent-a"), timeout=5)
    await eventually(lambda: any(command.HasField("undrain") for command in agent.commands))
    agent.state = agent_pb2.AGENT_STATE_SERVING
    agent.results.append(agent_registry_service_pb2.CommandResult(command_id=agent.commands[-1].command_id))
    await undrain
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        while True:
            await read(drain)
    assert "was taken back" in from_rpc_error(raised.value).message
    await clients.admission.AcquireTicket(ask("new"), timeout=5)


async def test_a_drain_that_cannot_be_taken_back_goes_on(clients: Any, join: Any) -> None:
    agent = await join("agent-a")
    drain = clients.fleet.DrainAgent(fleet_service_pb2.DrainAgentRequest(agent_id="agent-a"))
    await read(drain)
    undrain = clients.fleet.UndrainAgent(fleet_service_pb2.UndrainAgentRequest(agent_id="agent-a"), timeout=5)
    await eventually(lambda: any(command.HasField("undrain") for command in agent.commands))
    agent.results.append(
        agent_registry_service_pb2.CommandResult(
            command_id=agent.commands[-1].command_id, code=9, message="it is leaving"
        )
    )
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await undrain
    error = from_rpc_error(raised.value)
    assert "it is leaving" in error.message and error.reason == error_pb2.ERROR_REASON_AGENT_DRAINING
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await clients.admission.AcquireTicket(ask("new"), timeout=5)
    drain.cancel()


async def test_the_drain_of_an_agent_that_is_not_there_names_those_that_are(clients: Any, join: Any) -> None:
    await join("agent-a")
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await clients.fleet.DrainAgent(fleet_service_pb2.DrainAgentRequest(agent_id="agent-z")).read()
    error = from_rpc_error(raised.value)
    assert error.grpc_code is grpc.StatusCode.INVALID_ARGUMENT and "'agent-a'" in error.message


async def test_a_placement_is_explained_with_every_candidate(clients: Any, join: Any, server: Any) -> None:
    await join("agent-a")
    await join("agent-bb", max_context=64)
    held = [11, 22]
    member = server.cell.fleet.get("agent-a")
    server.cell.apply_kv_events(member, 1, held, (), snapshot=True)
    answer = await clients.admission.AcquireTicket(ask("why", block_hashes=held[:1]), timeout=5)
    assert answer.ticket.expected_cached_tokens == 64
    request = fleet_service_pb2.ExplainPlacementRequest(request_id="why")
    explained = await clients.fleet.ExplainPlacement(request, timeout=5)
    assert explained.chosen_agent_id == "agent-a" and "only agent" in explained.reason
    first, second = explained.candidates
    assert (first.agent_id, first.cached_tokens, first.excluded_because) == ("agent-a", 64, "")
    assert first.prefill_seconds > 0 and first.decode_seconds > 0
    assert second.agent_id == "agent-bb" and "context is 64 tokens" in second.excluded_because
    assert explained.quote == answer.quote


async def test_a_placement_that_is_not_remembered_is_an_error(clients: Any) -> None:
    request = fleet_service_pb2.ExplainPlacementRequest(request_id="never")
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await clients.fleet.ExplainPlacement(request, timeout=5)
    assert from_rpc_error(raised.value).metadata["param"] == "request_id"


async def test_an_explanation_says_what_fetching_the_prefix_would_take_instead(
    clients: Any, join: Any, server: Any
) -> None:
    holder, other = await join("holder"), await join("other")
    for agent in (holder, other):
        model = agent.message.models[0]
        model.kv_type, model.kv_layout, model.kv_bytes_per_token = "bfloat16", "a", 1000
        await agent.register()
        agent.load = agent_pb2.AgentLoad(kv_fetch_bytes_per_second=1e6, kv_fetch_base_seconds=0.5)
    await eventually(lambda: all(m.load.kv_fetch_base_seconds and m.spec.models[0].kv for m in server.cell.fleet))
    held = [11]
    server.cell.apply_kv_events(server.cell.member("holder"), 1, held, (), True)
    await clients.admission.AcquireTicket(ask("why", block_hashes=held), timeout=5)
    explained = await clients.fleet.ExplainPlacement(fleet_service_pb2.ExplainPlacementRequest(request_id="why"))
    fetch = {one.agent_id: one.fetch_seconds for one in explained.candidates if one.HasField("fetch_seconds")}
    assert fetch == {"other": pytest.approx(0.5 + 64 * 1000 / 1e6)}
    assert (explained.model, explained.prompt_tokens) == ("tiny", 100)
