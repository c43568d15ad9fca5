"""AdmissionService over the wire, with agents that speak the real protocol."""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from typing import Any

import grpc
import pytest
from google.protobuf import duration_pb2

from dragoman.errors import from_rpc_error
from dragoman.v1 import admission_service_pb2 as pb
from dragoman.v1 import agent_registry_service_pb2, error_pb2, ticket_pb2
from dragoman_agent.tickets import Presented, TicketVerifier
from dragoman_controller.config import ControllerSettings
from dragoman_controller.server import ControllerServer


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


async def test_a_second_agent_is_the_fallback(clients: Any, join: Any) -> None:
    await join("agent-a")
    await join("agent-b")
    answer = await clients.admission.AcquireTicket(ask(), timeout=5)
    assert {answer.ticket.agent_id, answer.fallback_ticket.agent_id} == {"agent-a", "agent-b"}
    assert claims_of(answer.fallback_ticket).jti != claims_of(answer.ticket).jti


async def test_the_agents_verifier_takes_the_ticket_under_the_key_of_its_registration(clients: Any, join: Any) -> None:
    agent = await join("agent-a")
    checks = TicketVerifier("agent-a", agent.epoch, b"d" * 32, agent.monotonic_ms)
    checks.set_keys("here", {agent.registration.key_id: agent.registration.ticket_key})
    answer = await clients.admission.AcquireTicket(ask(), timeout=5)
    grant = checks.verify(answer.ticket.token, Presented(hashlib.sha256(b"prompt").digest()))
    assert (grant.max_prompt_tokens, grant.max_output_tokens) == (100, 50)


@pytest.mark.parametrize(
    ("fields", "reason", "code", "param"),
    [
        ({"model": "nope"}, error_pb2.ERROR_REASON_MODEL_NOT_SERVED, grpc.StatusCode.NOT_FOUND, "model"),
        (
            {"prompt_tokens": 99_999},
            error_pb2.ERROR_REASON_CONTEXT_EXCEEDED,
            grpc.StatusCode.INVALID_ARGUMENT,
            "prompt_tokens",
        ),
        (
            {"prompt_digest": b"x"},
            error_pb2.ERROR_REASON_INVALID_REQUEST,
            grpc.StatusCode.INVALID_ARGUMENT,
            "prompt_digest",
        ),
        (
            {"prompt_tokens": None},
            error_pb2.ERROR_REASON_INVALID_REQUEST,
            grpc.StatusCode.INVALID_ARGUMENT,
            "prompt_bytes",
        ),
        (
            {"deadline": duration_pb2.Duration(seconds=1, nanos=2_000_000_000)},
            error_pb2.ERROR_REASON_INVALID_REQUEST,
            grpc.StatusCode.INVALID_ARGUMENT,
            "deadline",
        ),
        (
            {"max_queue_wait": duration_pb2.Duration(seconds=5, nanos=-1)},
            error_pb2.ERROR_REASON_INVALID_REQUEST,
            grpc.StatusCode.INVALID_ARGUMENT,
            "max_queue_wait",
        ),
        ({"priority": 77}, error_pb2.ERROR_REASON_INVALID_REQUEST, grpc.StatusCode.INVALID_ARGUMENT, "priority"),
        ({"request_id": ""}, error_pb2.ERROR_REASON_INVALID_REQUEST, grpc.StatusCode.INVALID_ARGUMENT, "request_id"),
        (
            {"resume": pb.ResumeRequest(attempt=4)},
            error_pb2.ERROR_REASON_RESUME_REFUSED,
            grpc.StatusCode.FAILED_PRECONDITION,
            "resume.attempt",
        ),
    ],
)
async def test_bad_requests_are_refused_alone(
    clients: Any, join: Any, fields: dict[str, Any], reason: int, code: grpc.StatusCode, param: str
) -> None:
    await join()
    error = await refused(clients.admission.AcquireTicket(ask(**fields), timeout=5))
    assert (error.reason, error.grpc_code, error.metadata["param"]) == (reason, code, param)
    await clients.admission.AcquireTicket(ask(), timeout=5)


async def test_an_agent_that_vanishes_gets_no_ticket_from_then_on(clients: Any, join: Any) -> None:
    agent = await join()
    await agent.vanish()
    error = await until_refused(clients)
    assert error.reason == error_pb2.ERROR_REASON_NO_AGENT
    assert error.grpc_code is grpc.StatusCode.UNAVAILABLE and error.retry_delay == 1.0


async def until_refused(clients: Any) -> Any:
    for _ in range(100):
        try:
            await clients.admission.AcquireTicket(ask(max_queue_wait=duration_pb2.Duration()), timeout=5)
        except grpc.aio.AioRpcError as error:
            return from_rpc_error(error)
        await asyncio.sleep(0.01)
    raise AssertionError("tickets were still given for an agent that had vanished")


async def test_a_full_fleet_makes_wait_then_refuses_with_a_time_to_ask_again(clients: Any, join: Any) -> None:
    await join(max_running=1, max_waiting=0)
    await clients.admission.AcquireTicket(ask(), timeout=5)
    started = asyncio.get_running_loop().time()
    wait = duration_pb2.Duration(nanos=300_000_000)
    error = await refused(clients.admission.AcquireTicket(ask(max_queue_wait=wait), timeout=5))
    assert 0.25 < asyncio.get_running_loop().time() - started < 2.0
    assert (error.reason, error.grpc_code) == (error_pb2.ERROR_REASON_QUEUE_FULL, grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert error.retry_delay >= 1.0


async def test_an_outcome_lets_the_waiting_caller_in(clients: Any, join: Any) -> None:
    agent = await join(max_running=1, max_waiting=0)
    first = await clients.admission.AcquireTicket(ask(), timeout=5)
    second = clients.admission.AcquireTicket(ask(), timeout=5)
    await asyncio.sleep(0.1)
    assert not second.done()
    agent.outcomes.append(agent_registry_service_pb2.RequestOutcome(jti=claims_of(first.ticket).jti, output_tokens=5))
    assert (await second).ticket.agent_id == "agent-a"


async def test_a_returned_ticket_lets_the_waiting_caller_in(clients: Any, join: Any) -> None:
    await join(max_running=1, max_waiting=0)
    first = await clients.admission.AcquireTicket(ask(), timeout=5)
    second = clients.admission.AcquireTicket(ask(), timeout=5)
    await asyncio.sleep(0.05)
    await clients.admission.ReleaseTicket(pb.ReleaseTicketRequest(token=first.ticket.token), timeout=5)
    assert (await second).ticket.agent_id == "agent-a"
    await clients.admission.ReleaseTicket(pb.ReleaseTicketRequest(token=first.ticket.token), timeout=5)
    error = await refused(clients.admission.ReleaseTicket(pb.ReleaseTicketRequest(token=b"no ticket"), timeout=5))
    assert error.reason == error_pb2.ERROR_REASON_TICKET_INVALID


async def test_a_caller_whose_deadline_passes_leaves_the_queue(clients: Any, join: Any, server: Any) -> None:
    await join(max_running=1, max_waiting=0)
    await clients.admission.AcquireTicket(ask(), timeout=5)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await clients.admission.AcquireTicket(ask(), timeout=0.2)
    assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    for _ in range(100):
        if not server.cell.admission.has_waiting:
            break
        await asyncio.sleep(0.01)
    assert not server.cell.admission.has_waiting


async def read_admissions(call: Any, count: int) -> list[pb.Admission]:
    admissions: list[pb.Admission] = []
    while len(admissions) < count:
        admissions.extend((await asyncio.wait_for(call.read(), 5)).admissions)
    return admissions


async def test_a_batch_of_32_is_answered_with_one_answer_each(clients: Any, join: Any) -> None:
    await join("agent-a", max_running=64)
    call = clients.admission.Admit()
    requests = [ask() for _ in range(30)] + [ask(model="nope"), ask(prompt_digest=b"x")]
    await call.write(pb.AdmitRequest(requests=requests))
    answers = {answer.request_id: answer for answer in await read_admissions(call, 32)}
    assert set(answers) == {request.request_id for request in requests}
    outcomes = [answers[request.request_id].WhichOneof("outcome") for request in requests]
    assert outcomes == ["granted"] * 30 + ["refused"] * 2
    assert answers[requests[30].request_id].refused.reason == error_pb2.ERROR_REASON_MODEL_NOT_SERVED
    assert len({answer.granted.ticket.token for answer in answers.values() if answer.HasField("granted")}) == 30
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF


async def test_a_ticket_allows_as_many_choices_as_were_asked_for_on_either_road(clients: Any, join: Any) -> None:
    await join("agent-a", max_running=1024)
    await join("agent-b", max_running=1024)
    wanted = {0: 1, 1: 1, 3: 3, 128: 128}
    resume = pb.ResumeRequest(origin_epoch=3, origin_agent_id="agent-a", attempt=1, from_cursor=7)
    asked = [ask(num_choices=number) for number in wanted]
    asked += [ask(num_choices=3, resume=resume), ask(num_inputs=2)]
    expected = [*wanted.values(), 3, 1]
    answers = [await clients.admission.AcquireTicket(one, timeout=5) for one in asked]
    call = clients.admission.Admit()
    for one in asked:
        one.request_id = str(uuid.uuid4())
    await call.write(pb.AdmitRequest(requests=asked))
    batched = {answer.request_id: answer.granted for answer in await read_admissions(call, len(asked))}
    for one, number, unary in zip(asked, expected, answers, strict=True):
        for granted in (unary, batched[one.request_id]):
            tickets = granted.ticket, granted.fallback_ticket
            assert [claims_of(ticket).max_choices for ticket in tickets] == [number] * 2
    call.cancel()


async def test_more_choices_asked_for_under_the_same_id_do_not_widen_the_ticket(clients: Any, join: Any) -> None:
    await join("agent-a")
    first = ask(num_choices=1)
    granted = await clients.admission.AcquireTicket(first, timeout=5)
    first.num_choices = 3
    again = await clients.admission.AcquireTicket(first, timeout=5)
    assert again.ticket.token == granted.ticket.token
    assert claims_of(granted.ticket).max_choices == 1


async def test_a_gateway_hears_that_it_waits_and_then_gets_the_ticket(clients: Any, join: Any) -> None:
    agent = await join(max_running=1, max_waiting=0)
    call = clients.admission.Admit()
    first, second = ask(), ask()
    await call.write(pb.AdmitRequest(requests=[first, second]))
    granted, queued = await read_admissions(call, 2)
    assert granted.granted.ticket.agent_id == "agent-a"
    assert queued.request_id == second.request_id and queued.queued.position == 0
    assert queued.queued.predicted_wait.ToTimedelta().total_seconds() > 0
    agent.outcomes.append(
        agent_registry_service_pb2.RequestOutcome(jti=claims_of(granted.granted.ticket).jti, output_tokens=5)
    )
    later = (await read_admissions(call, 1))[0]
    assert later.request_id == second.request_id and later.HasField("granted")
    call.cancel()


async def test_abandoned_requests_leave_the_queue_and_return_their_tickets(
    clients: Any, join: Any, server: Any
) -> None:
    await join(max_running=1, max_waiting=0)
    call = clients.admission.Admit()
    first, second, third = ask(), ask(), ask()
    await call.write(pb.AdmitRequest(requests=[first, second, third]))
    await read_admissions(call, 3)
    await call.write(pb.AdmitRequest(abandoned_request_ids=[second.request_id, first.request_id]))
    answer = (await read_admissions(call, 1))[0]
    assert answer.request_id == third.request_id and answer.HasField("granted")
    assert not server.cell.admission.has_waiting
    call.cancel()


async def test_a_gateway_that_vanishes_takes_its_waiting_requests_along(clients: Any, join: Any, server: Any) -> None:
    await join(max_running=1, max_waiting=0)
    call = clients.admission.Admit()
    await call.write(pb.AdmitRequest(requests=[ask() for _ in range(5)]))
    await read_admissions(call, 5)
    assert server.cell.admission.has_waiting
    call.cancel()
    for _ in range(200):
        if not server.cell.admission.has_waiting:
            break
        await asyncio.sleep(0.01)
    assert not server.cell.admission.has_waiting


async def test_1000_callers_at_once_each_get_one_ticket(clients: Any, join: Any) -> None:
    for name in ("agent-a", "agent-b"):
        await join(name, max_running=600, max_waiting=0)
    answers = await asyncio.gather(*(clients.admission.AcquireTicket(ask(), timeout=30) for _ in range(1000)))
    assert len({answer.ticket.token for answer in answers}) == 1000
    shares = [sum(answer.ticket.agent_id == name for answer in answers) for name in ("agent-a", "agent-b")]
    assert max(shares) <= 600


async def test_a_quote_tells_the_agent_and_takes_no_slot(clients: Any, join: Any, server: Any) -> None:
    await join("agent-a")
    answer = await clients.admission.Quote(pb.QuoteRequest(request=ask(request_id="")), timeout=5)
    assert answer.agent_id == "agent-a" and answer.quote.HasField("finish")
    assert len(server.cell.ledger) == 0


async def test_a_restarted_controller_knows_its_agents_within_two_beats(join: Any, server: Any, clients: Any) -> None:
    agent = await join()
    port = server.port
    await server.stop()
    await agent.vanish()
    again = ControllerServer(ControllerSettings(port=port, metrics_port=0))
    await again.start()
    try:
        error = await refused(clients.admission.AcquireTicket(ask(), timeout=5, wait_for_ready=True))
        assert error.reason == error_pb2.ERROR_REASON_NO_AGENT and error.retryable
        await agent.join()
        answer = await clients.admission.AcquireTicket(ask(), timeout=5)
        assert answer.ticket.epoch == agent.epoch
    finally:
        await again.stop()
