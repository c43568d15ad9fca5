"""A TCP relay in user space that resets, falls silent, delays and loses, on a thread of its own.

A lost segment shows itself to TCP's user as a pause: what was lost is sent again after the retransmission timeout, and what
came behind it waits too. That pause is what `loss_share` makes, of `RETRANSMIT_SECONDS` (RFC 6298; Linux allows 200 ms).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

RETRANSMIT_SECONDS = 0.2
SEGMENT_BYTES = 1460


class Proxy:
    """Relays to `target`, an address that may be set once it is known. Attributes may be changed at any time."""

    def __init__(self, seed: int = 1) -> None:
        self.target = ""
        self.delay_seconds = 0.0
        self.loss_share = 0.0
        self.num_lost = 0
        self.num_reset = 0
        self._rng = random.Random(seed)
        self._flows: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._open = asyncio.Event()
        self._open.set()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server = self._run(asyncio.start_server(self._accept, "127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def _run(self, what: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(what, self._loop).result(10)

    # Faults.

    def reset(self) -> None:
        """Every connection ends with an RST in both directions; new ones are relayed."""
        self._run(self._reset())

    async def _reset(self) -> None:
        for writer in list(self._writers):
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
            self.num_reset += 1

    def fall_silent(self) -> None:
        """Nothing passes any more, and no connection ends: what a host without power looks like."""
        self._loop.call_soon_threadsafe(self._open.clear)

    def speak(self) -> None:
        """What waited goes on."""
        self._loop.call_soon_threadsafe(self._open.set)

    # Relaying.

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._flows.add(task)
        self._writers.add(writer)
        try:
            host, _, port = self.target.rpartition(":")
            try:
                there = await asyncio.open_connection(host, int(port))
            except OSError:
                return
            self._writers.add(there[1])
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._relay(reader, there[1]))
                    group.create_task(self._relay(there[0], writer))
            finally:
                self._writers.discard(there[1])
                there[1].transport.abort()
        except* (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._writers.discard(writer)
            self._flows.discard(task)
            writer.transport.abort()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One direction: each piece leaves when it is due, so that a delay costs no throughput."""
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        sending = asyncio.create_task(self._send(queue, writer))
        due = 0.0
        try:
            while data := await reader.read(1 << 16):
                due = max(due, self._loop.time() + self.delay_seconds)
                for _ in range(-(-len(data) // SEGMENT_BYTES)):
                    if self._rng.random() < self.loss_share:
                        self.num_lost += 1
                        due += RETRANSMIT_SECONDS
                queue.put_nowait((due, data))
            queue.put_nowait((due, b""))
            await sending
        finally:
            sending.cancel()
            with contextlib.suppress(asyncio.CancelledError, ConnectionError):
                await sending

    async def _send(self, queue: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
        while True:
            due, data = await queue.get()
            if (wait := due - self._loop.time()) > 0:
                await asyncio.sleep(wait)
            await self._open.wait()
            if not data:
                if writer.can_write_eof():
                    writer.write_eof()
                return
            writer.write(data)
            await writer.drain()

    def close(self) -> None:
        """End every connection and the thread."""
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _close(self) -> None:
        self._server.close()
        for task in list(self._flows):
            task.cancel()
        await asyncio.gather(*self._flows, return_exceptions=True)


@contextmanager
def proxies(count: int) -> Iterator[list[Proxy]]:
    """So many relays, closed afterwards."""
    made = [Proxy(seed=index) for index in range(count)]
    try:
        yield made
    finally:
        for proxy in made:
            proxy.close()
