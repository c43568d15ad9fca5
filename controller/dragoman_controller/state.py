"""The few things that the controllers of a cell share, and where they are kept: in memory, or in etcd by `etcd_store.py`.

Small and seldom written: the list of controllers, the cell keys, the policy. Nothing that a request waits for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import NamedTuple, Protocol


class Entry(NamedTuple):
    """A value and the store's revision at which it was written."""

    value: bytes
    revision: int


class RevisionConflict(Exception):
    """The key is not at the revision that the write was for."""


class StoreUnavailable(Exception):
    """The store does not answer; one line says which and why."""


class StateStore(Protocol):
    """Keys are texts such as "cell/policy"; revisions grow over the whole store. Every method may raise StoreUnavailable."""

    async def read(self, prefix: str) -> dict[str, Entry]:
        """Every key that begins with `prefix`."""

    async def write(self, key: str, value: bytes, expected_revision: int | None = None) -> int:
        """Writes and returns the new revision. `expected_revision` 0: only where the key is not there; None: in any case.

        Raises RevisionConflict.
        """

    async def hold(self, key: str, value: bytes, ttl_seconds: int) -> None:
        """Keeps a key alive: it is gone `ttl_seconds` after the last call, or at `release`. One key a store object."""

    async def release(self) -> None:
        """Ends what is held."""

    def watch(self, prefix: str) -> AsyncIterator[dict[str, Entry]]:
        """Every key that begins with `prefix`, at once and after each change; of several quick ones maybe only the last."""

    async def close(self) -> None:
        """Lets go of the connections; what is held ends by itself."""


class MemoryStore:
    """Keeps everything in this process. `held` says for how long, by the event loop's clock."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._revision = 0
        self._changed = asyncio.Event()
        self._held: tuple[str, asyncio.TimerHandle] | None = None

    async def read(self, prefix: str) -> dict[str, Entry]:
        """See StateStore."""
        return {key: entry for key, entry in self._entries.items() if key.startswith(prefix)}

    async def write(self, key: str, value: bytes, expected_revision: int | None = None) -> int:
        """See StateStore."""
        present = self._entries.get(key)
        if expected_revision is not None and expected_revision != (present.revision if present else 0):
            raise RevisionConflict(key)
        self._revision += 1
        self._entries[key] = Entry(value, self._revision)
        self._tell()
        return self._revision

    async def hold(self, key: str, value: bytes, ttl_seconds: int) -> None:
        """See StateStore."""
        present = self._entries.get(key)
        if present is None or present.value != value:
            await self.write(key, value)
        if self._held is not None:
            self._held[1].cancel()
        self._held = key, asyncio.get_running_loop().call_later(ttl_seconds, self._drop, key)

    async def release(self) -> None:
        """See StateStore."""
        if self._held is not None:
            self._held[1].cancel()
            self._drop(self._held[0])

    async def watch(self, prefix: str) -> AsyncIterator[dict[str, Entry]]:
        """See StateStore."""
        while True:
            changed = self._changed
            yield await self.read(prefix)
            await changed.wait()

    async def close(self) -> None:
        """See StateStore."""
        if self._held is not None:
            self._held[1].cancel()

    def _drop(self, key: str) -> None:
        self._held = None
        if self._entries.pop(key, None) is not None:
            self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
