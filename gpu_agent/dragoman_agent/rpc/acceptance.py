"""From a GenerateRequest to a running generation: the same steps for Generate and for Attach."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from dragoman.errors import DragomanError
from dragoman.serving import as_dragoman_error
from dragoman.v1 import generation_service_pb2
from dragoman_agent.engine.messages import Start
from dragoman_agent.rpc.engine_client import EventSink
from dragoman_agent.rpc.gate import Gate
from dragoman_agent.rpc.served_model import ServedModel
from dragoman_agent.rpc.validate import build_start, check_request_id
from dragoman_agent.tickets import OPEN_GRANT, Grant, presented_generate


@dataclass(slots=True)
class Attempt:
    """One request on its way in. `prompt_ids` is None until a long text has been tokenized."""

    request: generation_service_pb2.GenerateRequest
    seconds_left: float | None = None
    grant: Grant = field(default=OPEN_GRANT)
    prompt_ids: list[int] | None = None
    received: float = field(default_factory=time.monotonic)  # the engine counts a request's times from here


class Acceptance:
    """Checks and starts generations. Refusals are counted here, once each."""

    def __init__(self, gate: Gate, model: ServedModel, epoch: int) -> None:
        """`epoch` goes into each GenerationStarted."""
        self._gate = gate
        self._model = model
        self._epoch = epoch

    def begin(self, request: generation_service_pb2.GenerateRequest, seconds_left: float | None = None) -> Attempt:
        """Check what costs nothing, then the ticket; tokenize a short text. Raises DragomanError."""
        attempt = Attempt(request, seconds_left)
        with self._counting(attempt):
            check_request_id(request.request_id)
            self._model.check_name(request.model)
            self._gate.check_open()
            attempt.grant = self._gate.verify_ticket(request.ticket_token, lambda: presented_generate(request))
            self._gate.check_new(request.request_id, 1)
            attempt.prompt_ids = self._model.prompt_now(request)
        return attempt

    async def tokenize(self, attempt: Attempt) -> None:
        """Tokenize a long text off the event loop. Raises DragomanError."""
        with self._counting(attempt):
            attempt.prompt_ids = await self._model.prompt_later(attempt.request)

    def accept(self, attempt: Attempt, sink: EventSink) -> tuple[Start, generation_service_pb2.GenerationStarted]:
        """Validate, use the ticket up and start. From here on the request ends with one terminal event.

        Raises DragomanError; nothing has been started then.
        """
        with self._counting(attempt):
            start = build_start(
                attempt.request,
                attempt.prompt_ids or [],
                self._model.limits,
                attempt.grant,
                attempt.seconds_left,
                self._model.encode_word,
            )
            start.received = attempt.received
            self._gate.admit(start, attempt.grant, sink)
        started = generation_service_pb2.GenerationStarted(
            prompt_tokens=len(start.prompt_ids), epoch=self._epoch, seed=start.sampling.seed
        )
        return start, started

    def _counting(self, attempt: Attempt) -> _Counting:
        return _Counting(lambda error: self._count(attempt, error))

    def _count(self, attempt: Attempt, error: DragomanError) -> None:
        self._gate.count_refusal(error, attempt.grant, is_resume=attempt.request.HasField("resume"))


class _Counting:
    """Counts the refusal that leaves the block; an unplanned exception becomes a DragomanError first."""

    def __init__(self, count: Callable[[DragomanError], None]) -> None:
        self._count = count

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, Exception):
            return
        known = as_dragoman_error(error, "acceptance")
        self._count(known)
        if known is not error:
            raise known from None
