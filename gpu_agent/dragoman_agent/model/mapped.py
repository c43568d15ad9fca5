"""Files mapped into memory, read-only."""

from __future__ import annotations

import mmap
from pathlib import Path

from dragoman_agent.model.errors import ModelFileError


def map_file(path: Path, kind: str, smallest_bytes: int) -> mmap.mmap:
    """The whole file, mapped. Raises ModelFileError when it cannot be opened or is too small to be a `kind` file."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size < smallest_bytes:
                raise ModelFileError(
                    path, f"{size} bytes are too few for a {kind} file", "the download is incomplete, fetch it again"
                )
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelFileError(path, f"cannot be opened ({error.strerror or error})", "check the path") from None
