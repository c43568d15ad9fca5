"""Servers that break the protocol on purpose: what a real agent cannot be made to do on the wire."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import grpc

from dragoman import AsyncClient, RetryPolicy, Token
from dragoman.errors import DragomanError, error_metadata
from dragoman.v1 import (
    admission_service_pb2,
    admission_service_pb2_grpc,
    error_pb2,
    generation_service_pb2_grpc,
)
from dragoman.v1 import generation_service_pb2 as pb

Script = Callable[[pb.GenerateRequest, grpc.aio.ServicerContext], AsyncIterator[pb.GenerateResponse]]


def started(epoch: int, seed: int = 7, prompt_tokens: int = 3) -> pb.GenerateResponse:
    return pb.GenerateResponse(started=pb.GenerationStarted(epoch=epoch, seed=seed, prompt_tokens=prompt_tokens))


def delta(cursor: int, *token_ids: int, choice: int = 0, end: int | None = None) -> pb.GenerateResponse:
    """Each token's text is its id and a space."""
    finish = None if end is None else pb.ChoiceFinish(reason=end)
    text = "".join(f"{token_id} " for token_id in token_ids)
    return pb.GenerateResponse(
        delta=pb.GenerationDelta(token_ids=token_ids, text=text, cursor=cursor, choice_index=choice, finish=finish)
    )


def finished(output_tokens: int = 0) -> pb.GenerateResponse:
    return pb.GenerateResponse(
        finished=pb.GenerationFinished(usage=pb.Usage(prompt_tokens=3, cached_tokens=2, output_tokens=output_tokens))
    )


def failed(reason: error_pb2.ErrorReason) -> pb.GenerateResponse:
    return pb.GenerateResponse(
        failed=pb.GenerationFailed(error=error_pb2.ErrorDetail(reason=reason, message="it went wrong"))
    )


async def abort(context: grpc.aio.ServicerContext, error: DragomanError) -> None:
    await context.abort(error.grpc_code, error.message, error_metadata(error))


@dataclass
class ScriptedAgent(generation_service_pb2_grpc.GenerationServiceServicer):
    """Runs one script a request, the last one again and again."""

    agent_id: str
    epoch: int
    scripts: list[Script]
    requests: list[pb.GenerateRequest] = field(default_factory=list)
    num_cancelled: int = 0
    address: str = ""

    async def Generate(self, request, context):
        self.requests.append(request)
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        try:
            async for response in script(request, context):
                yield response
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise

    def ticket(self, number: int) -> admission_service_pb2.Ticket:
        return admission_service_pb2.Ticket(
            token=f"{self.agent_id}-{number}".encode(),
            data_address=self.address,
            agent_id=self.agent_id,
            epoch=self.epoch,
        )


@dataclass
class ScriptedController(admission_service_pb2_grpc.AdmissionServiceServicer):
    """Grants tickets for the agents in turn; `plan` may say (agent, fallback agent or None) or an error for each ask."""

    plan: list[object] = field(default_factory=list)
    agents: list[ScriptedAgent] = field(default_factory=list)
    asked: list[admission_service_pb2.AcquireTicketRequest] = field(default_factory=list)
    released: list[bytes] = field(default_factory=list)
    address: str = ""

    async def AcquireTicket(self, request, context):
        self.asked.append(request)
        number = len(self.asked)
        step = self.plan.pop(0) if self.plan else self.agents[min(number - 1, len(self.agents) - 1)]
        if isinstance(step, DragomanError):
            await abort(context, step)
        if isinstance(step, float):
            await asyncio.sleep(step)
            step = self.agents[0]
        first, second = step if isinstance(step, tuple) else (step, None)
        return admission_service_pb2.AcquireTicketResponse(
            ticket=first.ticket(number), fallback_ticket=second.ticket(number) if second else None
        )

    async def ReleaseTicket(self, request, context):
        self.released.append(request.token)
        return admission_service_pb2.ReleaseTicketResponse()


Scripted = Callable[..., Awaitable[ScriptedController]]


QUICK = RetryPolicy(base_seconds=0.02, max_delay_seconds=0.1, resume_patience_seconds=3.0)


async def read_all(client: AsyncClient, **options: object) -> tuple[list[Token], object]:
    stream = client.generate("hi", model="m", **options)  # type: ignore[arg-type]
    tokens = [token async for token in stream]
    return tokens, await stream.result()


def script(*responses: pb.GenerateResponse, then: str = "end") -> Script:
    """Sends the responses; then ends, hangs, or goes away without a word."""

    async def run(_request, context):
        for response in responses:
            yield response
        if then == "hang":
            await asyncio.sleep(60)
        if then == "lose":
            await context.abort(grpc.StatusCode.UNAVAILABLE, "connection reset")

    return run


def refuse(reason: error_pb2.ErrorReason, retry_delay: float | None = None) -> Script:
    async def run(_request, context):
        await abort(context, DragomanError(reason, "refused", retry_delay=retry_delay))
        yield pb.GenerateResponse()

    return run


async def go_on(request: pb.GenerateRequest, _context: object) -> AsyncIterator[pb.GenerateResponse]:
    """An agent that takes over honestly: choice c has the tokens 10c+1 .. 10c+6."""
    epoch = int(request.ticket_token.split(b"-")[1]) + 100
    yield started(epoch, seed=request.resume.seed or 7)
    done = {progress.choice_index: len(progress.token_ids.ids) for progress in request.resume.choices}
    ended = {p.choice_index for p in request.resume.choices if p.HasField("finish")}
    for cursor in range(6):
        for choice in range(max(1, request.sampling.num_choices)):
            if choice not in ended and cursor >= done.get(choice, 0):
                end = pb.FINISH_REASON_LENGTH if cursor == 5 else None
                yield delta(cursor, 10 * choice + cursor + 1, choice=choice, end=end)
    yield finished(6)


def assert_whole(tokens: list[Token], num_choices: int = 1) -> None:
    for choice in range(num_choices):
        own = [token for token in tokens if token.choice == choice]
        assert [token_id for token in own for token_id in token.token_ids] == [10 * choice + i for i in range(1, 7)]
        assert [token.cursor for token in own] == list(range(6)), "cursors are contiguous, none twice"
