"""One Attach connection: the generations of one gateway, one frame a step."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial

from dragoman.errors import DragomanError
from dragoman.serving import Context
from dragoman.v1 import error_pb2, generation_service_pb2
from dragoman_agent.engine.messages import Delta, Failed, Finished
from dragoman_agent.rpc.acceptance import Acceptance, Attempt
from dragoman_agent.rpc.convert import fill_delta, fill_response
from dragoman_agent.rpc.engine_client import EngineClient, Event
from dragoman_agent.rpc.opening import Opening
from dragoman_agent.rpc.served_model import ServedModel

_Response = generation_service_pb2.AttachResponse


class AttachConnection:
    """Collects events into the frame that leaves next. While one frame is being written the next one grows.

    When the client closes its half, running generations go on with the credit they have, then the call ends; when the
    call itself ends, all are cancelled.
    """

    def __init__(self, engine: EngineClient, acceptance: Acceptance, model: ServedModel, epoch: int) -> None:
        self._engine = engine
        self._acceptance = acceptance
        self._token_bytes = model.token_bytes
        self._epoch = epoch
        self._streams: dict[int, str] = {}  # stream id -> request id of what runs
        self._arriving: dict[int, asyncio.Task[None]] = {}  # long prompts being tokenized
        self._frame = _Response(epoch=epoch)
        self._wakeup: asyncio.Future[None] | None = None
        self._flush = self._wake  # one bound method for all events, as it is a key
        self._is_noted = False  # for the end of the batch of frames under way
        self._input_ended = False
        self._closed = False
        self._violation: DragomanError | None = None

    async def serve(
        self,
        requests: AsyncIterator[generation_service_pb2.AttachRequest],
        context: Context,
    ) -> None:
        """Run the connection to its end. Raises DragomanError when the client breaks the protocol."""
        reader = asyncio.create_task(self._read(requests))
        try:
            while not self._is_over():
                if not self._frame.events:
                    self._wakeup = asyncio.get_running_loop().create_future()
                    await self._wakeup
                    continue
                frame, self._frame = self._frame, _Response(epoch=self._epoch)
                await context.write(frame)
            if self._violation is not None:
                raise self._violation
        finally:
            reader.cancel()

    def close(self) -> None:
        """Cancel everything that still runs."""
        self._closed = True
        for task in self._arriving.values():
            task.cancel()
        for request_id in self._streams.values():
            self._engine.cancel(request_id, detach=True)
        self._streams.clear()

    def finish(self) -> None:
        """Take no more input; the call ends with the last generation."""
        self._input_ended = True
        self._wake()

    def _is_over(self) -> bool:
        if self._violation is not None:
            return True
        return self._input_ended and not self._streams and not self._arriving and not self._frame.events

    async def _read(self, requests: AsyncIterator[generation_service_pb2.AttachRequest]) -> None:
        try:
            async for request in requests:
                match request.WhichOneof("message"):
                    case "credit":
                        request_id = self._streams.get(request.credit.stream_id)
                        if request_id is not None:
                            self._engine.grant(request_id, request.credit.until_cursor)
                    case "start":
                        self._start(request.start.stream_id, request.start.request)
                    case "cancel":
                        self._cancel(request.cancel.stream_id)
        except DragomanError as error:
            self._violation = error
        finally:
            self.finish()

    def _start(self, stream_id: int, request: generation_service_pb2.GenerateRequest) -> None:
        if stream_id in self._streams or stream_id in self._arriving:
            raise DragomanError(
                error_pb2.ERROR_REASON_INVALID_REQUEST,
                f"start.stream_id: {stream_id} names a generation that still runs on this Attach; use a new number",
                metadata={"param": "start.stream_id"},
            )
        try:
            attempt = self._acceptance.begin(request)
            if attempt.prompt_ids is None:
                self._arriving[stream_id] = asyncio.create_task(self._start_later(stream_id, attempt))
                return
            self._accept(stream_id, attempt)
        except DragomanError as error:
            self._refuse(stream_id, error)

    async def _start_later(self, stream_id: int, attempt: Attempt) -> None:
        try:
            await self._acceptance.tokenize(attempt)
            if not self._closed:
                self._accept(stream_id, attempt)
        except DragomanError as error:
            self._refuse(stream_id, error)
        finally:
            self._arriving.pop(stream_id, None)
            self._wake()

    def _accept(self, stream_id: int, attempt: Attempt) -> None:
        sink = _StreamSink(self, stream_id)
        start, started = self._acceptance.accept(attempt, sink)
        self._streams[stream_id] = start.request_id
        opening = Opening(start, started, self._token_bytes)
        if opening.is_open:
            self._add_start(stream_id, started)
            self._wake()
        else:
            sink.open_late(opening)

    def _add_start(self, stream_id: int, started: generation_service_pb2.GenerationStarted) -> None:
        self._frame.events.add(stream_id=stream_id).response.started.CopyFrom(started)

    def _cancel(self, stream_id: int) -> None:
        request_id = self._streams.get(stream_id)
        if request_id is not None:
            self._engine.cancel(request_id)
        elif stream_id in self._arriving:
            self._arriving.pop(stream_id).cancel()
            self._refuse(stream_id, DragomanError(error_pb2.ERROR_REASON_CANCELLED, "cancelled before it was accepted"))

    def _refuse(self, stream_id: int, error: DragomanError) -> None:
        self._frame.events.add(stream_id=stream_id).refused.CopyFrom(error.to_detail())
        self._wake()

    def _take(self, stream_id: int, event: Event) -> None:
        if self._closed:
            return
        if type(event) is Delta:  # by far the most
            entry = self._frame.events.add()
            entry.stream_id = stream_id
            fill_delta(entry.response.delta, event, self._token_bytes)
        elif isinstance(event, Finished | Failed):
            entry = self._frame.events.add()
            entry.stream_id = stream_id
            fill_response(entry.response, event, self._token_bytes)
            self._streams.pop(stream_id, None)
        if not self._is_noted:
            self._is_noted = True
            self._engine.flush_after_batch(self._flush)

    def _open(self, stream_id: int, opening: Opening, event: Event) -> bool:
        """Say that a request is accepted, or that its first event refuses it (False)."""
        if self._closed:
            return False
        try:
            self._add_start(stream_id, opening.take(event))
        except DragomanError as error:
            self._streams.pop(stream_id, None)
            self._frame.events.add(stream_id=stream_id).refused.CopyFrom(error.to_detail())
            return False
        finally:
            self._engine.flush_after_batch(self._flush)
        return True

    def _wake(self) -> None:
        self._is_noted = False
        if self._wakeup is not None and not self._wakeup.done():
            self._wakeup.set_result(None)


class _StreamSink:
    """Names the generation of an event."""

    __slots__ = ("_connection", "_stream_id", "deliver")

    def __init__(self, connection: AttachConnection, stream_id: int) -> None:
        self._connection = connection
        self._stream_id = stream_id
        self.deliver: Callable[[Event], None] = partial(connection._take, stream_id)

    def open_late(self, opening: Opening) -> None:
        """The engine's first event says whether the request is accepted."""
        self.deliver = partial(self._take_first, opening)

    def _take_first(self, opening: Opening, event: Event) -> None:
        self.deliver = partial(self._connection._take, self._stream_id)
        if self._connection._open(self._stream_id, opening, event):
            self.deliver(event)
