"""uvicorn's HTTP protocol with deadlines for headers, a limit on their size, and our error envelope."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from dragoman_gateway.errors import ApiError, envelope
from dragoman_gateway.streaming import TRANSPORT_KEY

MAX_HEADER_BYTES = 2 << 20


class GatewayProtocol(HttpToolsProtocol):
    """One connection. `header_timeout_seconds` also ends a connection that never sends anything."""

    header_timeout_seconds = 30.0

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._header_timer: asyncio.TimerHandle | None = None
        self._num_header_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts the deadline of the first request's headers."""
        super().connection_made(transport)
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the deadline."""
        self._disarm()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """Starts the deadline of a request's headers, and hands the transport to the app, for dropping a stuck reader."""
        super().on_message_begin()
        self.scope[TRANSPORT_KEY] = self.transport  # type: ignore[literal-required]
        self._num_header_bytes = 0
        if self._header_timer is None:
            self._arm()

    def on_url(self, url: bytes) -> None:
        """Counts the URL as a header."""
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Counts the header."""
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Stops the deadline; the body has its own."""
        self._disarm()
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        """Feeds the parser unless the connection is being closed."""
        if self.parser is not None and not self.transport.is_closing():
            super().data_received(data)

    def send_400_response(self, msg: str) -> None:
        """Answers what is not HTTP, unless the parser was stopped after an answer of ours."""
        if not self.transport.is_closing():
            self._refuse(ApiError(400, f"{msg} Send HTTP/1.1.", code="invalid_http"))

    def _count(self, num_bytes: int) -> None:
        self._num_header_bytes += num_bytes
        if self._num_header_bytes > MAX_HEADER_BYTES:
            limit = f"the request's headers are over the limit of {MAX_HEADER_BYTES} bytes; send less"
            self._refuse(ApiError(431, limit, code="headers_too_large"))
            raise ValueError(limit)  # stops the parser, which reports it through send_400_response

    def _arm(self) -> None:
        self._header_timer = self.loop.call_later(self.header_timeout_seconds, self._late)

    def _disarm(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _late(self) -> None:
        self._header_timer = None
        if self.transport.is_closing():
            return
        message = f"the request's headers did not arrive within {self.header_timeout_seconds:g} s; send them faster"
        self._refuse(ApiError(408, message, type="timeout", code="timeout"))

    def _refuse(self, error: ApiError) -> None:
        body = envelope(error)
        lines = [
            STATUS_LINE[error.status],
            b"content-type: application/json\r\n",
            b"access-control-allow-origin: *\r\n",
            b"x-request-id: req_" + uuid.uuid4().hex.encode() + b"\r\n",
            b"content-length: " + str(len(body)).encode() + b"\r\n",
            b"connection: close\r\n\r\n",
            body,
        ]
        self.transport.write(b"".join(lines))
        self.transport.close()
