"""What chat and completions share: run a job to a JSON answer, or to a stream."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from dragoman_gateway.http import ClientGone, json_reply, unless_gone
from dragoman_gateway.requests import Job, finish_of, outcome_of
from dragoman_gateway.sse import DONE, Chunks
from dragoman_gateway.streaming import EventStream

# An answer with more log-probabilities is put together in a thread: a long prompt's take a second.
MAX_INLINE_SCORES = 1000


@dataclass(slots=True)
class Choice:
    """One choice as it grows."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None


async def collect(job: Job, num_choices: int) -> list[Choice]:
    """All choices of a job, complete."""
    choices = [Choice() for _ in range(num_choices)]
    await job.start()
    while deltas := await job.next():
        for index, delta in deltas:
            choice = choices[index]
            choice.text.append(delta.text)
            choice.token_ids.extend(delta.token_ids)
            choice.logprobs.extend(delta.logprobs)
            if delta.HasField("finish"):
                choice.finish_reason, choice.stop_reason = finish_of(delta)
        job.written()
    return choices


async def answer_whole(
    request: Request, job: Job, num_choices: int, build: Callable[[list[Choice]], dict[str, Any]],
    headers: Mapping[str, str],
) -> Response:  # fmt: skip
    """The JSON answer. A client that leaves meanwhile cancels the job."""
    request.state.has_job = True
    try:
        choices = await unless_gone(request.receive, collect(job, num_choices))
        num_scored = sum(len(choice.logprobs) for choice in choices) + sum(
            len(outcome.prompt_logprobs) for outcome in job.outcomes
        )
        if num_scored > MAX_INLINE_SCORES:
            body = await unless_gone(request.receive, job.backend.models.in_thread(lambda: build(choices)))
        else:
            body = build(choices)
    except BaseException as error:
        job.end(*_ended_by(error))
        raise
    job.end("ok")
    return json_reply(body, headers={**headers, **job.headers()})


async def answer_stream(
    request: Request, job: Job, make_source: Callable[[], JobSource], headers: Mapping[str, str]
) -> Response:
    """The stream, once an agent has accepted; what fails before that is raised and becomes an HTTP status."""
    request.state.has_job = True
    try:
        await unless_gone(request.receive, job.start())
    except BaseException as error:
        job.end(*_ended_by(error))
        raise
    return EventStream(make_source(), job.backend.active, {**headers, **job.headers()}, job.end)


class JobSource(ABC):
    """The events of a job; subclasses encode the deltas."""

    def __init__(self, job: Job, chunks: Chunks, *, include_usage: bool) -> None:
        self.job = job
        self.chunks = chunks
        self._include_usage = include_usage

    @property
    def failure(self) -> Exception | None:
        """Why the job ended early."""
        return self.job.failure

    @abstractmethod
    def encode(self, deltas: list[tuple[int, Any]]) -> bytes:
        """The events of some deltas; may be empty."""

    def first(self) -> bytes:
        """What goes out with the headers."""
        return b""

    async def next(self) -> bytes:
        """Everything that has come, in one piece, so that it costs one write."""
        while deltas := await self.job.next():
            data = self.encode(deltas)
            if data:
                return data
            self.job.written()
        return b""

    def last(self) -> bytes:
        """Usage where it was asked for, then the end."""
        return (self.chunks.usage(self.usage()) if self._include_usage else b"") + DONE

    def usage(self) -> dict[str, Any]:
        """The totals."""
        return self.job.usage()

    def written(self) -> None:
        """The client took it."""
        self.job.written()

    def abort(self, error: Exception) -> None:
        """End early."""
        self.job.abort(error)


def _ended_by(error: BaseException) -> tuple[str, Exception | None]:
    if isinstance(error, ClientGone) or not isinstance(error, Exception):
        return "cancelled", None
    return outcome_of(error), error
