"""One generation as a stream of messages, in whatever protocol: credit, slow readers, and what its end frees."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import Any, Protocol, cast

from dragoman.errors import DragomanError
from dragoman.serving import Context
from dragoman.v1 import error_pb2, generation_service_pb2
from dragoman_agent.engine.messages import Delta, Embedded, Failed, Finished, Opened, Start
from dragoman_agent.rpc.acceptance import Acceptance
from dragoman_agent.rpc.convert import TokenBytes, merge_deltas
from dragoman_agent.rpc.engine_client import EngineClient, Event
from dragoman_agent.rpc.opening import Opening

CREDIT_WINDOW = 256
# Credit is granted in pieces of a quarter window: one command to the engine for 64 tokens and not for each.
CREDIT_PIECE = 64
# A client that takes nothing for 60 s has lost its place; its last message gets this long to leave.
LAST_WRITE_SECONDS = 5.0


class Replies(Protocol):
    """What one protocol says of one generation. A DragomanError that it raises ends the call."""

    def of_start(self, start: Start, started: generation_service_pb2.GenerationStarted) -> Iterable[Any]:
        """The messages for an accepted request."""

    def of_event(self, event: Delta | Finished | Failed) -> Iterable[Any]:
        """The messages for one event. Finished and Failed are the last."""


async def stream_generation(
    engine: EngineClient,
    acceptance: Acceptance,
    token_bytes: TokenBytes,
    request: generation_service_pb2.GenerateRequest,
    context: Context,
    replies: Replies,
) -> None:
    """Accept and run one request, writing its replies. Whatever ends it early frees its blocks. Raises DragomanError."""
    attempt = acceptance.begin(request, context.time_remaining())
    if attempt.prompt_ids is None:
        await acceptance.tokenize(attempt)
    stream = GenerateStream()
    start, started = acceptance.accept(attempt, stream)
    opening = Opening(start, started, token_bytes)
    try:
        if opening.is_open:
            for message in replies.of_start(start, started):
                await context.write(message)
        await _pump(engine, stream, start, opening, context, replies)
    except asyncio.CancelledError:
        if stream.failure is None:
            raise
        # Only the hanging write was given up, not the call: its status waits behind what the client has not read.
        stream.handler.uncancel()
        raise stream.failure from None
    finally:
        engine.cancel(start.request_id, detach=True)


async def _pump(
    engine: EngineClient, stream: GenerateStream, start: Start, opening: Opening, context: Context, replies: Replies
) -> None:
    cursors = CursorTrack(start)
    granted = start.credit
    while True:
        for event in await stream.next_batch():
            if not opening.is_open:
                for message in replies.of_start(start, opening.take(event)):
                    await context.write(message)
            if isinstance(event, Opened):
                continue
            for message in replies.of_event(event):
                await context.write(message)
            if not isinstance(event, Delta):
                return
            cursors.advance(event)
        wanted = cursors.least_open() + CREDIT_WINDOW
        if wanted - granted >= CREDIT_PIECE:
            granted = wanted
            engine.grant(start.request_id, granted)


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
