"""A device's profile: values with their provenance, as a frozen object and as a portable JSON file."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from dragoman_agent.pal.profile_schema import check_labels, check_name, check_spread, check_value

SCHEMA_VERSION = 1
MAX_FILE_BYTES = 1 << 20  # a full profile has 20 KB

Provenance = Literal["measured", "reported", "spec", "derived"]
Scalar = float | int | str | bool

_KEYS = ("schema_version", "name", "fingerprint", "created", "device", "values")
_REMEDY = "probe the device again with `dragoman probe --fresh`, or name another profile"


class ProfileError(Exception):
    """A profile file cannot be used. The message says what, why and what to do."""


class NewerProfileError(ProfileError):
    """The file has a newer schema than this program reads."""


@dataclass(frozen=True, slots=True)
class Value:
    """One value; `labels` name the entries of a list. Units are those of `profile_schema.UNITS`."""

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
        """Read a file's text; `origin` names it in errors. Raises ProfileError naming what is wrong."""
        try:
            body = _parse(text)
            _check_version(body.get("schema_version"), origin)
            _check_keys("the file", body, _KEYS)
            return cls(
                name=_text("name", body["name"]),
                device=_device(body["device"]),
                fingerprint=_text("fingerprint", body["fingerprint"]),
                created=_date(body["created"]),
                values={name: _value(name, value) for name, value in _object("values", body["values"]).items()},
            )
        except (ValueError, RecursionError) as error:
            reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
            raise ProfileError(f"profile {origin} cannot be used: {reason}; {_REMEDY}") from None


def now() -> str:
    """The creation date of a profile made now."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def fingerprint(parts: Iterable[str]) -> str:
    """Digest of what a measurement is valid for (uuid, driver, maximum clocks, link), never of a name."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def load_profile(path: Path) -> Profile:
    """Read a profile file. Raises ProfileError: not there, no file, too large, not UTF-8, not a profile."""
    try:
        if path.exists() and not path.is_file():
            raise ProfileError(f"profile {path} cannot be used: it is not a file; name the .json file itself")
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ProfileError(f"profile {path} cannot be read: {reason}; check the path") from None
    if len(data) > MAX_FILE_BYTES:
        raise ProfileError(
            f"profile {path} cannot be used: it is larger than {MAX_FILE_BYTES >> 20} MiB, which no profile is; check the path"
        )
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ProfileError(f"profile {path} cannot be used: byte {error.start} is not UTF-8; {_REMEDY}") from None
    return Profile.from_json(text, str(path))


def _parse(text: str) -> dict[str, Any]:
    try:
        body = json.loads(text, object_pairs_hook=_without_duplicates)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON ({error.msg} in line {error.lineno})") from None
    return _object("the file", body)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    body = dict(pairs)
    if len(body) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice[:100]!r} stands there twice")
    return body


def _check_version(version: Any, origin: str) -> None:
    if isinstance(version, bool) or not isinstance(version, int):
        raise ValueError(f"schema_version is {str(version)[:40]!r}; the whole number {SCHEMA_VERSION} was expected")
    if version > SCHEMA_VERSION:
        raise NewerProfileError(
            f"profile {origin} has schema version {version}, this program reads up to {SCHEMA_VERSION}: "
            "a newer Dragoman wrote it; upgrade this one, or probe the device again with `dragoman probe --fresh`"
        )
    if version < SCHEMA_VERSION:
        raise ValueError(f"schema version {version} was never used")


def _device(value: Any) -> DeviceFacts:
    body = _object("device", value)
    fields = tuple(field.name for field in dataclasses.fields(DeviceFacts))
    _check_keys("device", body, fields)
    kind = _text("device.kind", body["kind"])
    if not kind:
        raise ValueError("device.kind is empty; a kind such as 'cuda' was expected")
    return DeviceFacts(
        kind,
        _count("device.index", body["index"]),
        _text("device.name", body["name"]),
        _text("device.architecture", body["architecture"]),
        _count("device.memory_bytes", body["memory_bytes"]),
        _text("device.uuid", body["uuid"]),
    )


def _value(name: str, value: Any) -> Value:
    check_name(name)
    body = _object(name, value)
    _check_keys(name, body, ("value", "unit", "provenance"), ("spread", "note", "labels"))
    held, unit = body["value"], _text(f"unit of {name}", body["unit"])
    check_value(name, held, unit, body["provenance"])
    check_spread(name, body.get("spread"))
    labels = body.get("labels", [])
    if not isinstance(labels, list):
        raise ValueError(f"the labels of {name} are no list")
    labels = tuple(_text(f"label of {name}", label) for label in labels)
    check_labels(name, labels, held)
    if isinstance(held, str):
        _text(name, held)
    return Value(
        value=tuple(float(entry) for entry in held) if isinstance(held, list) else held,
        unit=unit,
        provenance=body["provenance"],
        spread=body.get("spread"),
        note=_text(f"note of {name}", body.get("note", "")),
        labels=labels,
    )


def _check_keys(where: str, body: dict[str, Any], required: Sequence[str], optional: Sequence[str] = ()) -> None:
    for key in required:
        if key not in body:
            raise ValueError(f"{where} has no {key!r}")
    for key in body:
        if key not in required and key not in optional:
            raise ValueError(f"{where} has {key[:100]!r}, which is not known")


def _object(where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is no JSON object")
    return value


def _text(where: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where} is {str(value)[:40]!r}; a text was expected")
    # JSON can spell half of a surrogate pair, which no message can carry.
    if any("\ud800" <= letter <= "\udfff" for letter in value):
        raise ValueError(f"{where} is not valid Unicode")
    return value


def _count(where: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 63:
        raise ValueError(f"{where} is {str(value)[:40]!r}; a whole number of 0 or more was expected")
    return value


def _date(value: Any) -> str:
    text = _text("created", value)
    try:
        date = datetime.fromisoformat(text)
    except ValueError:
        date = None
    if date is None or date.tzinfo is None:
        raise ValueError(f"created is {text[:40]!r}; a date such as 2026-11-29T12:00:00+00:00 was expected")
    return text


def _value_to_json(value: Value) -> dict[str, Any]:
    body: dict[str, Any] = {"value": value.value, "unit": value.unit, "provenance": value.provenance}
    if value.spread is not None:
        body["spread"] = round(value.spread, 4)
    if value.note:
        body["note"] = value.note
    if value.labels:
        body["labels"] = list(value.labels)
    return body
