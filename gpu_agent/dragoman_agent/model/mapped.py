"""Files mapped into memory, read-only."""

from __future__ import annotations

import mmap
from pathlib import Path

from dragoman_agent.model.errors import ModelFileError


def map_file(path: Path, kind: str, smallest_bytes: int, magic: bytes = b"") -> mmap.mmap:
    """The whole file, mapped. Raises ModelFileError when it cannot be opened or is too small to be a `kind` file.

    `magic` is what every such file begins with: a short file of another kind is not told to be a cut one.
    """
    try:
        if path.exists() and not path.is_file() and not path.is_dir():  # opening a pipe would wait for ever
            raise ModelFileError(path, "is not a regular file", f"put the {kind} file itself there")
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            beginning = file.read(len(magic))
            if not magic.startswith(beginning):
                raise ModelFileError(
                    path,
                    f"not a {kind} file: it begins with {beginning!r}, {kind} begins with {magic!r}",
                    f"give a {kind} file",
                )
            if size < smallest_bytes:
                raise ModelFileError(
                    path, f"{size} bytes are too few for a {kind} file", "the download is incomplete, fetch it again"
                )
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelFileError(path, f"cannot be opened ({error.strerror or error})", "check the path") from None
