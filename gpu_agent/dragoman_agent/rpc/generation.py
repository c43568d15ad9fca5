"""GenerationService: Generate, Attach and CancelGeneration."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import cast

from dragoman.errors import DragomanError
from dragoman.serving import Context
from dragoman.v1 import error_pb2, generation_service_pb2, generation_service_pb2_grpc
from dragoman_agent.engine.messages import Delta, Embedded, Failed, Finished, Opened, Start
from dragoman_agent.rpc.acceptance import Acceptance
from dragoman_agent.rpc.attach import AttachConnection
from dragoman_agent.rpc.convert import fill_response, merge_deltas
from dragoman_agent.rpc.engine_client import EngineClient, Event
from dragoman_agent.rpc.opening import Opening
from dragoman_agent.rpc.served_model import ServedModel
from dragoman_agent.rpc.validate import check_request_id

CREDIT_WINDOW = 256
# Credit is granted in pieces of a quarter window: one command to the engine for 64 tokens and not for each.
CREDIT_PIECE = 64
# A client that takes nothing for 60 s has lost its place; its last message gets this long to leave.
LAST_WRITE_SECONDS = 5.0


class GenerationServicer(generation_service_pb2_grpc.GenerationServiceServicer):
    """Streams tokens. Whatever ends a stream early frees its blocks within two engine steps."""

    def __init__(self, engine: EngineClient, acceptance: Acceptance, model: ServedModel, epoch: int) -> None:
        """`epoch` marks every Attach frame."""
        self._engine = engine
        self._acceptance = acceptance
        self._model = model
        self._epoch = epoch
        self._open_attaches: set[AttachConnection] = set()

    async def Generate(self, request: generation_service_pb2.GenerateRequest, context: Context) -> None:
        """One request: a start, deltas, one end. Deltas of a choice that wait for the reader are merged."""
        attempt = self._acceptance.begin(request, context.time_remaining())
        if attempt.prompt_ids is None:
            await self._acceptance.tokenize(attempt)
        stream = GenerateStream()
        start, started = self._acceptance.accept(attempt, stream)
        opening = Opening(start, started, self._model.token_bytes)
        try:
            if opening.is_open:
                await context.write(generation_service_pb2.GenerateResponse(started=started))
            await self._pump(stream, start, opening, context)
        except asyncio.CancelledError:
            if stream.failure is None:
                raise
            # Only the hanging write was given up, not the call: its status waits behind what the client has not read.
            stream.handler.uncancel()
            raise stream.failure from None
        finally:
            self._engine.cancel(start.request_id, detach=True)

    async def _pump(self, stream: GenerateStream, start: Start, opening: Opening, context: Context) -> None:
        cursors = CursorTrack(start)
        granted = start.credit
        while True:
            for event in await stream.next_batch():
                if not opening.is_open:
                    await context.write(generation_service_pb2.GenerateResponse(started=opening.take(event)))
                if isinstance(event, Opened):
                    continue
                message = generation_service_pb2.GenerateResponse()
                fill_response(message, event, self._model.token_bytes)
                await context.write(message)
                if not isinstance(event, Delta):
                    return
                cursors.advance(event)
            wanted = cursors.least_open() + CREDIT_WINDOW
            if wanted - granted >= CREDIT_PIECE:
                granted = wanted
                self._engine.grant(start.request_id, granted)

    async def Attach(
        self,
        request_iterator: AsyncIterator[generation_service_pb2.AttachRequest],
        context: Context,
    ) -> None:
        """Many requests of one gateway: one frame a step with the events of all of them."""
        connection = AttachConnection(self._engine, self._acceptance, self._model, self._epoch)
        self._open_attaches.add(connection)
        try:
            await connection.serve(request_iterator, context)
        finally:
            self._open_attaches.discard(connection)
            connection.close()

    async def CancelGeneration(
        self, request: generation_service_pb2.CancelGenerationRequest, context: Context
    ) -> generation_service_pb2.CancelGenerationResponse:
        """Cancel by id from anywhere; the stream of the request ends with `finished`."""
        check_request_id(request.request_id)
        self._engine.cancel(request.request_id)
        return generation_service_pb2.CancelGenerationResponse()

    def finish_attaches(self) -> None:
        """End each Attach once its last generation has ended: the agent is closing."""
        for connection in self._open_attaches:
            connection.finish()


class GenerateStream:
    """The events of one request between the engine's frames and its handler."""

    def __init__(self) -> None:
        self._events: deque[Opened | Delta | Finished | Failed] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self.handler = cast("asyncio.Task[None]", asyncio.current_task())
        self.failure: DragomanError | None = None  # why a write that hangs was given up

    def deliver(self, event: Event) -> None:
        """One event; merged with the last where it continues that."""
        if isinstance(event, Embedded):
            return
        if self._events and isinstance(event, Delta) and isinstance(self._events[-1], Delta):
            merged = merge_deltas(self._events[-1], event)
            if merged is not None:
                self._events[-1] = merged
                return
        self._events.append(event)
        if isinstance(event, Failed) and event.reason == error_pb2.ERROR_REASON_CREDIT_TIMEOUT:
            asyncio.get_running_loop().call_later(LAST_WRITE_SECONDS, self._give_up, event)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _give_up(self, event: Failed) -> None:
        """The client has taken nothing for a minute and its place is gone: end the call without its last message."""
        if not self.handler.done():
            self.failure = DragomanError(error_pb2.ERROR_REASON_CREDIT_TIMEOUT, event.message)
            self.handler.cancel()

    async def next_batch(self) -> list[Opened | Delta | Finished | Failed]:
        """The events at hand, at least one."""
        if not self._events:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        batch = list(self._events)
        self._events.clear()
        return batch


class CursorTrack:
    """How far the client has taken each choice."""

    def __init__(self, start: Start) -> None:
        self._ends = {
            choice: len(start.delivered[choice]) if start.delivered else 0
            for choice in range(start.num_choices)
            if choice not in start.finished_choices
        }
        self._begun: set[int] = set()
        self._last = 0

    def advance(self, delta: Delta) -> None:
        """The client took a delta."""
        self._last = delta.cursor + len(delta.token_ids)
        self._begun.add(delta.choice)
        if delta.finish:
            self._ends.pop(delta.choice, None)
        elif delta.choice in self._ends:
            self._ends[delta.choice] = self._last

    def least_open(self) -> int:
        """Cursor of the running choice that is furthest behind; one that has not begun does not hold the others up."""
        return min((end for choice, end in self._ends.items() if choice in self._begun), default=self._last)
