"""The error of everything that reads model files."""

from __future__ import annotations

from pathlib import Path


class ModelFileError(Exception):
    """A model file that cannot be used. The message names the file, what is wrong and what to do."""

    def __init__(self, path: Path | str, what: str, do: str = "fetch or convert the file again") -> None:
        super().__init__(f"{path}: {what}; {do}")
        self.path = Path(path)
        self.what = what
