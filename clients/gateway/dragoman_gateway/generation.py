"""One prompt's life: ticket, start, deltas, credits, and a new agent when the first is lost in the middle."""

from __future__ import annotations

import asyncio
import logging
import random
import time
import uuid
from collections import deque
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from dragoman.errors import DragomanError
from dragoman.pursuit import Pursuit
from dragoman.retry import RetryPolicy, Step, may_pass
from dragoman.v1 import admission_service_pb2, error_pb2, generation_service_pb2
from dragoman_gateway.admission import Admissions
from dragoman_gateway.attach import AgentLink, Links

logger = logging.getLogger(__name__)

MAX_STARTS = 3
_FIRST_BACKOFF_SECONDS = 0.05
_MAX_BACKOFF_SECONDS = 1.0
# Nobody but this process has touched the ticket: a controller's new key or an agent's new life made it so.
STALE_TICKET = frozenset(
    {
        error_pb2.ERROR_REASON_TICKET_INVALID,
        error_pb2.ERROR_REASON_TICKET_EXPIRED,
        error_pb2.ERROR_REASON_TICKET_REPLAYED,
        error_pb2.ERROR_REASON_TICKET_WRONG_AGENT,
    }
)

T = TypeVar("T")
Delta = generation_service_pb2.GenerationDelta


@dataclass(slots=True)
class GenerationSpec:
    """What is asked for; the messages are templates that each attempt copies."""

    acquire: admission_service_pb2.AcquireTicketRequest
    generate: generation_service_pb2.GenerateRequest
    num_choices: int
    prompt_tokens: int
    param_names: Mapping[str, str] = field(default_factory=dict)  # field of the agent -> field of the request


@dataclass(slots=True)
class Outcome:
    """What is known of a generation for usage, headers, metrics and the log."""

    prompt_tokens: int
    cached_tokens: int = 0
    output_tokens: int = 0
    agent_id: str = ""
    request_id: str = ""
    quote: admission_service_pb2.LatencyQuote | None = None
    prompt_logprobs: list[generation_service_pb2.TokenLogprob] = field(default_factory=list)  # from the second token on
    num_resumes: int = 0
    created: float = field(default_factory=time.monotonic)
    started: float | None = None
    first_token: float | None = None


class Generation:
    """Pull it: `start`, then `next` until it gives nothing, `written` after each write, `close` always.

    A stream cut by the loss of its agent is continued on another one, at most three times: no token twice, none missing.
    """

    def __init__(
        self, spec: GenerationSpec, admissions: Admissions, links: Links, *, window: int, resume_seconds: float
    ) -> None:
        """`window`: tokens that may be ahead of the reader. `resume_seconds`: how long a cut stream looks for an agent."""
        self._spec = spec
        self._admissions = admissions
        self._links = links
        self._window = window
        self._link: AgentLink | None = None
        self._stream_id = 0
        self._events: deque[Delta] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._aborted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._started = False
        self._finished = False
        self._failure: Exception | None = None
        self._delivered: list[list[int]] = [[] for _ in range(spec.num_choices)]
        self._finishes: list[generation_service_pb2.ChoiceFinish | None] = [None] * spec.num_choices
        self._credit = window
        self._credit_step = max(window // 2, 1)
        self._num_uncredited = 0  # tokens of all choices since the last grant
        self._seed = 0
        self._epoch = 0
        self._agent_id = ""  # where the stream last ran
        self._pursuit = Pursuit(
            RetryPolicy(
                max_attempts=MAX_STARTS,
                base_seconds=_FIRST_BACKOFF_SECONDS,
                max_delay_seconds=_MAX_BACKOFF_SECONDS,
                resume_patience_seconds=resume_seconds,
                refused_patience_seconds=resume_seconds,
            ),
            random.Random(),
            also_retried=STALE_TICKET,
            heeds_retry_delay=False,
        )
        self._is_resume = False
        self._loss: Exception | None = None  # of the agent, while another one is looked for
        self.outcome = Outcome(prompt_tokens=spec.prompt_tokens)

    async def start(self) -> None:
        """Returns when an agent has accepted the request. Raises DragomanError when none does."""
        while (refusal := await self._interruptible(self._open())) is not None:
            await self._wait_or_raise(refusal, refusal)
        self._pursuit.started()

    async def next(self) -> list[Delta]:
        """The deltas that have come, waiting for the first; [] when all choices have ended.

        Raises DragomanError when the generation failed for good, or what `abort` was given.
        """
        while True:
            if self._events:
                events = list(self._events)
                self._events.clear()
                return events
            if self._failure is not None:
                if not self._can_resume(self._failure):
                    raise self._failure
                await self._resume(self._failure)
            elif self._finished:
                return []
            else:
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter

    def written(self) -> None:
        """Everything `next` gave has been taken by the client: grant credit for as much again."""
        # Half the window at a time, so that credit costs one message in 128 tokens and not one each.
        if self._num_uncredited < self._credit_step or self._finished or self._link is None:
            return
        open_choices = [len(ids) for ids, end in zip(self._delivered, self._finishes, strict=True) if end is None]
        until = min(open_choices, default=0) + self._window
        if until >= self._credit + self._credit_step:
            self._credit = until
            self._num_uncredited = 0
            self._link.credit(self._stream_id, until)

    def abort(self, error: Exception) -> None:
        """Make `start` or `next` raise `error` now, whatever they wait for.

        The end of a stream whose agent was lost is that loss, also when this process stops while it looks for another.
        """
        loss = self._loss or (self._failure if self._failure is not None and self._can_resume(self._failure) else None)
        if loss is not None and isinstance(error, DragomanError):
            error = _not_resumed(loss, error)
        self._failure = error
        self._finished = True
        self._events.clear()
        if not self._aborted.done():
            self._aborted.set_exception(error)
            self._aborted.exception()  # retrieved here, since often nobody waits for it
        self._notify()

    def close(self) -> None:
        """Cancel the generation unless it has ended. Call it always; a second call does nothing."""
        self._finished = True
        if self._link is not None:
            self._link.cancel(self._stream_id)
            self._link = None

    @property
    def failure(self) -> Exception | None:
        """Why the generation ended early, None while it has not."""
        return self._failure

    # Sink: called by the link.

    def on_response(self, response: generation_service_pb2.GenerateResponse) -> None:
        """Takes one event of the accepted request."""
        kind = response.WhichOneof("event")
        if kind == "delta":
            self._take(response.delta)
        elif kind == "started":
            self._accepted(response.started)
        elif kind == "finished":
            self._end(response.finished.usage)
        elif kind == "failed":
            self._fail(self._renamed(DragomanError.from_detail(response.failed.error)))
        self._notify()

    def on_refused(self, error: DragomanError) -> None:
        """Takes the agent's refusal."""
        self._fail(self._renamed(error))
        self._notify()

    def on_lost(self, error: DragomanError) -> None:
        """Takes the loss of the agent."""
        self._fail(error)
        self._notify()

    def _accepted(self, started: generation_service_pb2.GenerationStarted) -> None:
        self._started = True
        self._seed, self._epoch, self._agent_id = started.seed, started.epoch, self.outcome.agent_id
        self.outcome.prompt_tokens = started.prompt_tokens
        if self.outcome.started is None:
            self.outcome.started = time.monotonic()
            self.outcome.prompt_logprobs = list(started.prompt_logprobs)

    def _take(self, delta: Delta) -> None:
        delivered = self._delivered[delta.choice_index] if delta.choice_index < len(self._delivered) else None
        if delivered is None:
            self._cut(f"an event of choice {delta.choice_index}, which was not asked for")
            return
        expected = len(delivered)
        if delta.cursor + len(delta.token_ids) <= expected and delta.token_ids:
            return  # delivered before the stream moved
        if delta.cursor != expected:
            self._cut(f"tokens from cursor {delta.cursor} where {expected} was due")
            return
        if self.outcome.first_token is None:
            self.outcome.first_token = time.monotonic()
        delivered.extend(delta.token_ids)
        self.outcome.output_tokens += len(delta.token_ids)
        self._num_uncredited += len(delta.token_ids)
        if delta.HasField("finish"):
            self._finishes[delta.choice_index] = delta.finish
            if delta.finish.reason == generation_service_pb2.FINISH_REASON_CANCELLED:
                self._fail(DragomanError(error_pb2.ERROR_REASON_CANCELLED, "the request was cancelled at the server"))
                return
        self._events.append(delta)
        if self._pursuit.cut is not None:
            self._pursuit.flowed()

    def _cut(self, what: str) -> None:
        """The agent broke the order of a stream: leave it and go on elsewhere from what is sure."""
        agent_id = self.outcome.agent_id
        logger.error("agent %s sent %s", agent_id, what)
        if self._link is not None:
            self._link.cancel(self._stream_id)
        self._fail(DragomanError(error_pb2.ERROR_REASON_AGENT_LOST, f"agent {agent_id} sent {what}"))

    def _end(self, usage: generation_service_pb2.Usage) -> None:
        self._finished = True
        self.outcome.cached_tokens = usage.cached_tokens
        self.outcome.prompt_tokens = usage.prompt_tokens

    def _renamed(self, error: DragomanError) -> DragomanError:
        """The error under the names of the request's own fields."""
        param = error.metadata.get("param", "")
        names = self._spec.param_names
        # The rest of them is called here as there, without the message they are in.
        ours = next((names[name] for name in names if param.startswith(name)), param.removeprefix("sampling."))
        if ours != param:
            error.metadata["param"] = ours
            error.message = f"{ours}: {error.message.removeprefix(f'{param}: ')}"
        return error

    def _fail(self, error: DragomanError) -> None:
        if self._failure is None:
            self._failure = error

    def _notify(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _open(self) -> DragomanError | None:
        """One ticket and its fallback. None when an agent accepted, else why none did; raises what is final."""
        request = admission_service_pb2.AcquireTicketRequest()
        request.CopyFrom(self._spec.acquire)
        request.request_id = self.outcome.request_id = str(uuid.uuid4())
        if self._is_resume:
            request.resume.CopyFrom(self._resume_request())
        try:
            granted = await self._admissions.acquire(request)
        except DragomanError as refusal:
            raise self._renamed(refusal) from None
        tickets = [granted.ticket, *([granted.fallback_ticket] if granted.HasField("fallback_ticket") else [])]
        for ticket in tickets:
            self.outcome.agent_id, self.outcome.quote = ticket.agent_id, granted.quote
            error = await self._try(ticket, request.request_id)
            if error is None:
                return None
            if not (may_pass(error, resuming=self._is_resume) or error.reason in STALE_TICKET):
                raise error
        self._admissions.abandon(request.request_id)
        return error

    async def _try(self, ticket: admission_service_pb2.Ticket, request_id: str) -> DragomanError | None:
        request = generation_service_pb2.GenerateRequest()
        request.CopyFrom(self._spec.generate)
        request.request_id = request_id
        request.ticket_token = ticket.token
        request.initial_credit = self._credit
        if self._is_resume:
            request.resume.CopyFrom(self._resume_state())
        self._started, self._failure = False, None
        self._link = self._links.get(ticket)
        self._stream_id = self._link.start(request, self)
        try:
            while not (self._started or self._failure is not None):
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
        except asyncio.CancelledError:
            self.close()
            raise
        if self._started:
            return None
        failure, self._failure = self._failure, None
        if isinstance(failure, DragomanError):
            return failure
        raise failure or AssertionError("no failure")

    def _can_resume(self, failure: Exception) -> bool:
        # A reader that took nothing for a minute would do so elsewhere too.
        is_stalled = isinstance(failure, DragomanError) and failure.reason == error_pb2.ERROR_REASON_CREDIT_TIMEOUT
        return not self._finished and not is_stalled and self._pursuit.may_resume(failure)

    async def _resume(self, loss: Exception) -> None:
        """Go on with another agent, from the delivered tokens. Raises the loss, with why, when none is found in time."""
        assert isinstance(loss, DragomanError)
        self._loss = loss
        if all(end is not None for end in self._finishes):
            self._finished, self._failure, self._loss = True, None, None  # only the closing words were lost
            return
        decision = self._pursuit.failed(loss, accepted=True, has_origin=True, now=time.monotonic())
        if decision.step is not Step.RESUME:
            raise loss
        await self._interruptible(asyncio.sleep(decision.delay_seconds))
        self._is_resume = True
        self.outcome.num_resumes += 1
        lost_agent = self.outcome.agent_id
        lengths = [len(ids) for ids, end in zip(self._delivered, self._finishes, strict=True) if end is None]
        self._credit = min(lengths) + self._window
        while True:
            try:
                error = await self._interruptible(self._open())
            except DragomanError as refused:
                if self._aborted.done() or not may_pass(refused, resuming=True):
                    raise
                error = refused
            if error is None:
                break
            await self._wait_or_raise(error, _not_resumed(loss, error))
        self._loss = None
        self._pursuit.started()
        logger.info("request %s moved from %s to %s", self.outcome.request_id, lost_agent, self.outcome.agent_id)

    async def _wait_or_raise(self, refusal: DragomanError, end: DragomanError) -> None:
        """Waits until it may be tried again after `refusal`; raises `end` when that is no use."""
        decision = self._pursuit.failed(refusal, accepted=False, has_origin=False, now=time.monotonic())
        if decision.step is Step.GIVE_UP:
            raise end
        await self._interruptible(asyncio.sleep(decision.delay_seconds))

    def _resume_request(self) -> admission_service_pb2.ResumeRequest:
        return admission_service_pb2.ResumeRequest(
            origin_epoch=self._epoch,
            origin_agent_id=self._agent_id,
            attempt=self._pursuit.num_resumes,
            from_cursor=sum(map(len, self._delivered)),
        )

    def _resume_state(self) -> generation_service_pb2.ResumeState:
        state = generation_service_pb2.ResumeState(
            attempt=self._pursuit.num_resumes, origin_epoch=self._epoch, seed=self._seed
        )
        for index, (ids, finish) in enumerate(zip(self._delivered, self._finishes, strict=True)):
            progress = state.choices.add(choice_index=index)
            progress.token_ids.ids.extend(ids)
            if finish is not None:
                progress.finish.CopyFrom(finish)
        return state

    async def _interruptible(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, unless `abort` comes first."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait((task, self._aborted), return_when=asyncio.FIRST_COMPLETED)
            if self._aborted.done():
                self._aborted.result()
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)


def _not_resumed(loss: Exception, reason: Exception) -> DragomanError:
    """The loss of an agent as the reader of a cut stream is told of it."""
    lost = loss if isinstance(loss, DragomanError) else DragomanError(error_pb2.ERROR_REASON_AGENT_LOST, str(loss))
    message = f"{lost.message}; the stream could not be resumed: {reason}"
    return DragomanError(lost.reason, message, retry_delay=lost.retry_delay, metadata=lost.metadata)
