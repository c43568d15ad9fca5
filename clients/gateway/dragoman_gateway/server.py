"""The gateway process: its socket, its loop, its signals."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import socket
import sys
from collections.abc import Callable, Generator

import uvicorn
from uvicorn.config import Config

from dragoman.address import host_port
from dragoman.controllers import Controllers
from dragoman.tls import TlsError, TlsIdentity, read_tls
from dragoman_cli.ports import listen_problem
from dragoman_cli.process import loop_factory
from dragoman_gateway.app import GatewayApp
from dragoman_gateway.backend import Backend
from dragoman_gateway.config import GatewaySettings
from dragoman_gateway.protocol import GatewayProtocol
from dragoman_gateway.tenants import ApiKeys, read_keys

logger = logging.getLogger(__name__)

STOP_SECONDS = 3
_BACKLOG = 4096
# What the kernel buffers for a reader that has stopped: it would take a whole long answer by itself otherwise.
_SEND_BUFFER_BYTES = 256 << 10


class StartError(Exception):
    """The gateway cannot start. One line: what, why, what to do."""


class _Server(uvicorn.Server):
    """uvicorn without its own signal handling, that says when it serves."""

    def __init__(self, config: Config, on_serving: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_serving = on_serving

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept connections."""
        await super().startup(sockets)
        if self.started:
            self._on_serving()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def read_controllers(settings: GatewaySettings) -> Controllers:
    """The controllers to ask. Raises StartError for a list that cannot be used."""
    try:
        return Controllers(settings.controller)
    except ValueError as error:
        raise StartError(f"--controller: {error}") from None


def read_identity(settings: GatewaySettings) -> TlsIdentity | None:
    """Who the gateway is towards controllers and agents. Raises StartError for files that cannot be used."""
    try:
        return read_tls(settings.tls_certificate, settings.tls_key, settings.tls_ca)
    except TlsError as error:
        raise StartError(str(error)) from None


def read_api_keys(settings: GatewaySettings) -> ApiKeys:
    """The accepted keys. Raises StartError for a file that cannot be used."""
    try:
        return read_keys(settings.api_key, settings.api_key_file)
    except ValueError as error:
        raise StartError(str(error)) from None


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises StartError when the address cannot be had."""
    if problem := listen_problem(host, port, "--port"):
        raise StartError(problem)
    family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        listener.bind(address)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise StartError(f"cannot listen on {host_port(host, port)}: {error.strerror or error}") from None
    return listener


def run(settings: GatewaySettings, listener: socket.socket, keys: ApiKeys, tls: TlsIdentity | None) -> None:
    """Serve on a loop of its own until a signal ends it."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(serve(settings, listener, keys, tls))


async def serve(
    settings: GatewaySettings, listener: socket.socket, keys: ApiKeys, tls: TlsIdentity | None = None
) -> None:
    """Serve until SIGTERM (finish, then stop) or SIGINT (stop now, each stream with its end; a second one at once)."""
    GatewayProtocol.header_timeout_seconds = settings.header_timeout
    backend = Backend(settings, tls)
    config = Config(
        GatewayApp(backend, keys),
        http=GatewayProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=True,
        proxy_headers=False,
        timeout_keep_alive=settings.keep_alive,  # type: ignore[arg-type]
        timeout_graceful_shutdown=STOP_SECONDS,
    )
    server = _Server(config, lambda: _announce(settings, listener))
    stop = _Stop(server, backend, settings.drain_timeout)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, stop.now)
    loop.add_signal_handler(signal.SIGTERM, stop.gently)
    backend.start()
    try:
        await server.serve(sockets=[listener])
    finally:
        await backend.close()


class _Stop:
    """What the signals do."""

    def __init__(self, server: uvicorn.Server, backend: Backend, drain_seconds: float) -> None:
        self._server = server
        self._backend = backend
        self._drain_seconds = drain_seconds
        self._draining: asyncio.Task[None] | None = None

    def now(self) -> None:
        """SIGINT."""
        if self._server.should_exit:
            self._server.force_exit = True
            return
        logger.info("stopping: running streams end with an error event")
        self._backend.stop_now()
        self._server.should_exit = True

    def gently(self) -> None:
        """SIGTERM."""
        if self._draining is None:
            logger.info("draining: %d requests under way", self._backend.num_jobs)
            self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        await self._backend.drain(self._drain_seconds)
        self._server.should_exit = True


def _announce(settings: GatewaySettings, listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    address = host_port(host, port)
    logger.info("serving http://%s, controller %s", address, settings.controller)
    if settings.announce:
        sys.stdout.write(json.dumps({"event": "serving", "http": address}) + "\n")
        sys.stdout.flush()
