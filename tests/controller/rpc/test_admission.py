"""AdmissionService over the wire, with agents that speak the real protocol."""

from __future__ import annotations

import hashlib
import uuid
from typing import Any

import grpc
import pytest

from dragoman.errors import from_rpc_error
from dragoman.v1 import admission_service_pb2 as pb
from dragoman.v1 import ticket_pb2


def ask(**fields: Any) -> pb.AcquireTicketRequest:
    """A request that is good but for what is given."""
    defaults: dict[str, Any] = {
        "request_id": str(uuid.uuid4()),
        "model": "tiny",
        "prompt_tokens": 100,
        "max_output_tokens": 50,
        "prompt_digest": hashlib.sha256(b"prompt").digest(),
    }
    return pb.AcquireTicketRequest(**{**defaults, **fields})


def claims_of(ticket: pb.Ticket) -> ticket_pb2.TicketClaims:
    return ticket_pb2.TicketClaims.FromString(ticket_pb2.SignedTicket.FromString(ticket.token).claims)


async def refused(call: Any) -> Any:
    """The failure of a call that must fail."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return from_rpc_error(raised.value)


async def test_acquire_gives_a_ticket_of_a_live_agent(clients: Any, join: Any) -> None:
    agent = await join("agent-a")
    answer = await clients.admission.AcquireTicket(ask(), timeout=5)
    assert answer.ticket.agent_id == "agent-a"
    assert answer.ticket.epoch == agent.epoch
    assert answer.ticket.data_address == agent.message.data_address
    assert not answer.HasField("fallback_ticket")
    assert len(answer.ticket.token) < 200
    claims = claims_of(answer.ticket)
    assert claims.max_prompt_tokens == 100
    assert claims.max_output_tokens == 50
    assert 9_000 < claims.not_after_ms - agent.monotonic_ms() <= 10_050
    quote = answer.quote
    for estimate in (quote.time_to_first_token, quote.time_per_output_token, quote.finish):
        p10, middle, p90 = (d.ToNanoseconds() for d in (estimate.p10, estimate.expected, estimate.p90))
        assert 0 < p10 < middle < p90
