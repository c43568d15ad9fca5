"""Typed reads from a JSON object of a model's files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dragoman_agent.model.errors import ModelFileError


class JsonObject:
    """Typed reads by key; every error names the file and the key. A null is the same as an absent key."""

    def __init__(self, path: Path, value: Mapping[str, Any], prefix: str = "") -> None:
        self.path, self._value, self._prefix = path, value, prefix

    def __contains__(self, key: str) -> bool:
        return self._value.get(key) is not None

    @property
    def keys(self) -> set[str]:
        """Keys that hold something."""
        return {key for key, value in self._value.items() if value is not None}

    def integer(self, key: str, *, most: int, least: int = 1) -> int | None:
        """An integer in `least` to `most`, None when absent."""
        value = self._value.get(key)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.wrong(key, f"an integer from {least} to {most}")
        return value

    def required_integer(self, key: str, *, most: int) -> int:
        """An integer in 1 to `most` that must be there."""
        value = self.integer(key, most=most)
        if value is None:
            raise self.missing(key)
        return value

    def positive(self, key: str) -> float | None:
        """A finite number above 0, None when absent."""
        value = self._value.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
            raise self.wrong(key, "a positive number")
        return float(value)

    def required_positive(self, key: str) -> float:
        """A finite number above 0 that must be there."""
        value = self.positive(key)
        if value is None:
            raise self.missing(key)
        return value

    def flag(self, key: str) -> bool | None:
        """A boolean, None when absent."""
        value = self._value.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def text(self, key: str) -> str | None:
        """A string, None when absent."""
        value = self._value.get(key)
        if value is not None and not isinstance(value, str):
            raise self.wrong(key, "a string")
        return value

    def texts(self, key: str) -> list[str] | None:
        """A list of strings, None when absent."""
        value = self._value.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.wrong(key, "a list of strings")
        return value

    def names(self, key: str) -> list[str]:
        """A string or a list of strings, [] when absent."""
        if isinstance(self._value.get(key), list):
            return self.texts(key) or []
        name = self.text(key)
        return [] if name is None else [name]

    def child(self, key: str) -> JsonObject | None:
        """An object, None when absent."""
        value = self._value.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return JsonObject(self.path, value, f"{self._prefix}{key}.")

    def missing(self, key: str, do: str = "complete the file, or fetch it again") -> ModelFileError:
        """The error of a key that must be there."""
        return ModelFileError(self.path, f"key '{self._prefix}{key}' is missing", do)

    def wrong(self, key: str, wanted: str) -> ModelFileError:
        """The error of a key with a value of the wrong kind."""
        shown = repr(self._value.get(key))[:60]
        return ModelFileError(
            self.path, f"key '{self._prefix}{key}' is {shown}, {wanted} was expected", "correct the file"
        )

    def refuse(self, key: str, why: str, do: str = "use another model") -> ModelFileError:
        """The error of a key whose value is sound but cannot be served."""
        shown = repr(self._value.get(key))[:60]
        return ModelFileError(self.path, f"key '{self._prefix}{key}' is {shown}: {why}", do)
