"""What every server process sets up alike: its log, its event loop, and /metrics beside it."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry


def log_to_stderr(level: str) -> None:
    """Records of `level` ("info") and above go to stderr, one line each."""
    logging.basicConfig(
        stream=sys.stderr, level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )


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

        self._server, thread = start_http_server(port, host, registry)
        self._thread: threading.Thread = thread
        self.port: int = self._server.server_port

    def close(self) -> None:
        """Stop serving and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=2)
