"""A control group with a limit of memory, of version 1 or 2, made below the caller's own where that is permitted."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.needs import skip_without

_ROOT = Path("/sys/fs/cgroup")


class MemoryGroup:
    """Processes that share a limit."""

    def __init__(self, path: Path, version: int) -> None:
        self._path, self._version = path, version

    def add(self, pid: int) -> None:
        """Move a process in."""
        (self._path / "cgroup.procs").write_text(str(pid))

    def limit(self, num_bytes: int) -> None:
        """The most they may use together."""
        (self._path / ("memory.max" if self._version == 2 else "memory.limit_in_bytes")).write_text(str(num_bytes))

    @property
    def num_killed(self) -> int:
        """Processes that the kernel has killed for want of memory."""
        name = "memory.events" if self._version == 2 else "memory.oom_control"
        counts = dict(line.split() for line in (self._path / name).read_text().splitlines())
        return int(counts["oom_kill"])

    def remove(self) -> None:
        """Once its processes are gone."""
        for _ in range(100):
            with contextlib.suppress(OSError):
                self._path.rmdir()
                return
            time.sleep(0.05)


@contextmanager
def memory_group(name: str) -> Iterator[MemoryGroup]:
    """A group for the test; it is skipped by name where none can be made."""
    group = _make(name)
    try:
        yield group
    finally:
        group.remove()


def _make(name: str) -> MemoryGroup:
    group = _try_to_make(name)
    if group is None:
        skip_without("cgroup", "needs a control group with a memory limit, which may not be made here")
    return group


def _try_to_make(name: str) -> MemoryGroup | None:
    for version, parent in _parents():
        path = parent / name
        with contextlib.suppress(OSError):
            path.mkdir()
            if (path / ("memory.max" if version == 2 else "memory.limit_in_bytes")).exists():
                return MemoryGroup(path, version)
            path.rmdir()
    return None


def _parents() -> Iterator[tuple[int, Path]]:
    """Where a group may be made: beside the caller's processes in version 1, and at the root in version 2, whose inner groups
    may hold no processes."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            yield 1, _ROOT / "memory" / path.lstrip("/")
    yield 2, _ROOT
