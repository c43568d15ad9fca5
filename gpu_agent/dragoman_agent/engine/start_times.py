"""Where the time of an engine's start goes, part by part: for the log, the agent's record of its start and the benchmark."""

from __future__ import annotations

import time

import psutil


class StartTimes:
    """Marks follow each other; the first part begins with the process itself."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic() - max(time.time() - psutil.Process().create_time(), 0.0)

    def mark(self, part: str) -> None:
        """What has passed since the mark before was `part`; a part that comes again adds up."""
        now = time.monotonic()
        self.seconds[part] = round(self.seconds.get(part, 0.0) + now - self._last, 3)
        self._last = now

    def __str__(self) -> str:
        return ", ".join(f"{part} {seconds:.2f} s" for part, seconds in self.seconds.items())
