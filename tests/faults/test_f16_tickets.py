"""F16: tickets that are used twice, forged, too old, or for something else: exactly one run, and the right code."""

from __future__ import annotations

import asyncio
import uuid
from base64 import b64encode
from collections.abc import Iterator

import grpc
import pytest
from benchmarks.cell import Cell, running_cell
from tests.faults.conftest import FULL, Figures

from dragoman.channel import channel_options
from dragoman.errors import from_rpc_error
from dragoman.prefix_hash import prompt_digest_of_text
from dragoman.v1 import admission_service_pb2_grpc, error_pb2, generation_service_pb2_grpc, ticket_pb2
from dragoman.v1.admission_service_pb2 import AcquireTicketRequest, AcquireTicketResponse, Ticket
from dragoman.v1.generation_service_pb2 import GenerateRequest, ResumeState

PROMPT = "a prompt"
NUM_TOKENS = 5


@pytest.fixture(scope="module")
def cell() -> Iterator[Cell]:
    with running_cell((), ()) as made:
        yield made


async def acquire(cell: Cell) -> AcquireTicketResponse:
    async with grpc.aio.insecure_channel(cell.controller_address, options=channel_options()) as channel:
        request = AcquireTicketRequest(
            request_id=str(uuid.uuid4()), model="null", prompt_bytes=len(PROMPT), max_output_tokens=NUM_TOKENS,
            prompt_digest=prompt_digest_of_text(PROMPT),
        )  # fmt: skip
        return await admission_service_pb2_grpc.AdmissionServiceStub(channel).AcquireTicket(request, timeout=10)


async def run(
    address: str, token: bytes, prompt: str = PROMPT, resume: ResumeState | None = None, num_choices: int = 1
) -> int:
    """0 when the request ran to its end, else the reason it was refused with."""
    request = GenerateRequest(
        request_id=str(uuid.uuid4()), ticket_token=token, model="null", text=prompt, resume=resume
    )
    request.stop.max_output_tokens = NUM_TOKENS
    request.sampling.num_choices = num_choices
    async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
        try:
            stub = generation_service_pb2_grpc.GenerationServiceStub(channel)
            events = [event async for event in stub.Generate(request, timeout=20)]
        except grpc.aio.AioRpcError as error:
            refused = from_rpc_error(error)
            assert error.code() == refused.grpc_code
            return int(refused.reason)
        assert [event.WhichOneof("event") for event in events].count("finished") == 1
        return 0


def altered(ticket: Ticket, **changes: object) -> bytes:
    """The ticket with other claims under the old signature."""
    signed = ticket_pb2.SignedTicket.FromString(ticket.token)
    claims = ticket_pb2.TicketClaims.FromString(signed.claims)
    for name, value in changes.items():
        setattr(claims, name, value)
    return ticket_pb2.SignedTicket(claims=claims.SerializeToString(), mac=signed.mac).SerializeToString()


def runs_of(cell: Cell) -> float:
    return sum(cell.agent_metric(agent_id, "dragoman_tickets_total", result="accepted") for agent_id in cell.agents)


async def test_each_bad_ticket_gets_its_reason_and_runs_nothing(cell: Cell) -> None:
    ticket = (await acquire(cell)).ticket
    other = next(address for agent_id, address in cell.agent_address.items() if agent_id != ticket.agent_id)
    assert await run(ticket.data_address, ticket.token) == 0
    before = runs_of(cell)
    fresh = (await acquire(cell)).ticket
    there = next(address for agent_id, address in cell.agent_address.items() if agent_id != fresh.agent_id)
    flipped = fresh.token[:-1] + bytes([fresh.token[-1] ^ 1])
    cases = {
        "replayed": (ticket.data_address, ticket.token, error_pb2.ERROR_REASON_TICKET_REPLAYED),
        "replayed elsewhere": (other, ticket.token, error_pb2.ERROR_REASON_TICKET_WRONG_AGENT),
        "none": (fresh.data_address, b"", error_pb2.ERROR_REASON_TICKET_REQUIRED),
        "garbage": (fresh.data_address, b"\xff" * 60, error_pb2.ERROR_REASON_TICKET_INVALID),
        "huge": (fresh.data_address, fresh.token + b"\0" * 100_000, error_pb2.ERROR_REASON_TICKET_INVALID),
        "cut": (fresh.data_address, fresh.token[:40], error_pb2.ERROR_REASON_TICKET_INVALID),
        "forged signature": (fresh.data_address, flipped, error_pb2.ERROR_REASON_TICKET_INVALID),
        "more tokens than granted": (
            fresh.data_address, altered(fresh, max_output_tokens=1 << 20), error_pb2.ERROR_REASON_TICKET_INVALID,
        ),
        "more choices than granted": (
            fresh.data_address, altered(fresh, max_choices=9), error_pb2.ERROR_REASON_TICKET_INVALID,
        ),
        "longer life": (fresh.data_address, altered(fresh, not_after_ms=1 << 50), error_pb2.ERROR_REASON_TICKET_INVALID),
        "unknown key": (fresh.data_address, altered(fresh, key_id=77), error_pb2.ERROR_REASON_TICKET_INVALID),
        "wrong agent": (there, fresh.token, error_pb2.ERROR_REASON_TICKET_WRONG_AGENT),
        "earlier life": (fresh.data_address, altered(fresh, epoch=1), error_pb2.ERROR_REASON_TICKET_WRONG_AGENT),
    }  # fmt: skip
    for name, (address, token, reason) in cases.items():
        assert await run(address, token) == reason, name
    assert await run(fresh.data_address, fresh.token, prompt="another") == error_pb2.ERROR_REASON_TICKET_MISMATCH
    assert await run(fresh.data_address, fresh.token, num_choices=9) == error_pb2.ERROR_REASON_TICKET_MISMATCH
    resume = ResumeState(attempt=1, origin_epoch=1, seed=1)
    assert await run(fresh.data_address, fresh.token, resume=resume) == error_pb2.ERROR_REASON_TICKET_MISMATCH
    assert runs_of(cell) == before, "a bad ticket ran"
    assert await run(fresh.data_address, fresh.token) == 0, "the refusals have used up a good ticket"
    shown = "".join(process.log_text() for process in cell.processes())
    mac = ticket_pb2.SignedTicket.FromString(fresh.token).mac
    assert not [form for form in (mac.hex(), repr(mac)[2:-1], b64encode(mac).decode()) if form in shown]
    cell.quiesce()


async def test_a_ticket_shown_many_times_at_once_runs_once(cell: Cell, figures: Figures, num_runs: int) -> None:
    for _ in range(num_runs):
        before = runs_of(cell)
        ticket = (await acquire(cell)).ticket
        results = await asyncio.gather(*(run(ticket.data_address, ticket.token) for _ in range(20)))
        assert sorted(results) == [0] + [int(error_pb2.ERROR_REASON_TICKET_REPLAYED)] * 19
        assert runs_of(cell) == before + 1
        figures.add("F16", "one-ticket-20-times", runs=runs_of(cell) - before, refused=len(results) - results.count(0))
        cell.quiesce()


@pytest.mark.skipif(not FULL, reason="takes as long as a ticket lives: make faults")
async def test_a_ticket_that_was_not_used_in_time_is_expired(cell: Cell) -> None:
    ticket = (await acquire(cell)).ticket
    await asyncio.sleep(ticket.usable_for.seconds + 1.0)
    assert await run(ticket.data_address, ticket.token) == error_pb2.ERROR_REASON_TICKET_EXPIRED
    cell.quiesce()


@pytest.mark.skipif(not FULL, reason="restarts an agent: make faults")
async def test_a_ticket_does_not_outlive_its_agent(cell: Cell) -> None:
    ticket = (await acquire(cell)).ticket
    assert cell.remove_agent(ticket.agent_id) == 0
    cell.start_agent(ticket.agent_id)
    cell.wait_serving(2)
    address = cell.agent_address[ticket.agent_id]
    assert await run(address, ticket.token) == error_pb2.ERROR_REASON_TICKET_WRONG_AGENT
    cell.quiesce()
