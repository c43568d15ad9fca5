"""Where the time of an engine's start goes, part by part, and when what goes on beside is done: for the log, the agent's record and the benchmark."""

from __future__ import annotations

import os
import time
from pathlib import Path


class StartTimes:
    """Marks follow each other; the first part begins with the process itself."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.moments: dict[str, float] = {}  # seconds since the process began, of what goes on beside the parts
        self._last = self._begun = time.monotonic() - _process_age()

    def mark(self, part: str) -> None:
        """What has passed since the mark before was `part`; a part that comes again adds up."""
        now = time.monotonic()
        self.seconds[part] = round(self.seconds.get(part, 0.0) + now - self._last, 3)
        self._last = now

    def moment(self, what: str) -> None:
        """`what` is done now. By any thread."""
        self.moments[what] = round(time.monotonic() - self._begun, 3)

    def __str__(self) -> str:
        return ", ".join(f"{part} {seconds:.2f} s" for part, seconds in self.seconds.items())


def _process_age() -> float:
    """Seconds since this process was made, to a hundredth; 0 where the system does not tell (proc(5), stat, field 22)."""
    try:
        after_name = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2]
        ticks = int(after_name.split()[19])
        return max(time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"), 0.0)
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
