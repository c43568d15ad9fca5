"""The newest live sample and the events since: what WatchHardware sends. Used from one event loop."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable

from dragoman.durations import duration_of
from dragoman.v1 import hardware_pb2
from dragoman_agent.pal.live import Sample

_MAX_EVENTS_BEHIND = 64


class _Watcher:
    def __init__(self) -> None:
        self.events: deque[str] = deque(maxlen=_MAX_EVENTS_BEHIND)
        self.woken = asyncio.Event()


class LiveFeed:
    """Holds the newest sample and hands each event to every watcher; one that falls 64 behind loses the oldest."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._watchers: set[_Watcher] = set()
        self._taken_at = 0.0
        self.sample: Sample | None = None

    def publish(self, sample: Sample) -> None:
        """A new sample; watchers see it at their next interval."""
        self.sample, self._taken_at = sample, self._clock()

    def announce(self, event: str) -> None:
        """Something changed: every watcher is told at once."""
        for watcher in self._watchers:
            watcher.events.append(event)
            watcher.woken.set()

    def limits(self, event: str = "") -> hardware_pb2.LiveLimits:
        """The newest sample as a message. What cannot be read is unset."""
        sample = self.sample or Sample()
        message = hardware_pb2.LiveLimits(
            temperature_celsius=sample.temperature_celsius,
            power_watts=sample.power_watts,
            power_limit_watts=sample.power_limit_watts,
            clock_hertz=sample.clock_hertz,
            link_generation=sample.link_generation,
            link_width=sample.link_width,
            foreign_memory_bytes=sample.foreign_memory_bytes,
            free_memory_bytes=sample.free_memory_bytes,
            event=event,
        )
        if self.sample is not None:
            message.age.CopyFrom(duration_of(self._clock() - self._taken_at))
        return message

    async def watch(self, interval: float) -> AsyncIterator[hardware_pb2.LiveLimits]:
        """The limits at once, then every `interval` seconds and at each event."""
        watcher = _Watcher()
        self._watchers.add(watcher)
        try:
            yield self.limits()
            while True:
                try:
                    await asyncio.wait_for(watcher.woken.wait(), interval)
                except TimeoutError:
                    yield self.limits()
                watcher.woken.clear()
                while watcher.events:
                    yield self.limits(watcher.events.popleft())
        finally:
            self._watchers.discard(watcher)
