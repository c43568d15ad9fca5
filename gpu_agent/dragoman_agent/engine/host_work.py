"""How long the engine's thread works on a step, by part; what the device does meanwhile is not in it."""

from __future__ import annotations

import time
from typing import Protocol


class HostTrace(Protocol):
    """Hears of each part; see trace.py."""

    def host(self, part: str, begun: float, ended: float) -> None:
        """One part, in seconds of `time.perf_counter`."""


class HostWork:
    """Owns the time since the last step's frame. That frame's own encoding and sending count for the next one."""

    __slots__ = ("_seconds", "_trace")

    def __init__(self, trace: HostTrace | None = None) -> None:
        self._seconds = 0.0
        self._trace = trace

    def done(self, part: str, begun: float) -> float:
        """`part` took from `begun` to now, both in seconds of `time.perf_counter`; now."""
        now = time.perf_counter()
        self._seconds += now - begun
        if self._trace is not None:
            self._trace.host(part, begun, now)
        return now

    def beside(self, part: str, begun: float) -> None:
        """`part` took from `begun` to now and is no step's work: it is in the trace alone."""
        if self._trace is not None:
            self._trace.host(part, begun, time.perf_counter())

    def take(self) -> float:
        """Seconds of work since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds
