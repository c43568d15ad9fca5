"""What every server process sets up alike: its log, its event loop, and /metrics beside it."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import asyncio

    from prometheus_client import CollectorRegistry
    from prometheus_client.core import CounterMetricFamily

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class LogHandler(logging.StreamHandler):  # type: ignore[type-arg]  # a generic class in the stubs alone
    """Writes records to stderr. Those that cannot be written, as on a full disk, are counted, and told of once writing works.

    Past Python's buffer: what stays in there would make the process end with an error that nobody can explain.
    """

    num_lost = 0  # of all handlers of the process

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self._untold = 0
        self._problem = ""

    def emit(self, record: logging.LogRecord) -> None:
        """See Handler. Never raises for a write that fails."""
        try:
            descriptor = self.stream.fileno()
        except io.UnsupportedOperation:  # a stand-in for stderr, as in tests
            super().emit(record)
            return
        try:
            line = self.format(record) + "\n"
        except Exception:  # what logging does: a record that cannot be formatted must not end the program
            self.handleError(record)
            return
        if self._untold:
            line = f"{self._untold} log records before this one were lost: {self._problem}\n{line}"
        try:
            data = line.encode(errors="backslashreplace")
            while data:
                data = data[os.write(descriptor, data) :]
        except OSError as error:
            self._problem = error.strerror or str(error)
            self._untold += 1
            LogHandler.num_lost += 1
        else:
            self._untold = 0


class _LostRecords:
    """The counter of lost log records, as a Prometheus collector."""

    def collect(self) -> Iterator[CounterMetricFamily]:
        """One family."""
        from prometheus_client.core import CounterMetricFamily

        about = "Log records that could not be written, such as on a full disk"
        yield CounterMetricFamily("dragoman_log_records_lost", about, value=LogHandler.num_lost)


def count_lost_records(registry: CollectorRegistry) -> None:
    """Show on /metrics how many log records were lost: the alarm that a full disk cannot swallow."""
    registry.register(_LostRecords())


def leave(code: int) -> NoReturn:
    """End the process, in which everything is closed, without the interpreter's end: that takes a third of a second, and waits
    for threads of gRPC that need not answer any more.
    """
    logging.shutdown()
    if sys.stdout is not None:  # which it is where whoever started the process closed it
        with contextlib.suppress(OSError):
            sys.stdout.flush()
    os._exit(code)


def log_to_stderr(level: str) -> None:
    """Records of `level` ("info") and above go to stderr, one line each."""
    logging.basicConfig(handlers=[LogHandler()], level=level.upper(), format=_FORMAT)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's event loop; None, which means asyncio's own, where the package does not exist (Windows)."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


class MetricsServer:
    """/metrics over HTTP, on a thread of its own so that a slow scraper never holds the event loop."""

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        """Bind and serve; port 0 takes a free one, `port` says which. Raises OSError when it cannot be taken."""
        from prometheus_client import start_http_server

        count_lost_records(registry)
        self._host = host
        self._server, thread = start_http_server(port, host, registry)
        self._thread: threading.Thread = thread
        self.port: int = self._server.server_port

    def close(self) -> None:
        """Stop serving and free the port."""
        stopping = threading.Thread(target=self._server.shutdown, daemon=True)
        stopping.start()
        # The server looks twice a second whether it is to stop, or when somebody comes.
        with contextlib.suppress(OSError):
            socket.create_connection((self._host, self.port), timeout=1).close()
        stopping.join()
        self._server.server_close()
        self._thread.join(timeout=2)
