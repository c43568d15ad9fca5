"""A disk of a few MB that can be filled up, in memory; the test is skipped by name where none may be mounted."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.needs import skip_without

_CHUNK = bytes(1 << 16)


class Disk:
    """Mounted at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._filler = path / "filler"

    def fill(self) -> None:
        """Until not a byte more fits."""
        with self._filler.open("ab", buffering=0) as file:
            for size in (len(_CHUNK), 1):
                with contextlib.suppress(OSError):
                    while file.write(_CHUNK[:size]):
                        pass

    def empty(self) -> None:
        """There is room again."""
        self._filler.unlink(missing_ok=True)


@contextmanager
def small_disk(path: Path, size: str = "1m") -> Iterator[Disk]:
    """A disk of this size at `path`."""
    path.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "dragoman-test", str(path)],
        capture_output=True, text=True, check=False, timeout=30,
    )  # fmt: skip
    if done.returncode != 0:
        skip_without("mount", f"needs to mount a small disk, which is not permitted here: {done.stderr.strip()}")
    try:
        yield Disk(path)
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True, timeout=30)
