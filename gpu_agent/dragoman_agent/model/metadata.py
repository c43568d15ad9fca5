"""Typed reads from a GGUF file's metadata."""

from __future__ import annotations

import math
from collections.abc import Iterable

from dragoman_agent.model.errors import ModelFileError
from dragoman_agent.model.gguf import GgufArray, GgufFile


class Metadata:
    """Typed reads from a GGUF file's metadata; every error names the key."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file

    def text(self, key: str, default: str | None = None) -> str | None:
        """A string, `default` when absent."""
        value = self._file.metadata.get(key, default)
        if value is not None and not isinstance(value, str):
            raise self._wrong(key, value, "a string")
        return value

    def required_text(self, key: str) -> str:
        """A string that must be there."""
        value = self.text(key)
        if value is None:
            raise self._missing(key)
        return value

    def flag(self, key: str, default: bool) -> bool:
        """A boolean."""
        value = self._file.metadata.get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "a boolean")
        return value

    def integer(self, key: str) -> int | None:
        """An integer, None when absent."""
        value = self._file.metadata.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise self._wrong(key, value, "an integer")
        return value

    def number(self, key: str) -> float | None:
        """A finite number, None when absent."""
        value = self._file.metadata.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise self._wrong(key, value, "a finite number")
        return float(value)

    def strings(self, key: str) -> list[str]:
        """An array of strings that must be there."""
        value = self._array(key)
        if not value.holds_strings:
            raise self._wrong(key, value, "an array of strings")
        return [str(item) for item in value]

    def integers(self, key: str) -> list[int]:
        """An array of integers that must be there."""
        return [int(item) for item in self._numbers(key)]

    def numbers(self, key: str) -> list[float]:
        """An array of numbers that must be there."""
        return [float(item) for item in self._numbers(key)]

    def fail(self, what: str, do: str = "fetch or convert the file again") -> ModelFileError:
        """A ModelFileError about this file."""
        return self._file.fail(what, do)

    def _numbers(self, key: str) -> Iterable[int | float]:
        value = self._array(key)
        if value.holds_strings:
            raise self._wrong(key, value, "an array of numbers")
        return (item for item in value if not isinstance(item, str))

    def _array(self, key: str) -> GgufArray:
        value = self._file.metadata.get(key)
        if value is None:
            raise self._missing(key)
        if not isinstance(value, GgufArray):
            raise self._wrong(key, value, "an array")
        return value

    def _missing(self, key: str) -> ModelFileError:
        return self.fail(f"metadata key {key!r} is missing", "convert the model with current tools")

    def _wrong(self, key: str, value: object, wanted: str) -> ModelFileError:
        shown = f"an array of {len(value)}" if isinstance(value, GgufArray) else repr(value)[:60]
        return self.fail(f"metadata key {key!r} is {shown}, {wanted} was expected")
