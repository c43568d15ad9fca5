"""The interval of a watch: one rule for every service that has one."""

from __future__ import annotations

from typing import Protocol

from google.protobuf.duration_pb2 import Duration

from dragoman.durations import seconds_of
from dragoman.errors import DragomanError
from dragoman.v1 import error_pb2

MIN_INTERVAL_SECONDS = 0.02
MAX_INTERVAL_SECONDS = 3600.0


class HasInterval(Protocol):
    """A request of a watch."""

    @property
    def interval(self) -> Duration:
        """Time between messages."""

    def HasField(self, name: str) -> bool:
        """Whether a field is set."""


def interval_of(request: HasInterval, default: float) -> float:
    """Seconds between two messages of a watch. Raises DragomanError outside 20 ms to an hour."""
    if not request.HasField("interval"):
        return default
    seconds = seconds_of(request.interval)
    if not MIN_INTERVAL_SECONDS <= seconds <= MAX_INTERVAL_SECONDS:
        raise DragomanError(
            error_pb2.ERROR_REASON_INVALID_REQUEST,
            f"interval: is {seconds:g} s, must be {MIN_INTERVAL_SECONDS:g} to {MAX_INTERVAL_SECONDS:g} s",
            metadata={"param": "interval"},
        )
    return seconds
