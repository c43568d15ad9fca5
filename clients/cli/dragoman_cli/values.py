"""Reads one setting's value from the text of a flag or variable, or from a TOML value. Pure; standard library only."""

from __future__ import annotations

import enum
import math
import re
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off"}
_SIZE = re.compile(r"([0-9][0-9_]*(?:\.[0-9]+)?)\s*(k|m|g|t)?(i?b)?", re.IGNORECASE)
_DURATION = re.compile(r"([0-9][0-9_]*(?:\.[0-9]+)?)\s*(us|ms|s|m|h)?")
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, None: 1.0}
SIZED_UNITS = ("bytes", "tokens")


def read_value(kind: Any, raw: object, metadata: Mapping[str, Any]) -> Any:
    """`raw` as a value of the annotation `kind`.

    Metadata keys that matter: `unit` ("bytes" and "tokens" take 32k, 8GiB; "seconds" takes 500ms, 2m), `min`, `max`,
    `choices`.
    Raises ValueError with what is wrong and what is allowed, without the name of the setting.
    """
    optional, kind = _strip_optional(kind)
    if optional and (raw is None or (isinstance(raw, str) and raw.lower() in ("", "none"))):
        return None
    item = _item_of(kind)
    if item is None:
        return _checked(_read_scalar(kind, raw, metadata.get("unit")), metadata)
    if isinstance(raw, str):
        parts: list[Any] = [part.strip() for part in raw.split(",") if part.strip()]
    elif isinstance(raw, (list, tuple)):
        parts = list(raw)
    else:
        raise ValueError(f"{raw!r} is not a list; write a,b,c")
    return tuple(_checked(_read_scalar(item, part, metadata.get("unit")), metadata) for part in parts)


def describe_kind(kind: Any, metadata: Mapping[str, Any]) -> str:
    """What stands for the value in `--help`, such as INT, SIZE or {a,b}."""
    _, kind = _strip_optional(kind)
    item = _item_of(kind)
    if item is not None:
        return f"{describe_kind(item, metadata)},..."
    choices = _choices_of(kind, metadata)
    if choices:
        return "{" + ",".join(str(choice) for choice in choices) + "}"
    if kind is int and metadata.get("unit") in SIZED_UNITS:
        return "SIZE"
    if metadata.get("unit") == "seconds":
        return "SECONDS"
    return {int: "INT", float: "NUMBER", Path: "PATH"}.get(kind, "TEXT")


def is_flag(kind: Any) -> bool:
    """Whether the annotation is a truth value, which gets `--x/--no-x`."""
    return _strip_optional(kind)[1] is bool


def _strip_optional(kind: Any) -> tuple[bool, Any]:
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        others = [arm for arm in typing.get_args(kind) if arm is not type(None)]
        if len(others) != 1:
            raise TypeError(f"a setting may be of one type or None, not {kind}")
        return True, others[0]
    return False, kind


def _item_of(kind: Any) -> Any | None:
    if typing.get_origin(kind) in (tuple, list):
        return typing.get_args(kind)[0]
    return None


def _choices_of(kind: Any, metadata: Mapping[str, Any]) -> tuple[Any, ...]:
    if typing.get_origin(kind) is typing.Literal:
        return typing.get_args(kind)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return tuple(member.value for member in kind)
    return tuple(metadata.get("choices", ()))


def _read_scalar(kind: Any, raw: object, unit: str | None) -> Any:
    if typing.get_origin(kind) is typing.Literal:
        return _one_of(raw, typing.get_args(kind))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind(_one_of(raw, tuple(member.value for member in kind)))
    if kind is bool:
        return _read_bool(raw)
    if kind is int:
        return _read_int(raw, unit)
    if kind is float:
        return _read_float(raw, unit)
    if not isinstance(raw, (str, Path)):
        raise ValueError(f"{raw!r} is not a text")
    if kind is Path:
        return Path(raw).expanduser()
    if kind is str:
        return str(raw)
    raise TypeError(f"a setting cannot be of type {kind}")


def _read_bool(raw: object) -> bool:
    if isinstance(raw, bool):
        return raw
    if isinstance(raw, str):
        if raw.lower() in _TRUE:
            return True
        if raw.lower() in _FALSE:
            return False
    raise ValueError(f"{raw!r} is not a truth value; write true or false")


def _read_int(raw: object, unit: str | None) -> int:
    if isinstance(raw, int) and not isinstance(raw, bool):
        return raw
    if unit in SIZED_UNITS and isinstance(raw, str):
        return _read_size(raw, unit)
    if isinstance(raw, str):
        try:
            return int(raw)
        except ValueError:
            pass
    raise ValueError(f"{raw!r} is not a whole number")


def _read_size(raw: str, unit: str) -> int:
    """32k is 32 x 1024, as is 32KiB; 32kB is 32,000."""
    match = _SIZE.fullmatch(raw.strip())
    tail = (match[3] or "").lower() if match else ""
    if match is None or (tail and unit == "tokens") or (tail == "ib" and not match[2]):
        allowed = "16k or 16384" if unit == "tokens" else "8GiB, 500MB, 64k or 65536"
        raise ValueError(f"{raw!r} is not a size in {unit}; write {allowed}")
    base = 1000 if tail == "b" else 1024
    exponent = " kmgt".index(match[2].lower()) if match[2] else 0
    size = float(match[1]) * base**exponent if "." in match[1] else int(match[1]) * base**exponent
    if size != int(size):
        raise ValueError(f"{raw!r} is not a whole number of {unit}")
    return int(size)


def _read_float(raw: object, unit: str | None) -> float:
    value: float | None = None
    if isinstance(raw, (int, float)) and not isinstance(raw, bool):
        value = float(raw)
    elif isinstance(raw, str):
        match = _DURATION.fullmatch(raw.strip()) if unit == "seconds" else None
        if match:
            value = float(match[1]) * _SECONDS[match[2]]
        else:
            try:
                value = float(raw)
            except ValueError:
                pass
    if value is None or not math.isfinite(value):
        hint = "; write 1.5, 500ms, 30s or 2m" if unit == "seconds" else ""
        raise ValueError(f"{raw!r} is not a finite number{hint}")
    return value


def _one_of(raw: object, choices: tuple[Any, ...]) -> Any:
    for choice in choices:
        if raw == choice or str(raw) == str(choice):
            return choice
    raise ValueError(f"{raw!r} is not one of {', '.join(str(choice) for choice in choices)}")


def _checked(value: Any, metadata: Mapping[str, Any]) -> Any:
    if "choices" in metadata:
        _one_of(value, tuple(metadata["choices"]))
    if "min" in metadata and value < metadata["min"]:
        raise ValueError(f"{value} is below the least allowed, {metadata['min']}")
    if "max" in metadata and value > metadata["max"]:
        raise ValueError(f"{value} is above the most allowed, {metadata['max']}")
    return value
