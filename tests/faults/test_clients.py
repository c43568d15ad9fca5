"""F7, F8 and F21: readers that do not read, cancels by the thousand, and floods of nonsense; the neighbours go on."""

from __future__ import annotations

import asyncio
import json
import socket
import time
import uuid
from collections.abc import Iterator

import grpc
import httpx
import pytest
from benchmarks.cell import Cell, running_cell, wait_until
from benchmarks.streams import Stream
from tests.faults.checks import check_streams, num_duplicated, num_lost, settle, stalls
from tests.faults.conftest import Figures
from tests.faults.drive import readers_of, undisturbed

from dragoman import AsyncClient
from dragoman.channel import channel_options
from dragoman.prefix_hash import prompt_digest_of_text
from dragoman.v1 import admission_service_pb2_grpc, error_pb2, generation_service_pb2_grpc
from dragoman.v1.admission_service_pb2 import AcquireTicketRequest
from dragoman.v1.generation_service_pb2 import AttachRequest, AttachStart, GenerateRequest, StopCriteria

NUM_NEIGHBOURS = 16
NUM_TOKENS = 200
PROMPTS = [f"neighbour {index}" for index in range(NUM_NEIGHBOURS)]
NUM_CANCELS = 1000
NUM_WARM_WAVES = 4  # until the prefix cache is full and the arena touched: memory stands still after that
NUM_INVALID = 2000
UNACKNOWLEDGED = 256
ENDLESS = 20_000


@pytest.fixture(scope="module")
def cell() -> Iterator[Cell]:
    with running_cell(("--null-speed", "5"), ("--null-speed", "5")) as made:
        yield made


async def ticketed(cell: Cell, prompt: str, max_tokens: int) -> tuple[str, GenerateRequest]:
    """The agent's address and a request it accepts."""
    async with grpc.aio.insecure_channel(cell.controller_address, options=channel_options()) as channel:
        asked = AcquireTicketRequest(
            request_id=str(uuid.uuid4()), model="null", prompt_bytes=len(prompt), max_output_tokens=max_tokens,
            prompt_digest=prompt_digest_of_text(prompt),
        )  # fmt: skip
        answer = await admission_service_pb2_grpc.AdmissionServiceStub(channel).AcquireTicket(asked, timeout=10)
    stop = StopCriteria(max_output_tokens=max_tokens, ignore_eos=True)
    request = GenerateRequest(
        request_id=asked.request_id, ticket_token=answer.ticket.token, model="null", text=prompt, stop=stop
    )
    return answer.ticket.data_address, request


def kv_in_use(cell: Cell) -> float:
    return sum(cell.kv_blocks_in_use(agent_id) for agent_id in cell.agents)


async def test_f7_an_attach_without_credit_stops_is_parked_and_ends(cell: Cell) -> None:
    address, request = await ticketed(cell, "silent", ENDLESS)
    async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
        call = generation_service_pb2_grpc.GenerationServiceStub(channel).Attach()
        await call.write(AttachRequest(start=AttachStart(stream_id=1, request=request)))
        num_tokens, started, reason = 0, time.monotonic(), 0
        parked = asyncio.create_task(asyncio.sleep(13))
        in_use_when_parked = -1.0
        while not reason:
            frame = await asyncio.wait_for(call.read(), 90)
            for event in frame.events:
                num_tokens += len(event.response.delta.token_ids)
                if event.response.HasField("failed"):
                    reason = event.response.failed.error.reason
            if in_use_when_parked < 0 and num_tokens >= UNACKNOWLEDGED:
                await parked
                in_use_when_parked = await asyncio.to_thread(kv_in_use, cell)
        await call.done_writing()
    assert num_tokens == UNACKNOWLEDGED, "the agent sent past the credit"
    assert in_use_when_parked == 0, "the blocks of a parked stream are still held"
    assert reason == error_pb2.ERROR_REASON_CREDIT_TIMEOUT
    assert 55 < time.monotonic() - started < 75
    cell.quiesce()


async def test_f7_slow_and_vanished_readers_harm_nobody(cell: Cell, figures: Figures, num_runs: int) -> None:
    for _ in range(num_runs):
        before = cell.footprint()
        async with readers_of(cell) as readers:
            expected = await undisturbed(readers, "both", PROMPTS, NUM_TOKENS)
            deaf = [deaf_http(cell) for _ in range(8)]
            lazy = [asyncio.create_task(lazy_reader(cell, f"lazy {index}")) for index in range(8)]
            await asyncio.sleep(2)
            streams = [Stream(prompt) for prompt in PROMPTS]
            await readers.follow("both", streams, NUM_TOKENS)
            running = cell.gateway_metric("dragoman_gateway_requests_running")
            assert running >= len(deaf), "the readers that do not read were not under way"
            for connection in deaf:
                connection.close()
            for task in lazy:
                task.cancel()
            await asyncio.gather(*lazy, return_exceptions=True)
        figures.add(
            "F7", f"both-{NUM_NEIGHBOURS}", in_flight=NUM_NEIGHBOURS, lost=num_lost(streams, expected),
            duplicated=num_duplicated(streams, expected), resumed=0, **stalls(streams),
        )  # fmt: skip
        check_streams(streams, expected)
        settle(cell, before)


def deaf_http(cell: Cell) -> socket.socket:
    """A connection that asks for a long stream and never reads."""
    host, port = cell.url.removeprefix("http://").split(":")
    body = json.dumps({"prompt": "deaf", "max_tokens": ENDLESS, "ignore_eos": True, "stream": True, "logprobs": 5})
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((host, int(port)))
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    connection.sendall(f"{head}\r\n\r\n{body}".encode())
    return connection


async def lazy_reader(cell: Cell, prompt: str) -> None:
    """Reads one event a second until cancelled."""
    address, request = await ticketed(cell, prompt, ENDLESS)
    async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
        call = generation_service_pb2_grpc.GenerationServiceStub(channel).Generate(request)
        async for _ in call:
            await asyncio.sleep(1)


async def test_f8_a_thousand_cancels_free_everything(cell: Cell, figures: Figures, num_runs: int) -> None:
    async with readers_of(cell) as readers:
        for _ in range(NUM_WARM_WAVES):
            await cancel_wave(cell, readers.client)
    for _ in range(num_runs):
        cell.quiesce()
        before, cancels = cell.footprint(), num_cancelled(cell)
        async with readers_of(cell) as readers:
            expected = await undisturbed(readers, "both", PROMPTS, NUM_TOKENS)
            freed = await cancel_wave(cell, readers.client)
            streams = [Stream(prompt) for prompt in PROMPTS]
            await readers.follow("both", streams, NUM_TOKENS)
        cancels = num_cancelled(cell) - cancels
        assert cancels > 100, "hardly a request had started before it was cancelled"
        figures.add(
            "F8", f"client-{NUM_CANCELS}", in_flight=cancels, lost=num_lost(streams, expected),
            duplicated=num_duplicated(streams, expected), resumed=0, detect_seconds=freed,
        )  # fmt: skip
        check_streams(streams, expected)
        settle(cell, before)


def num_cancelled(cell: Cell) -> float:
    """Requests the agents have ended as cancelled."""
    return sum(cell.agent_metric(agent_id, "dragoman_requests_total", outcome="cancelled") for agent_id in cell.agents)


async def cancel_wave(cell: Cell, client: AsyncClient) -> float:
    """A thousand requests, waiting, in prefill and in decode, cancelled at once; seconds until all KV is free."""
    prompts = [f"cancel {index}" + "x" * 20_000 * (index % 10 == 0) for index in range(NUM_CANCELS)]
    doomed = [asyncio.create_task(drain(client.generate(p, max_output_tokens=ENDLESS))) for p in prompts]
    await asyncio.sleep(3)
    for task in doomed:
        task.cancel()
    cancelled = time.monotonic()
    results = await asyncio.gather(*doomed, return_exceptions=True)
    assert sum(isinstance(result, asyncio.CancelledError) for result in results) > 0.9 * NUM_CANCELS
    await asyncio.to_thread(wait_until, lambda: kv_in_use(cell) == 0, "all KV is free after the cancels", 10)
    return time.monotonic() - cancelled


async def drain(generation: object) -> None:
    async for _ in generation:  # type: ignore[attr-defined]
        pass


INVALID: list[tuple[str, bytes]] = [
    ("/v1/completions", b"{"),
    ("/v1/completions", b"[]"),
    ("/v1/completions", b'{"prompt": 5}'),
    ("/v1/completions", b'{"prompt": "x", "max_tokens": -1}'),
    ("/v1/completions", b'{"prompt": "x", "model": "no-such-model"}'),
    ("/v1/completions", b'{"prompt": "x", "temperature": "hot"}'),
    ("/v1/completions", json.dumps({"prompt": "x" * 40_000}).encode()),
    ("/v1/chat/completions", b'{"messages": []}'),
    ("/v1/chat/completions", b'{"messages": [{"role": "nobody", "content": "x"}]}'),
    ("/v1/nothing", b"{}"),
]


async def test_f21_a_flood_of_invalid_requests_opens_no_breaker(cell: Cell, figures: Figures, num_runs: int) -> None:
    async with readers_of(cell) as readers:
        await asyncio.gather(*(flood(readers.http, part) for part in range(8)))  # so that buffers have their size
    for _ in range(num_runs):
        before = cell.footprint()
        async with readers_of(cell) as readers:
            expected = await undisturbed(readers, "both", PROMPTS, NUM_TOKENS)
            streams = [Stream(prompt) for prompt in PROMPTS]
            reading = asyncio.create_task(readers.follow("both", streams, NUM_TOKENS))
            parts, _ = await asyncio.gather(
                asyncio.gather(*(flood(readers.http, part) for part in range(8))), bad_grpc(cell, 200)
            )
            statuses = [status for part in parts for status in part]
            assert len(statuses) == NUM_INVALID and all(400 <= status < 500 for status in statuses), set(statuses)
            assert cell.num_serving() == len(cell.agents)
            await reading
            after = [Stream(prompt) for prompt in PROMPTS]
            await readers.follow("both", after, NUM_TOKENS)
        figures.add(
            "F21", f"both-{NUM_NEIGHBOURS}", in_flight=NUM_NEIGHBOURS, lost=num_lost(streams, expected),
            duplicated=num_duplicated(streams, expected), resumed=0, **stalls(streams),
        )  # fmt: skip
        check_streams(streams + after, expected)
        settle(cell, before)


async def flood(http: httpx.AsyncClient, part: int) -> list[int]:
    """An eighth of the invalid requests, one after another; their statuses."""
    headers = {"content-type": "application/json"}
    statuses = []
    for index in range(part, NUM_INVALID, 8):
        path, body = INVALID[index % len(INVALID)]
        statuses.append((await http.post(path, content=body, headers=headers, timeout=30)).status_code)
    return statuses


async def bad_grpc(cell: Cell, count: int) -> None:
    """Requests an agent must refuse, and a controller too."""
    address = next(iter(cell.agent_address.values()))
    async with (
        grpc.aio.insecure_channel(address, options=channel_options()) as agent,
        grpc.aio.insecure_channel(cell.controller_address, options=channel_options()) as controller,
    ):
        generation = generation_service_pb2_grpc.GenerationServiceStub(agent)
        admission = admission_service_pb2_grpc.AdmissionServiceStub(controller)
        for index in range(count):
            with pytest.raises(grpc.aio.AioRpcError):
                await generation.Generate(GenerateRequest(text="x" * (index % 3))).read()
            with pytest.raises(grpc.aio.AioRpcError):
                await admission.AcquireTicket(AcquireTicketRequest(model="no-such-model"), timeout=5)
