"""One generation as the client follows it: admission, an agent's stream, fallback, resume at the last cursor, one end."""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal

from dragoman.attempt import Attempt, lost, open_attempt
from dragoman.durations import duration_of, seconds_of
from dragoman.errors import DragomanError
from dragoman.progress import CursorGapError, Progress
from dragoman.pursuit import Pursuit
from dragoman.request import read_seconds
from dragoman.results import (
    GenerationResult,
    Quote,
    Timings,
    Token,
    Usage,
    quote_of,
    token_logprob_of,
)
from dragoman.retry import RetryBudget, RetryPolicy, Step, may_pass
from dragoman.ticket import Admission, Channels, Grant
from dragoman.v1 import admission_service_pb2 as admission_pb
from dragoman.v1 import error_pb2
from dragoman.v1 import generation_service_pb2 as pb


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that is ready to be admitted and sent."""

    generate: pb.GenerateRequest
    acquire: admission_pb.AcquireTicketRequest


# Makes the request when the stream is first read; may ask an agent for the chat template or the model's name.
Prepare = Callable[[], Awaitable[Prepared]]


@dataclass(frozen=True, slots=True)
class Context:
    """What a client shares with its streams."""

    channels: Channels
    admission: Admission
    policy: RetryPolicy
    budget: RetryBudget
    rng: random.Random = field(default_factory=random.Random)


class GenerationStream:
    """Iterates over `Token`. Leaving the loop, `aclose` or the end of `async with` cancels what still runs.

    Nothing is sent before the first item is asked for. An agent that dies is replaced and the stream goes on at the
    next token, at most 3 times; the reader only sees a pause. Errors are DragomanError.
    """

    def __init__(self, context: Context, prepare: Prepare, deadline: float | None) -> None:
        self._context = context
        self._prepare = prepare
        self._began = time.monotonic()
        self._deadline = None if deadline is None else self._began + read_seconds("deadline", deadline)
        self._request: Prepared | None = None
        self._progress = Progress(1)
        self._grant: Grant | None = None
        self._ticket: admission_pb.Ticket | None = None
        self._attempt: Attempt | None = None
        self._first_started: pb.GenerationStarted | None = None
        self._seed: int | None = None
        self._finished: pb.GenerationFinished | None = None
        self._error: DragomanError | None = None
        self._origin: admission_pb.Ticket | None = None
        self._pursuit = Pursuit(context.policy, context.rng, deadline=self._deadline)
        self._first_token_time: float | None = None
        self._end_time: float | None = None
        self._reading = False

    @property
    def request_id(self) -> str | None:
        """Id of the request; None until the first item was asked for."""
        return self._request.generate.request_id if self._request else None

    @property
    def agent_id(self) -> str | None:
        """The agent that runs it now; None before it is placed, "" for an open agent."""
        return self._ticket.agent_id if self._ticket else None

    @property
    def agent_address(self) -> str | None:
        """Data address of that agent."""
        return self._ticket.data_address if self._ticket else None

    @property
    def num_resumes(self) -> int:
        """How often it was continued after a cut."""
        return self._pursuit.num_resumes

    @property
    def quote(self) -> Quote | None:
        """What the controller promised; None until it is placed and for an open agent."""
        if self._grant is None or self._grant.quote is None:
            return None
        return quote_of(self._grant.quote, self._grant.tickets[0].agent_id)

    async def __aenter__(self) -> GenerationStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def __aiter__(self) -> AsyncIterator[Token]:
        return self._tokens()

    async def result(self) -> GenerationResult:
        """Reads what is left and returns the whole. Raises DragomanError; CANCELLED when it was closed before."""
        async for _ in self:
            pass
        return self._result()

    async def text(self) -> str:
        """As `result`, only the text of the first choice."""
        return (await self.result()).text

    async def aclose(self) -> None:
        """Cancels what still runs. May be called more than once."""
        if self._end_time is None:
            self._end_time = time.monotonic()
        if self._error is None and not self._over:
            self._error = DragomanError(error_pb2.ERROR_REASON_CANCELLED, "the stream was closed before its end")
        self._drop_attempt()

    async def _tokens(self) -> AsyncGenerator[Token, None]:
        if self._reading:
            raise RuntimeError("a stream has one reader; do not iterate over it twice at once")
        self._reading = True
        try:
            while (token := await self._next()) is not None:
                yield token
        finally:
            self._reading = False
            await self.aclose()

    @property
    def _over(self) -> bool:
        return self._finished is not None or self._progress.complete

    async def _next(self) -> Token | None:
        while self._error is None and not self._over:
            try:
                token = await self._advance()
            except DragomanError as error:
                accepted = self._attempt is not None
                self._drop_attempt()
                await self._recover(error, accepted)
                continue
            if token is not None:
                return token
        if self._error is not None:
            raise self._error
        await self._read_end()
        return None

    async def _advance(self) -> Token | None:
        """Takes one event, after having the request accepted where it is not. Raises DragomanError."""
        if self._attempt is None:
            self._attempt = await self._start()
            self._took_start(self._attempt.started)
        event = await self._attempt.read()
        if isinstance(event, pb.GenerationFinished):
            if not self._progress.complete:
                raise lost(self._attempt.ticket, "finished the request before all its choices had ended")
            self._finished = event
            return None
        try:
            token = self._progress.take(event)
        except CursorGapError as error:
            raise lost(self._attempt.ticket, f"sent a frame that does not fit: {error}") from None
        if token is not None:
            self._first_token_time = self._first_token_time or time.monotonic()
            self._pursuit.flowed()
        return token

    async def _start(self) -> Attempt:
        """Has the request admitted and accepted: by the first agent, or by the second where the first refuses."""
        if self._request is None:
            self._request = await self._prepare()
            self._progress = Progress(max(1, self._request.generate.sampling.num_choices))
        grant = await self._context.admission.acquire(self._acquire_message(self._request.acquire), self._remaining())
        self._grant = self._grant or grant
        request = self._generate_message(self._request.generate)
        failure: DragomanError | None = None
        for ticket in grant.tickets:
            self._ticket = ticket
            accepted = False
            try:
                attempt = await open_attempt(self._context.channels, ticket, request, self._remaining())
                accepted = True
                return attempt
            except DragomanError as error:
                failure = failure or error
                if not may_pass(error, resuming=self._origin is not None):
                    raise
            finally:
                if not accepted:
                    self._context.admission.release(ticket)
        assert failure is not None
        raise failure

    def _took_start(self, started: pb.GenerationStarted) -> None:
        self._first_started = self._first_started or started
        self._seed = started.seed
        self._pursuit.started()
        self._context.budget.succeeded()

    def _acquire_message(self, acquire: admission_pb.AcquireTicketRequest) -> admission_pb.AcquireTicketRequest:
        message = admission_pb.AcquireTicketRequest()
        message.CopyFrom(acquire)
        remaining = self._remaining()
        if remaining is not None:
            message.deadline.CopyFrom(duration_of(remaining))
        if self._origin is not None:
            message.resume.CopyFrom(
                admission_pb.ResumeRequest(
                    origin_epoch=self._origin.epoch,
                    origin_agent_id=self._origin.agent_id,
                    attempt=self._pursuit.num_resumes,
                    from_cursor=self._progress.num_tokens,
                )
            )
        return message

    def _generate_message(self, generate: pb.GenerateRequest) -> pb.GenerateRequest:
        if self._origin is None:
            return generate
        if self._seed is None:
            # It was lost before the agent named the seed it drew: nothing was delivered, so any will do.
            self._seed = generate.sampling.seed if generate.sampling.HasField("seed") else secrets.randbits(63)
        message = pb.GenerateRequest()
        message.CopyFrom(generate)
        message.resume.CopyFrom(
            self._progress.resume_state(
                attempt=self._pursuit.num_resumes, origin_epoch=self._origin.epoch, seed=self._seed
            )
        )
        return message

    async def _recover(self, error: DragomanError, accepted: bool) -> None:
        """Waits until the request may be tried again, or makes `error` the end of the stream."""
        cut = self._pursuit.cut
        decision = self._pursuit.failed(
            error, accepted=accepted, has_origin=self._ticket is not None, now=time.monotonic()
        )
        if decision.step is Step.GIVE_UP or not self._context.budget.spend():
            self._error = _not_resumed(cut, error)
            return
        if decision.step is Step.RESUME:
            self._origin = self._ticket
        await asyncio.sleep(decision.delay_seconds)

    def _remaining(self) -> float | None:
        if self._deadline is None:
            return None
        remaining = self._deadline - time.monotonic()
        if remaining <= 0:
            raise DragomanError(error_pb2.ERROR_REASON_DEADLINE_EXCEEDED, "the deadline of the request passed")
        return remaining

    async def _read_end(self) -> None:
        """Reads the usage after the last token. All tokens are here, so an agent lost now costs only its figures."""
        if self._attempt is not None and self._finished is None:
            try:
                event = await self._attempt.read()
                if isinstance(event, pb.GenerationFinished):
                    self._finished = event
            except DragomanError:
                pass
        self._end_time = self._end_time or time.monotonic()

    def _drop_attempt(self) -> None:
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.cancel()

    def _result(self) -> GenerationResult:
        assert self._request is not None and self._first_started is not None and self._end_time is not None
        finished = self._finished or pb.GenerationFinished()
        first_token = None if self._first_token_time is None else self._first_token_time - self._began
        return GenerationResult(
            request_id=self._request.generate.request_id,
            model=self._request.generate.model,
            choices=self._progress.choices(),
            usage=Usage(
                prompt_tokens=self._first_started.prompt_tokens,
                cached_tokens=finished.usage.cached_tokens,
                # Counted here: an agent that took over counts only from its own start.
                output_tokens=self._progress.num_tokens,
            ),
            timings=Timings(
                queue_seconds=_seconds(finished, "queue_time"),
                time_to_first_token_seconds=_seconds(finished, "time_to_first_token"),
                total_seconds=_seconds(finished, "total_time"),
                client_time_to_first_token_seconds=first_token,
                client_total_seconds=self._end_time - self._began,
            ),
            seed=self._seed or 0,
            agent_id=self._ticket.agent_id if self._ticket else "",
            num_resumes=self._pursuit.num_resumes,
            quote=self.quote,
            prompt_logprobs=tuple(token_logprob_of(entry) for entry in self._first_started.prompt_logprobs),
        )


def _not_resumed(cut: DragomanError | None, error: DragomanError) -> DragomanError:
    """The end of a stream: when it had been cut, what cut it comes first."""
    if cut is None or error is cut:
        return error
    message = f"the stream was cut ({cut.message}) and could not be resumed: {error.message}"
    return DragomanError(error.reason, message, retry_delay=error.retry_delay, metadata=error.metadata)


def _seconds(
    finished: pb.GenerationFinished, name: Literal["queue_time", "time_to_first_token", "total_time"]
) -> float | None:
    return seconds_of(getattr(finished, name)) if finished.HasField(name) else None
