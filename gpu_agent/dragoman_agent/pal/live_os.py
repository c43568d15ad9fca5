"""Live samples of a CPU from the operating system: clock, memory, what other processes leave, and pressure."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil

from dragoman_agent.pal.attributes import usable_cores
from dragoman_agent.pal.live import Sample
from dragoman_agent.pal.live_source import OwnPids

_PRESSURE = Path("/sys/fs/cgroup/memory.pressure")
_SYSTEM_PRESSURE = Path("/proc/pressure/memory")
_STAT = Path("/proc/stat")


class OsSource:
    """Reads the host, or what a container lets one see of it."""

    name = "os"

    def __init__(self, own_pids: OwnPids) -> None:
        """`own_pids`: the processes whose memory and time are the agent's own."""
        self._own_pids = own_pids
        self._processes: dict[int, psutil.Process] = {}
        self._cores = usable_cores()
        self._last: tuple[float, float, float] | None = None  # wall, busy time of the host, own time

    def open(self) -> None:
        """See LiveSource."""

    def sample(self) -> Sample:
        """See LiveSource. Shares are over the time since the last sample; the first has none."""
        memory = psutil.virtual_memory()
        own_bytes, own_seconds = self._own()
        wall, busy = time.monotonic(), _busy_seconds()
        share = utilization = None
        if self._last is not None and wall - self._last[0] > 0.2:
            span = wall - self._last[0]
            own = max(own_seconds - self._last[2], 0.0)
            foreign = max(busy - self._last[1] - own, 0.0)
            idle_share = min(max(1.0 - foreign / (span * self._cores), 0.0), 1.0)
            share = max(idle_share, _fair_share(own / span))
            utilization = min(own / (span * self._cores), 1.0)
        self._last = (wall, busy, own_seconds)
        return Sample(
            source=self.name,
            clock_hertz=_clock(),
            total_memory_bytes=int(memory.total),
            free_memory_bytes=int(memory.available),
            foreign_memory_bytes=max(int(memory.total - memory.available) - own_bytes, 0),
            utilization_ratio=utilization,
            cpu_share_ratio=share,
            memory_stall_ratio=_memory_stalls(),
        )

    def _own(self) -> tuple[int, float]:
        """Resident bytes and processor seconds of our processes; one that ended meanwhile counts nothing."""
        num_bytes, seconds = 0, 0.0
        held = {}
        for pid in self._own_pids():
            try:
                process = self._processes.get(pid) or psutil.Process(pid)
                times = process.cpu_times()
                num_bytes += int(process.memory_info().rss)
            except psutil.Error:
                continue
            held[pid] = process
            seconds += times.user + times.system
        self._processes = held
        return num_bytes, seconds

    def wait(self, seconds: float) -> list[int]:
        """See LiveSource: an operating system reports no faults here."""
        time.sleep(seconds)
        return []

    def close(self) -> None:
        """See LiveSource."""


def _busy_seconds() -> float:
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    guest = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # counted in user and nice already
    return float(sum(times) - idle - guest)


def _fair_share(own_running: float) -> float:
    """What a scheduler that is fair leaves us where others would take every core: ours over all that are runnable.

    Of equal weight one thread a core competes with the others' threads on it; 0 where the system does not count them.
    """
    try:
        lines = _STAT.read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0.0
    for line in lines:
        name, _, count = line.partition(" ")
        if name == "procs_running":
            foreign = max(int(count) - 1 - own_running, 0.0)  # 1: the thread that reads
            return 1.0 / (1.0 + foreign / (os.cpu_count() or 1))
    return 0.0


def _clock() -> float | None:
    try:
        frequency = psutil.cpu_freq()
    except (OSError, NotImplementedError):  # psutil where the system tells no frequency
        return None
    return frequency.current * 1e6 if frequency and frequency.current else None


def _memory_stalls() -> float | None:
    """Share of the last ten seconds in which all tasks waited for memory, of this container or of the host."""
    for path in (_PRESSURE, _SYSTEM_PRESSURE):
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except OSError:
            continue
        for line in lines:
            kind, _, rest = line.partition(" ")
            if kind == "full":
                fields = dict(field.split("=") for field in rest.split())
                return float(fields["avg10"]) / 100
    return None
