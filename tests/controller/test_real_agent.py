"""The controller with the real agent on the null device: ticket, run, outcome, prefix, death."""

from __future__ import annotations

import asyncio
import json
import sys
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from dragoman.channel import channel_options
from dragoman.errors import from_rpc_error
from dragoman.prefix_hash import prefix_hashes, prompt_digest_of_ids, root_hash, wire_hash
from dragoman.v1 import admission_service_pb2, error_pb2, generation_service_pb2, generation_service_pb2_grpc
from dragoman_controller.server import ControllerServer

PROMPT = list(range(1, 200))


@pytest.fixture
async def agent(server: ControllerServer) -> AsyncIterator[asyncio.subprocess.Process]:
    """A real agent that is a serving member."""
    flags = ["--device", "null", "--model", "null", "--port", "0", "--metrics-port", "0", "--announce"]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        "-c",
        "from dragoman_agent.main import main; main()",
        *flags,
        "--controllers",
        f"127.0.0.1:{server.port}",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert process.stdout is not None
    while True:
        line = await asyncio.wait_for(process.stdout.readline(), 30)
        assert line, "the agent ended before it was ready"
        if json.loads(line)["event"] == "ready":
            break
    await until(lambda: any(member.state.label == "serving" for member in server.cell.fleet))
    yield process
    if process.returncode is None:
        process.terminate()
    await asyncio.wait_for(process.wait(), 20)


async def until(condition: Any, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        await asyncio.sleep(0.005)


def ask(server: ControllerServer) -> admission_service_pb2.AcquireTicketRequest:
    (member,) = server.cell.fleet
    model = member.spec.models[0]
    hashes = [wire_hash(full) for full in prefix_hashes(root_hash(model.digest), PROMPT)]
    return admission_service_pb2.AcquireTicketRequest(
        request_id=str(uuid.uuid4()),
        model=model.name,
        prompt_tokens=len(PROMPT),
        max_output_tokens=20,
        prompt_digest=prompt_digest_of_ids(PROMPT),
        block_hashes=hashes,
    )


async def generate(
    answer: admission_service_pb2.AcquireTicketResponse, model: str, num_choices: int | None = None
) -> list[Any]:
    request = generation_service_pb2.GenerateRequest(
        request_id=str(uuid.uuid4()), ticket_token=answer.ticket.token, model=model
    )
    request.token_ids.ids.extend(PROMPT)
    request.stop.max_output_tokens = 20
    if num_choices is not None:
        request.sampling.num_choices = num_choices
    async with grpc.aio.insecure_channel(answer.ticket.data_address, options=channel_options()) as channel:
        return [event async for event in generation_service_pb2_grpc.GenerationServiceStub(channel).Generate(request)]


async def test_a_ticket_runs_once_its_outcome_teaches_and_its_prefix_is_known(
    server: ControllerServer, clients: Any, agent: asyncio.subprocess.Process
) -> None:
    request = ask(server)
    answer = await clients.admission.AcquireTicket(request, timeout=5)
    assert answer.ticket.expected_cached_tokens == 0 and len(server.cell.ledger) == 1
    events = await generate(answer, request.model)
    assert events[-1].WhichOneof("event") == "finished"
    await until(lambda: len(server.cell.ledger) == 0)
    judged = server.metrics.registry.get_sample_value("dragoman_quote_error_ratio_count", {"quantity": "finish"})
    assert judged == 1
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await generate(answer, request.model)
    assert from_rpc_error(raised.value).reason == error_pb2.ERROR_REASON_TICKET_REPLAYED
    await until(lambda: len(server.cell.index) == len(PROMPT) // 64)
    again = await clients.admission.AcquireTicket(ask(server), timeout=5)
    assert again.ticket.expected_cached_tokens == len(PROMPT) // 64 * 64


async def test_a_ticket_runs_the_choices_it_was_granted_for_and_no_more(
    server: ControllerServer, clients: Any, agent: asyncio.subprocess.Process
) -> None:
    for asked, too_many in ((1, 2), (1, 9), (3, 4)):
        request = ask(server)
        request.num_choices = asked
        answer = await clients.admission.AcquireTicket(request, timeout=5)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await generate(answer, request.model, too_many)
        refused = from_rpc_error(raised.value)
        assert (refused.reason, refused.metadata["claim"]) == (error_pb2.ERROR_REASON_TICKET_MISMATCH, "max_choices")
        events = await generate(answer, request.model, asked)
        assert events[-1].finished.usage.output_tokens == 20 * asked
        await until(lambda: len(server.cell.ledger) == 0)


async def test_a_killed_agent_is_noticed_within_a_second(
    server: ControllerServer, clients: Any, agent: asyncio.subprocess.Process
) -> None:
    request = ask(server)
    agent.kill()
    await until(lambda: all(member.state.label == "suspect" for member in server.cell.fleet), seconds=1.0)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await clients.admission.AcquireTicket(request, timeout=5)
    assert from_rpc_error(raised.value).reason == error_pb2.ERROR_REASON_NO_AGENT
