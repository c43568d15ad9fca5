"""Seconds to and from the protocol's Duration."""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration


def seconds_of(duration: Duration) -> float:
    """A Duration in seconds."""
    return float(duration.seconds + duration.nanos / 1e9)


def duration_of(seconds: float) -> Duration:
    """Seconds as a Duration; negative ones count as none."""
    nanos = round(max(seconds, 0.0) * 1e9)
    return Duration(seconds=nanos // 1_000_000_000, nanos=nanos % 1_000_000_000)
