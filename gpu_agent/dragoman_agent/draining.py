"""The agent's way out: announce it, refuse new requests, wait for those under way, hand over what is left, leave."""

from __future__ import annotations

import asyncio
import logging
import math
from typing import Protocol

logger = logging.getLogger(__name__)


class DrainHost(Protocol):
    """What is drained."""

    @property
    def num_live(self) -> int:
        """Requests under way."""

    async def announce_drain(self) -> None:
        """Not ready any more; requests are still taken, for those who have not heard."""

    def close_door(self) -> None:
        """Take no new requests."""

    async def wait_idle(self) -> None:
        """Until no request is under way."""

    async def reopen(self) -> None:
        """Ready again."""

    def leave(self) -> None:
        """End the process; what is under way is handed over."""


class Drainer:
    """Owns the one drain there is. Asking again may shorten it, never lengthen it."""

    def __init__(self, host: DrainHost, *, notice_seconds: float, limit_seconds: float) -> None:
        """`limit_seconds`: the budget of a drain that names none."""
        self._host = host
        self._notice_seconds = notice_seconds
        self._limit_seconds = limit_seconds
        self._by = math.inf
        self._is_final = False
        self._task: asyncio.Task[None] | None = None
        self._scope: asyncio.Timeout | None = None

    def drain(self, grace_seconds: float | None, *, final: bool = False) -> None:
        """Begin, or hurry. `final`: by a signal, which nobody can take back."""
        limit = self._limit_seconds if grace_seconds is None else grace_seconds
        self._by = min(self._by, asyncio.get_running_loop().time() + limit)
        self._is_final |= final
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        elif self._scope is not None:
            self._scope.reschedule(self._by)

    def undrain(self) -> str:
        """Take it back; empty, or why that cannot be."""
        if self._task is None:
            return ""
        if self._is_final:
            return "it was told to stop by a signal"
        if self._task.done():
            return "its drain is over, it is leaving"
        self._task.cancel()
        self._task, self._scope, self._by = asyncio.create_task(self._reopen()), None, math.inf
        logger.info("the drain was taken back: serving again")
        return ""

    def cancel(self) -> None:
        """Stop waiting: the process ends anyway."""
        if self._task is not None:
            self._task.cancel()

    async def _reopen(self) -> None:
        self._task = None
        await self._host.reopen()

    async def _run(self) -> None:
        logger.info("draining: %d requests under way", self._host.num_live)
        await self._host.announce_drain()
        left = self._by - asyncio.get_running_loop().time()
        await asyncio.sleep(min(self._notice_seconds, max(left, 0.0)))
        self._host.close_door()
        try:
            async with asyncio.timeout_at(self._by) as self._scope:
                await self._host.wait_idle()
        except TimeoutError:
            logger.warning("the drain's time is over: handing over %d requests", self._host.num_live)
        self._host.leave()
