"""A device's profile: values with their provenance, as a frozen object and as a portable JSON file."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

SCHEMA_VERSION = 1

Provenance = Literal["measured", "reported", "spec", "derived"]
PROVENANCES = ("measured", "reported", "spec", "derived")
Scalar = float | int | str | bool


class ProfileError(Exception):
    """A profile file cannot be used. The message says what, why and what to do."""


@dataclass(frozen=True, slots=True)
class Value:
    """One value; `labels` name the entries of a list."""

    value: Scalar | tuple[float, ...]
    unit: str
    provenance: Provenance
    spread: float | None = None  # (max - min) / median over the repeats
    note: str = ""
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """Identity of one device. `name` is for display only; nothing decides by it."""

    kind: str
    index: int
    name: str
    architecture: str
    memory_bytes: int
    uuid: str


@dataclass(frozen=True, slots=True)
class Profile:
    """Facts and measurements of one device."""

    name: str
    device: DeviceFacts
    fingerprint: str
    created: str  # ISO 8601, UTC
    values: Mapping[str, Value] = field(default_factory=dict)

    def number(self, name: str) -> float:
        """A numeric value. Raises KeyError naming what is missing."""
        value = self.values[name].value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"profile value {name} is not a number")
        return float(value)

    def with_values(self, more: Mapping[str, Value]) -> Profile:
        """A copy in which `more` is added or replaces."""
        return dataclasses.replace(self, values={**self.values, **more})

    def to_json(self) -> str:
        """The portable file."""
        body = {
            "schema_version": SCHEMA_VERSION,
            "name": self.name,
            "fingerprint": self.fingerprint,
            "created": self.created,
            "device": dataclasses.asdict(self.device),
            "values": {name: _value_to_json(value) for name, value in self.values.items()},
        }
        return json.dumps(body, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, origin: str) -> Profile:
        """Read a file's text; `origin` names it in errors. Raises ProfileError."""
        try:
            body = json.loads(text)
            if body["schema_version"] != SCHEMA_VERSION:
                raise ProfileError(
                    f"profile {origin}: schema version {body['schema_version']}, this version reads {SCHEMA_VERSION}; "
                    "probe the device again with `dragoman probe`"
                )
            return cls(
                name=_text(body["name"]),
                device=DeviceFacts(**body["device"]),
                fingerprint=_text(body["fingerprint"]),
                created=_text(body["created"]),
                values={name: _value_from_json(name, value) for name, value in body["values"].items()},
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ProfileError(
                f"profile {origin}: not a profile ({type(error).__name__}: {error}); "
                "probe the device again with `dragoman probe`"
            ) from error


def now() -> str:
    """The creation date of a profile made now."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def fingerprint(parts: Iterable[str]) -> str:
    """Digest of what a measurement is valid for (uuid, driver, maximum clocks, link), never of a name."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def load_profile(path: Path) -> Profile:
    """Read a profile file. Raises ProfileError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(f"profile {path}: cannot be read ({error})") from error
    return Profile.from_json(text, str(path))


def _value_to_json(value: Value) -> dict[str, Any]:
    body: dict[str, Any] = {"value": value.value, "unit": value.unit, "provenance": value.provenance}
    if value.spread is not None:
        body["spread"] = round(value.spread, 4)
    if value.note:
        body["note"] = value.note
    if value.labels:
        body["labels"] = list(value.labels)
    return body


def _value_from_json(name: str, body: dict[str, Any]) -> Value:
    value = body["value"]
    if isinstance(value, list):
        value = tuple(float(entry) for entry in value)
    elif not isinstance(value, bool | int | float | str):
        raise TypeError(f"{name} is a {type(value).__name__}")
    numbers = value if isinstance(value, tuple) else (value,)
    if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
        raise ValueError(f"{name} is not finite")
    if body["provenance"] not in PROVENANCES:
        raise ValueError(f"{name} has provenance {body['provenance']!r}, one of {', '.join(PROVENANCES)} was expected")
    return Value(
        value=value,
        unit=_text(body["unit"]),
        provenance=body["provenance"],
        spread=body.get("spread"),
        note=body.get("note", ""),
        labels=tuple(body.get("labels", ())),
    )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a text was expected, got {value!r}")
    return value
