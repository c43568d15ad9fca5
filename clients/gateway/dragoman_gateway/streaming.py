"""The HTTP side of a stream: headers, coalesced writes, pings, credit for what was written, slow and vanished readers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from dragoman.errors import DragomanError
from dragoman.v1 import error_pb2
from dragoman_gateway.errors import ApiError, envelope, from_dragoman
from dragoman_gateway.http import ClientGone, client_gone
from dragoman_gateway.sse import HEADERS, PING, error_event

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.25
TRANSPORT_KEY = "dragoman.transport"
SEND_KEY = "dragoman.send"  # the server's own, without the layers that only look at the headers


class Source(Protocol):
    """What a stream sends."""

    @property
    def failure(self) -> Exception | None:
        """Why it ended early."""

    def first(self) -> bytes:
        """What goes out with the headers; may be empty."""

    async def next(self) -> bytes:
        """The next bytes, complete events only; b"" when there are no more. Raises what ends the stream early."""

    def last(self) -> bytes:
        """The end, sent after the last bytes."""

    def written(self) -> None:
        """What `next` gave has been taken."""

    def abort(self, error: Exception) -> None:
        """Make `next` raise."""


class ActiveStreams:
    """Every stream being written, looked over by one timer: pings the silent, drops readers that take nothing."""

    def __init__(self, ping_seconds: float, write_timeout_seconds: float) -> None:
        self._ping_seconds = ping_seconds
        self._write_timeout_seconds = write_timeout_seconds
        self._writers: set[_Writer] = set()

    def add(self, writer: _Writer) -> None:
        """Look after `writer` from now on."""
        self._writers.add(writer)

    def discard(self, writer: _Writer) -> None:
        """Its stream has ended."""
        self._writers.discard(writer)

    async def run(self) -> None:
        """Look them over until cancelled."""
        while True:
            await asyncio.sleep(TICK_SECONDS)
            now = time.monotonic()
            for writer in list(self._writers):
                if writer.is_stuck(now, self._write_timeout_seconds):
                    writer.drop()
                elif self._ping_seconds and writer.is_silent(now, self._ping_seconds):
                    writer.ping()


class _Writer:
    """Writes to one client, and knows since when a write has been waiting for it."""

    def __init__(self, send: Send, transport: Any, source: Source) -> None:
        self._send = send
        self._transport = transport
        self._source = source
        self._waiting_since: float | None = None
        self._last_write = time.monotonic()
        self._ping: asyncio.Task[None] | None = None

    async def write(self, message: Message) -> None:
        """One message; returns when the client's buffer has room for it."""
        self._waiting_since = time.monotonic()
        try:
            await self._send(message)
        finally:
            self._waiting_since = None
            self._last_write = time.monotonic()

    def is_silent(self, now: float, seconds: float) -> bool:
        """Whether nothing was written for `seconds`, though it could have been."""
        return self._waiting_since is None and now - self._last_write >= seconds

    def is_stuck(self, now: float, timeout_seconds: float) -> bool:
        """Whether a write has waited too long, or waits for a reader whose place the agent has given back."""
        if self._waiting_since is None:
            return False
        waited = now - self._waiting_since
        failure = self._source.failure
        gave_up = isinstance(failure, DragomanError) and failure.reason == error_pb2.ERROR_REASON_CREDIT_TIMEOUT
        return waited > timeout_seconds or (waited > 2 * TICK_SECONDS and gave_up)

    def ping(self) -> None:
        """Send a comment, which every client skips."""
        self._last_write = time.monotonic()
        self._ping = asyncio.ensure_future(self._send({"type": "http.response.body", "body": PING, "more_body": True}))

    def drop(self) -> None:
        """Cut the connection; what is still buffered is of no use to a reader that takes nothing."""
        logger.info("a reader took nothing for too long and was disconnected")
        if self._transport is not None:
            self._transport.abort()
        self._source.abort(ClientGone())

    async def settle(self) -> None:
        """Wait for a ping under way, so that it cannot follow the end."""
        if self._ping is not None:
            await self._ping


class EventStream(Response):
    """The response of a stream. An error in the middle becomes one error event, then the end."""

    def __init__(
        self,
        source: Source,
        active: ActiveStreams,
        headers: Mapping[str, str],
        on_end: Callable[[str, Exception | None], None],
    ) -> None:
        self.status_code = 200
        self.background = None
        self._source = source
        self._active = active
        self._on_end = on_end
        self.init_headers({**headers, **HEADERS})

    def init_headers(self, headers: Mapping[str, str] | None = None) -> None:
        """The header list. No content-length: the end is not known."""
        self.raw_headers = [(k.lower().encode("latin-1"), v.encode("latin-1")) for k, v in (headers or {}).items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the stream to its end."""
        writer = _Writer(scope.get(SEND_KEY, send), scope.get(TRANSPORT_KEY), self._source)
        gone = asyncio.ensure_future(client_gone(receive))
        gone.add_done_callback(lambda task: None if task.cancelled() else self._source.abort(ClientGone()))
        self._active.add(writer)
        outcome, failure = "cancelled", None
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            failure = await self._pump(writer)
            outcome = "cancelled" if isinstance(failure, ClientGone) else "ok" if failure is None else "error"
        finally:
            self._active.discard(writer)
            gone.cancel()
            self._on_end(outcome, failure)

    async def _pump(self, writer: _Writer) -> Exception | None:
        """Everything after the headers. Returns what ended it early."""
        failure: Exception | None = None
        try:
            data = self._source.first()
            if data:
                await writer.write({"type": "http.response.body", "body": data, "more_body": True})
            while data := await self._source.next():
                await writer.write({"type": "http.response.body", "body": data, "more_body": True})
                self._source.written()
            end = self._source.last()
        except ClientGone as error:
            return error
        except DragomanError as error:
            failure = error
            end = error_event(envelope(from_dragoman(error)))
        except ApiError as error:
            failure = error
            end = error_event(envelope(error))
        except Exception as error:
            logger.exception("a stream failed")
            failure = error
            end = error_event(envelope(internal_error()))
        await writer.settle()
        await writer.write({"type": "http.response.body", "body": end, "more_body": False})
        return failure


def internal_error() -> ApiError:
    """The 500 of a fault of ours; the traceback is in the log under the request's id."""
    return from_dragoman(
        DragomanError(
            error_pb2.ERROR_REASON_INTERNAL, "the gateway failed on this request; report it with the x-request-id"
        )
    )
