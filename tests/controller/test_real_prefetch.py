"""Two real agents and a controller: a hint carries a prefix over, the next request there starts from it, and the end is counted."""

from __future__ import annotations

import asyncio
import json
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import grpc
import pytest
from tests.controller.held import held_by

from dragoman.channel import channel_options
from dragoman.prefix_hash import prefix_hashes, prompt_digest_of_ids, root_hash, wire_hash
from dragoman.v1 import (
    admission_service_pb2,
    generation_service_pb2,
    generation_service_pb2_grpc,
    prefetch_service_pb2,
)
from dragoman_controller import hints
from dragoman_controller.prefetch import PrefetchPlan, plan_prefetch
from dragoman_controller.server import ControllerServer

PROMPT = [1 + index * 7 % 250 for index in range(64 * 20 + 9)]


@pytest.fixture
async def agents(server: ControllerServer) -> AsyncIterator[dict[str, asyncio.subprocess.Process]]:
    """Two agents that are serving members."""
    started = {}
    for name in ("a", "b"):
        started[name] = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-c", "from dragoman_agent.main import main; main()",
            "--device", "null", "--model", "null", "--port", "0", "--metrics-port", "0", "--announce",
            "--agent-id", name, "--controllers", f"127.0.0.1:{server.port}",
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
    for process in started.values():
        assert process.stdout is not None
        while json.loads(await asyncio.wait_for(process.stdout.readline(), 30))["event"] != "ready":
            pass
    await until(lambda: [member.state.label for member in server.cell.fleet] == ["serving"] * 2)
    yield started
    for process in started.values():
        if process.returncode is None:
            process.kill()
        await process.wait()


async def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        await asyncio.sleep(0.01)


async def run(clients: Any, server: ControllerServer) -> tuple[str, list[int], int]:
    """Runs the prompt wherever it is placed: agent, tokens, cached tokens."""
    request = admission_service_pb2.AcquireTicketRequest(
        request_id=str(uuid.uuid4()), model="null", prompt_tokens=len(PROMPT), max_output_tokens=20,
        prompt_digest=prompt_digest_of_ids(PROMPT), block_hashes=units(server),
    )  # fmt: skip
    ticket = (await clients.admission.AcquireTicket(request, timeout=5)).ticket
    message = generation_service_pb2.GenerateRequest(request_id=request.request_id, ticket_token=ticket.token)
    message.token_ids.ids.extend(PROMPT)
    message.stop.max_output_tokens = 20
    message.sampling.temperature = 0
    async with grpc.aio.insecure_channel(ticket.data_address, options=channel_options()) as channel:
        stub = generation_service_pb2_grpc.GenerationServiceStub(channel)
        events = [event async for event in stub.Generate(message)]
    tokens = [token for event in events for token in event.delta.token_ids]
    return ticket.agent_id, tokens, events[-1].finished.usage.cached_tokens


def units(server: ControllerServer) -> list[int]:
    digest = next(iter(server.cell.fleet)).spec.models[0].digest
    return [wire_hash(unit) for unit in prefix_hashes(root_hash(digest), PROMPT)]


@pytest.fixture
def slow_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    """The null device computes a prefix in less time than a connection takes; a real one would not."""

    def plan(*args: Any, **options: Any) -> PrefetchPlan:
        return replace(plan_prefetch(*args, **options), limit_seconds=5.0)

    monkeypatch.setattr(hints, "plan_prefetch", plan)


async def test_a_hinted_prefix_is_there_when_its_request_comes(
    server: ControllerServer, clients: Any, agents: dict[str, asyncio.subprocess.Process], slow_prefill: None
) -> None:
    first, expected, cached = await run(clients, server)
    other = "b" if first == "a" else "a"
    assert cached == 0
    await until(lambda: len(held_by(server.cell.index, first)) == 20)

    hint = prefetch_service_pb2.HintPrefixRequest(model="null", block_hashes=units(server))
    answer = await clients.prefetch.HintPrefix(hint, timeout=5)
    assert answer.accepted, answer.reason
    await until(lambda: len(held_by(server.cell.index, other)) == 20)
    again = await clients.prefetch.HintPrefix(hint, timeout=5)
    assert not again.accepted and "holds the whole prefix already" in again.reason
    await until(lambda: next(m for m in server.cell.fleet if m.agent_id == other).load.kv_fetch_bytes_per_second > 0)

    agents[first].kill()
    await until(lambda: any(member.state.label == "suspect" for member in server.cell.fleet))
    second, tokens, cached = await run(clients, server)
    assert (second, tokens, cached) == (other, expected, 64 * 20)
    await until(lambda: count(server, "used") == 1)
    assert count(server, "refused") == count(server, "late") == count(server, "clipped") == 0


async def test_a_fetch_that_takes_longer_than_computing_is_given_up(
    server: ControllerServer,
    clients: Any,
    agents: dict[str, asyncio.subprocess.Process],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hints, "plan_prefetch", lambda *a, **o: replace(plan_prefetch(*a, **o), limit_seconds=1e-6))
    first, _, _ = await run(clients, server)
    await until(lambda: len(held_by(server.cell.index, first)) == 20)
    hint = prefetch_service_pb2.HintPrefixRequest(model="null", block_hashes=units(server))
    assert (await clients.prefetch.HintPrefix(hint, timeout=5)).accepted
    await until(lambda: count(server, "refused") == 1)


async def test_a_source_that_dies_is_a_refusal_and_hurts_nobody(
    server: ControllerServer, clients: Any, agents: dict[str, asyncio.subprocess.Process], slow_prefill: None
) -> None:
    first, expected, _ = await run(clients, server)
    await until(lambda: len(held_by(server.cell.index, first)) == 20)
    agents[first].kill()
    await agents[first].wait()
    member = server.cell.member(first)
    member.state, member.connected = type(member.state).SERVING, True  # the controller has not noticed yet
    answer = await clients.prefetch.HintPrefix(
        prefetch_service_pb2.HintPrefixRequest(model="null", block_hashes=units(server)), timeout=5
    )
    if answer.accepted:
        await until(lambda: count(server, "refused") == 1)
    await until(lambda: server.cell.member(first).state.label == "suspect")
    assert (await run(clients, server))[1:] == (expected, 0)


def count(server: ControllerServer, outcome: str) -> float:
    return server.metrics.registry.get_sample_value("dragoman_hints_total", {"outcome": outcome}) or 0.0
