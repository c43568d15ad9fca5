"""What a well-behaved agent never does: gaps, repetitions, words of an earlier life, refusals in a row."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import grpc
import pytest

from dragoman.errors import DragomanError
from dragoman.v1 import admission_service_pb2, error_pb2, generation_service_pb2, generation_service_pb2_grpc
from dragoman_gateway.attach import Links
from dragoman_gateway.channels import Channels
from dragoman_gateway.forms import form_of
from dragoman_gateway.generation import Generation, GenerationSpec
from dragoman_gateway.schema import CompletionBody

EPOCH = 11
Event = generation_service_pb2.GenerateResponse
Script = Callable[[generation_service_pb2.GenerateRequest], Iterable[Any]]


def started(epoch: int = EPOCH) -> Event:
    return Event(started=generation_service_pb2.GenerationStarted(prompt_tokens=3, epoch=epoch, seed=5))


def delta(cursor: int, *ids: int, finish: bool = False) -> Event:
    made = generation_service_pb2.GenerationDelta(token_ids=ids, text="".join(map(chr, ids)), cursor=cursor)
    if finish:
        made.finish.reason = generation_service_pb2.FINISH_REASON_LENGTH
    return Event(delta=made)


def finished() -> Event:
    return Event(
        finished=generation_service_pb2.GenerationFinished(usage=generation_service_pb2.Usage(output_tokens=4))
    )


def failed(reason: error_pb2.ErrorReason) -> Event:
    return Event(failed=generation_service_pb2.GenerationFailed(error=error_pb2.ErrorDetail(reason=reason)))


def refused(reason: error_pb2.ErrorReason) -> error_pb2.ErrorDetail:
    return error_pb2.ErrorDetail(reason=reason, message="no")


class ScriptedAgent(generation_service_pb2_grpc.GenerationServiceServicer):
    """Plays one script a start, in order. A script yields events, refusals, whole frames, or the status that ends the stream."""

    def __init__(self, *scripts: Script) -> None:
        self._scripts = list(scripts)
        self.requests: list[generation_service_pb2.GenerateRequest] = []

    async def Attach(
        self, requests: AsyncIterator[generation_service_pb2.AttachRequest], context: Any
    ) -> AsyncIterator[generation_service_pb2.AttachResponse]:
        async for request in requests:
            if not request.HasField("start"):
                continue
            self.requests.append(request.start.request)
            for item in self._scripts.pop(0)(request.start.request):
                if isinstance(item, grpc.StatusCode):
                    await context.abort(item, "Internal error from Core")
                frame = item
                if not isinstance(item, generation_service_pb2.AttachResponse):
                    kind = "response" if isinstance(item, Event) else "refused"
                    event = generation_service_pb2.AttachEvent(stream_id=request.start.stream_id, **{kind: item})
                    frame = generation_service_pb2.AttachResponse(events=[event], epoch=EPOCH)
                yield frame


class Grants:
    """Grants everything, to the agent at `address`."""

    def __init__(self, address: str, *, with_fallback: bool = False) -> None:
        self.address = address
        self._with_fallback = with_fallback
        self.asked: list[admission_service_pb2.AcquireTicketRequest] = []
        self.abandoned: list[str] = []

    async def acquire(
        self, request: admission_service_pb2.AcquireTicketRequest
    ) -> admission_service_pb2.AcquireTicketResponse:
        self.asked.append(request)
        ticket = admission_service_pb2.Ticket(token=b"1", data_address=self.address, agent_id="a", epoch=EPOCH)
        granted = admission_service_pb2.AcquireTicketResponse(ticket=ticket)
        if self._with_fallback:
            granted.fallback_ticket.CopyFrom(ticket)
            granted.fallback_ticket.token = b"2"
        return granted

    def abandon(self, request_id: str) -> None:
        self.abandoned.append(request_id)


async def play(
    *scripts: Script, with_fallback: bool = False
) -> tuple[list[int], ScriptedAgent, Grants, Exception | None]:
    """The ids one generation delivers, and what it asked for on the way."""
    agent = ScriptedAgent(*scripts)
    server = grpc.aio.server()
    generation_service_pb2_grpc.add_GenerationServiceServicer_to_server(agent, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channels = Channels()
    links = Links(channels)
    grants = Grants(f"127.0.0.1:{port}", with_fallback=with_fallback)
    spec = GenerationSpec(
        admission_service_pb2.AcquireTicketRequest(model="m"), generation_service_pb2.GenerateRequest(model="m"), 1, 3
    )
    generation = Generation(spec, grants, links, window=256, resume_seconds=1.0)  # type: ignore[arg-type]
    ids: list[int] = []
    error: Exception | None = None
    try:
        async with asyncio.timeout(10):
            await generation.start()
            while deltas := await generation.next():
                for part in deltas:
                    ids.extend(part.token_ids)
                generation.written()
    except DragomanError as caught:
        error = caught
    finally:
        generation.close()
        await links.close()
        await channels.close()
        await server.stop(None)
    return ids, agent, grants, error


async def test_an_undisturbed_stream() -> None:
    ids, agent, grants, error = await play(
        lambda _: [started(), delta(0, 1, 2), delta(2, 3, 4, finish=True), finished()]
    )
    assert (ids, error, len(agent.requests), len(grants.asked)) == ([1, 2, 3, 4], None, 1, 1)


async def test_a_repetition_is_dropped() -> None:
    ids, agent, _, error = await play(
        lambda _: [started(), delta(0, 1, 2), delta(0, 1, 2), delta(1, 2), delta(2, 3, finish=True), finished()]
    )
    assert (ids, error, len(agent.requests)) == ([1, 2, 3], None, 1)


@pytest.mark.parametrize("bad", [delta(3, 9), delta(1, 2, 9), delta(0, 1, 2, 9)])
async def test_a_gap_or_a_torn_overlap_moves_the_stream_on(bad: Event) -> None:
    ids, agent, grants, error = await play(
        lambda _: [started(), delta(0, 1, 2), bad], lambda _: [started(), delta(2, 3, 4, finish=True), finished()]
    )
    assert (ids, error) == ([1, 2, 3, 4], None)
    resume = agent.requests[1].resume
    assert (resume.attempt, resume.origin_epoch, resume.seed) == (1, EPOCH, 5)
    assert list(resume.choices[0].token_ids.ids) == [1, 2]
    asked = grants.asked[1].resume
    assert (asked.attempt, asked.origin_agent_id, asked.from_cursor) == (1, "a", 2)


async def test_words_of_another_life_are_refused() -> None:
    def zombie(request: generation_service_pb2.GenerateRequest) -> Iterable[Any]:
        yield started()
        yield delta(0, 1)
        event = generation_service_pb2.AttachEvent(stream_id=1, response=delta(1, 99))
        yield generation_service_pb2.AttachResponse(events=[event], epoch=EPOCH + 1)

    ids, _, _, error = await play(zombie, lambda _: [started(), delta(1, 2, finish=True), finished()])
    assert (ids, error) == ([1, 2], None)


async def test_the_fallback_ticket_is_used_when_the_first_agent_is_full() -> None:
    full = refused(error_pb2.ERROR_REASON_QUEUE_FULL)
    ids, agent, grants, error = await play(
        lambda _: [full], lambda _: [started(), delta(0, 1, finish=True), finished()], with_fallback=True
    )
    assert (ids, error, len(grants.asked)) == ([1], None, 1)
    assert [request.ticket_token for request in agent.requests] == [b"1", b"2"]


async def test_a_stale_ticket_is_asked_for_again_and_returned() -> None:
    stale = refused(error_pb2.ERROR_REASON_TICKET_EXPIRED)
    ids, _, grants, error = await play(lambda _: [stale], lambda _: [started(), delta(0, 1, finish=True), finished()])
    assert (ids, error) == ([1], None)
    assert grants.asked[0].request_id != grants.asked[1].request_id
    assert grants.abandoned == [grants.asked[0].request_id]


async def test_a_mistake_is_not_tried_elsewhere() -> None:
    _, agent, _, error = await play(lambda _: [refused(error_pb2.ERROR_REASON_INVALID_REQUEST)], with_fallback=True)
    assert isinstance(error, DragomanError) and error.reason == error_pb2.ERROR_REASON_INVALID_REQUEST
    assert len(agent.requests) == 1


@pytest.mark.parametrize(
    "reason", [error_pb2.ERROR_REASON_NON_FINITE_LOGITS, error_pb2.ERROR_REASON_DEADLINE_EXCEEDED,
               error_pb2.ERROR_REASON_CREDIT_TIMEOUT],
)  # fmt: skip
async def test_a_failure_that_would_repeat_ends_the_stream(reason: error_pb2.ErrorReason) -> None:
    ids, agent, _, error = await play(lambda _: [started(), delta(0, 1), failed(reason)])
    assert (ids, len(agent.requests)) == ([1], 1)
    assert isinstance(error, DragomanError) and error.reason == reason


@pytest.mark.parametrize(
    "code",
    [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL],
)
async def test_a_link_that_breaks_without_a_word_of_the_agent_moves_the_stream_on(code: grpc.StatusCode) -> None:
    """INTERNAL is what grpc.aio makes of a connection that ends while a credit or a start is written."""
    ids, agent, _, error = await play(
        lambda _: [started(), delta(0, 1), code], lambda _: [started(), delta(1, 2, finish=True), finished()]
    )
    assert (ids, error) == ([1, 2], None)
    assert [request.resume.attempt for request in agent.requests] == [0, 1]


async def test_three_resumes_and_no_more() -> None:
    fault = failed(error_pb2.ERROR_REASON_DEVICE_FAULT)
    scripts = [lambda _, cursor=cursor: [started(), delta(cursor, cursor), fault] for cursor in range(4)]
    ids, agent, _, error = await play(*scripts)
    assert ids == [0, 1, 2, 3]
    assert [request.resume.attempt for request in agent.requests] == [0, 1, 2, 3]
    assert isinstance(error, DragomanError) and error.reason == error_pb2.ERROR_REASON_DEVICE_FAULT


async def test_only_the_closing_words_lost_is_no_loss() -> None:
    ids, agent, _, error = await play(
        lambda _: [started(), delta(0, 1, 2, finish=True), failed(error_pb2.ERROR_REASON_DEVICE_FAULT)]
    )
    assert (ids, error, len(agent.requests)) == ([1, 2], None, 1)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("stop.min_output_tokens", "min_tokens"), ("stop.strings", "stop"), ("stop.token_ids[3]", "stop_token_ids"),
        ("sampling.num_choices", "n"), ("sampling.top_p", "top_p"), ("token_ids.ids[0]", "prompt"),
        ("cache_salt", "cache_salt"),
    ],
)  # fmt: skip
async def test_refusals_name_the_fields_of_the_http_request(theirs: str, ours: str) -> None:
    _, names = form_of(CompletionBody(prompt="x"))
    spec = GenerationSpec(
        admission_service_pb2.AcquireTicketRequest(), generation_service_pb2.GenerateRequest(), 1, 3, names
    )
    generation = Generation(spec, None, None, window=256, resume_seconds=1.0)  # type: ignore[arg-type]
    reason = error_pb2.ERROR_REASON_INVALID_REQUEST
    generation.on_refused(DragomanError(reason, f"{theirs}: is wrong", metadata={"param": theirs}))
    assert isinstance(generation.failure, DragomanError)
    assert generation.failure.message == f"{ours}: is wrong"
    assert generation.failure.metadata["param"] == ours


def test_a_quote_is_of_the_speed_that_the_agent_runs_at(slow: Any) -> None:
    """A null device that is told to take ten times as long says so when it registers."""
    reply = slow.post("/v1/completions", prompt="a", max_tokens=10)
    assert reply.status_code == 200
    assert 4.0 < float(reply.headers["x-dragoman-quote-tpot-ms"]) < 16.0  # ten times 0.8
