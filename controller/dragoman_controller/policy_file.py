"""The policy file: read at start, and again when it has changed."""

from __future__ import annotations

from pathlib import Path

from dragoman_controller.policy import Policy, read_policy


class PolicyFile:
    """Owns what was last seen of the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen: tuple[int, int, int] | None = None

    def read(self) -> Policy:
        """The policy in the file. Raises OSError, or ValueError that names file and key."""
        self._seen = self._state()
        return read_policy(self.path)

    def has_changed(self) -> bool:
        """Whether it is another file, or written to, since it was last read. A file that is away has not changed."""
        try:
            return self._state() != self._seen
        except OSError:
            return False

    def _state(self) -> tuple[int, int, int]:
        status = self.path.stat()
        return status.st_mtime_ns, status.st_size, status.st_ino
