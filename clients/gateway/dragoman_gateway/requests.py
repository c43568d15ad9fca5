"""One HTTP request's generations: started together, read as one, ended as one, counted and logged once."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import deque
from typing import Any

from google.protobuf import duration_pb2

from dragoman.errors import DragomanError
from dragoman.v1 import admission_service_pb2, generation_service_pb2, tokens_pb2
from dragoman_gateway import VERSION
from dragoman_gateway.backend import Backend
from dragoman_gateway.errors import ApiError, from_dragoman, invalid
from dragoman_gateway.generation import Delta, Generation, GenerationSpec, Outcome
from dragoman_gateway.models import ModelText
from dragoman_gateway.prompts import Prompt
from dragoman_gateway.sampling import priority_of, sampling_of, stop_of
from dragoman_gateway.schema import SamplingBody

logger = logging.getLogger(__name__)

FINISH_REASONS = {
    generation_service_pb2.FINISH_REASON_STOP: "stop",
    generation_service_pb2.FINISH_REASON_LENGTH: "length",
}


def check_stream_options(body: SamplingBody, *, lenient: bool) -> bool:
    """Whether a usage chunk is wanted. Raises ApiError 400 for stream_options without stream."""
    if body.stream_options is None:
        return False
    if not body.stream and not lenient:
        raise invalid("stream_options is only allowed with stream: true; leave it out", "stream_options")
    return bool(body.stream_options.include_usage)


def build_specs(
    body: SamplingBody,
    prompts: list[Prompt],
    model: ModelText,
    backend: Backend,
    *,
    max_tokens: int | None,
    num_logprobs: int | None,
    tenant: str = "",
) -> list[GenerationSpec]:
    """One spec a prompt, charged to `tenant`. `max_tokens` None is up to the context's end; more than fits is cut to what fits."""
    sampling = sampling_of(body, num_logprobs, model.vocabulary_size)
    priority = priority_of(body)
    num_choices = body.n or 1
    wait = backend.settings.max_queue_wait
    specs = []
    for prompt in prompts:
        room = model.max_context_tokens - len(prompt.token_ids)
        budget = room if max_tokens is None else min(max_tokens, room)
        acquire = admission_service_pb2.AcquireTicketRequest(
            model=model.name,
            prompt_tokens=len(prompt.token_ids),
            max_output_tokens=budget,
            block_hashes=prompt.block_hashes,
            priority=priority,
            prompt_bytes=4 * len(prompt.token_ids),
            prompt_digest=prompt.digest,
            num_choices=num_choices,
            tenant=tenant,
        )
        set_queue_wait(acquire, wait)
        generate = generation_service_pb2.GenerateRequest(
            model=model.name,
            token_ids=tokens_pb2.TokenIds(ids=prompt.token_ids),
            sampling=sampling,
            stop=stop_of(body, budget, model.vocabulary_size),
            cache_salt=body.cache_salt or "",
        )
        if body.skip_special_tokens is not None:
            generate.text_options.skip_special_tokens = body.skip_special_tokens
        specs.append(GenerationSpec(acquire, generate, num_choices, len(prompt.token_ids)))
    return specs


def set_queue_wait(acquire: admission_service_pb2.AcquireTicketRequest, seconds: float) -> None:
    """Bound the wait in the controller's queue; 0 leaves it to the controller."""
    if seconds:
        acquire.max_queue_wait.CopyFrom(duration_pb2.Duration(seconds=int(seconds), nanos=int(seconds % 1 * 1e9)))


class Job:
    """The generations of one request. Choice index = prompt * n + choice, as the API orders them."""

    def __init__(
        self, backend: Backend, route: str, public_id: str, model: ModelText, specs: list[GenerationSpec]
    ) -> None:
        self.backend = backend
        self.route = route
        self.public_id = public_id
        self.model = model
        self.created = int(time.time())
        self.response_id = ("chatcmpl-" if route == "chat" else "cmpl-") + uuid.uuid4().hex
        self.fingerprint = f"dragoman-{VERSION}-{model.model_digest.hex()[:12]}"
        self._parts = [
            Generation(
                spec,
                backend.admissions,
                backend.links,
                window=backend.settings.credit_tokens,
                resume_seconds=backend.settings.resume_timeout,
            )
            for spec in specs
        ]
        self._num_choices = specs[0].num_choices if specs else 1
        self._tasks: list[asyncio.Task[None]] = []
        self._merged: deque[tuple[int, Delta]] = deque()
        self._num_running = len(specs)
        self._wake = asyncio.Event()
        self._any_started = False
        self._failure: Exception | None = None
        self._is_closed = False
        self._begun = time.monotonic()
        backend.job_began(self)

    @property
    def failure(self) -> Exception | None:
        """Why a part ended early, None while none has."""
        return self._failure or next((part.failure for part in self._parts if part.failure is not None), None)

    @property
    def outcomes(self) -> list[Outcome]:
        """One a prompt."""
        return [part.outcome for part in self._parts]

    async def start(self) -> None:
        """Returns when a part was accepted. Raises what ends the request before any was."""
        if len(self._parts) == 1:
            await self._parts[0].start()
        elif self._parts:
            self._tasks = [asyncio.ensure_future(self._pull(index, part)) for index, part in enumerate(self._parts)]
            while not self._any_started and self._failure is None:
                await self._wake.wait()
                self._wake.clear()
            if self._failure is not None:
                raise self._failure

    async def next(self) -> list[tuple[int, Delta]]:
        """The deltas that have come, each with its choice's index; [] when all have ended."""
        if len(self._parts) == 1:
            return [(delta.choice_index, delta) for delta in await self._parts[0].next()]
        while not self._merged:
            if self._failure is not None:
                raise self._failure
            if not self._num_running:
                return []
            await self._wake.wait()
            self._wake.clear()
        deltas = list(self._merged)
        self._merged.clear()
        return deltas

    def written(self) -> None:
        """What `next` gave was taken."""
        for part in self._parts:
            part.written()

    def abort(self, error: Exception) -> None:
        """Make `start` or `next` raise `error`."""
        self._merged.clear()
        for part in self._parts:
            part.abort(error)
        # A part that has lost its agent knows more about the end.
        self._failure = next((part.failure for part in self._parts if part.failure not in (None, error)), error)
        self._wake.set()

    def usage(self) -> dict[str, Any]:
        """The totals over all prompts and choices."""
        prompt = sum(outcome.prompt_tokens for outcome in self.outcomes)
        output = sum(outcome.output_tokens for outcome in self.outcomes)
        return usage_of(prompt, output, sum(outcome.cached_tokens for outcome in self.outcomes))

    def headers(self) -> dict[str, str]:
        """Where the first prompt runs, and what was promised for it."""
        if not self._parts:
            return {}
        outcome = self._parts[0].outcome
        headers = {"x-dragoman-agent": outcome.agent_id, "x-dragoman-request-id": outcome.request_id}
        if outcome.quote is not None:
            for name, estimate in (
                ("ttft", outcome.quote.time_to_first_token),
                ("tpot", outcome.quote.time_per_output_token),
                ("finish", outcome.quote.finish),
            ):
                if estimate.HasField("expected"):
                    milliseconds = estimate.expected.ToTimedelta().total_seconds() * 1e3
                    headers[f"x-dragoman-quote-{name}-ms"] = f"{milliseconds:.3f}"
        return headers

    def end(self, outcome: str, failure: Exception | None = None) -> None:
        """Cancel what still runs, count and log. Call it once for each job; a second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        for part in self._parts:
            part.close()
        for task in self._tasks:
            task.cancel()
        metrics = self.backend.metrics
        self.backend.job_ended(self)
        metrics.requests.labels(self.route, outcome).inc()
        for part in self._parts:
            metrics.observe(part.outcome, ended_well=outcome == "ok")
        self._log(outcome, failure)

    async def _pull(self, index: int, part: Generation) -> None:
        try:
            await part.start()
            self._any_started = True
            self._wake.set()
            while deltas := await part.next():
                self._merged.extend((index * self._num_choices + delta.choice_index, delta) for delta in deltas)
                self._wake.set()
        except Exception as error:
            if self._failure is None:
                self.abort(error)
        finally:
            self._num_running -= 1
            self._wake.set()

    def _log(self, outcome: str, failure: Exception | None) -> None:
        first = min((part.outcome.first_token for part in self._parts if part.outcome.first_token), default=None)
        usage = self.usage()
        logger.info(
            "%s %s model=%s outcome=%s prompt=%d cached=%d output=%d ttft=%s total=%.3fs agent=%s request=%s%s",
            self.route,
            self.public_id,
            self.model.name,
            outcome,
            usage["prompt_tokens"],
            usage["prompt_tokens_details"]["cached_tokens"],
            usage["completion_tokens"],
            "-" if first is None else f"{first - self._begun:.3f}s",
            time.monotonic() - self._begun,
            self._parts[0].outcome.agent_id if self._parts else "-",
            self._parts[0].outcome.request_id if self._parts else "-",
            f" error={failure!r}" if failure is not None else "",
        )


def usage_of(prompt_tokens: int, output_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """The `usage` object."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def finish_of(delta: Delta) -> tuple[str, str | int | None]:
    """finish_reason and stop_reason of a delta that ends its choice."""
    finish = delta.finish
    stop = finish.WhichOneof("stop")
    return FINISH_REASONS.get(finish.reason, "stop"), None if stop is None else getattr(finish, stop)


def outcome_of(error: BaseException) -> str:
    """How a request that raised before its answer is counted."""
    if isinstance(error, DragomanError):
        error = from_dragoman(error)
    if isinstance(error, ApiError):
        return "refused" if error.status < 500 else "error"
    return "error"
