"""Measured times of kernels by candidate key, valid for one device and one set of kernels."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

TIMINGS_SCHEMA_VERSION = 1


class TimingsError(Exception):
    """A timings file cannot be used. The message says what, why and what to do."""


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds a call by candidate key (see candidates.py), measured on the device with `fingerprint`."""

    fingerprint: str  # of the profile
    kernel_hash: str  # of the kernels' source and compiler
    seconds: Mapping[str, float] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)  # keys that cannot run on this device, and why

    def get(self, key: str) -> float | None:
        """Seconds of `key`; None where it was not timed."""
        return self.seconds.get(key)

    def with_seconds(self, more: Mapping[str, float]) -> Timings:
        """A copy in which `more` is added or replaces."""
        return replace(self, seconds={**self.seconds, **more})

    def with_failed(self, more: Mapping[str, str]) -> Timings:
        """A copy that also knows why each of `more` cannot run."""
        return replace(self, failed={**self.failed, **more})

    def knows(self, key: str) -> bool:
        """Whether nothing is left to find out about `key`."""
        return key in self.seconds or key in self.failed

    def to_json(self) -> str:
        """The file's text; keys sorted, so that equal timings are equal files."""
        body = {
            "schema_version": TIMINGS_SCHEMA_VERSION,
            "fingerprint": self.fingerprint,
            "kernel_hash": self.kernel_hash,
            "seconds": dict(sorted(self.seconds.items())),
            "failed": dict(sorted(self.failed.items())),
        }
        return json.dumps(body, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, origin: str) -> Timings:
        """Read `to_json`'s text; `origin` names it in errors. Raises TimingsError."""
        try:
            body = json.loads(text)
            if body["schema_version"] != TIMINGS_SCHEMA_VERSION:
                raise TimingsError(
                    f"timings {origin}: schema version {body['schema_version']}, this version reads "
                    f"{TIMINGS_SCHEMA_VERSION}; delete the file, it is made again at the next start"
                )
            failed = body.get("failed", {})  # files of before it was kept have none
            return cls(
                _text(body["fingerprint"]), _text(body["kernel_hash"]), _seconds(body["seconds"]), _reasons(failed)
            )
        except (ValueError, KeyError, TypeError) as error:
            raise TimingsError(
                f"timings {origin}: not timings ({type(error).__name__}: {error}); "
                "delete the file, it is made again at the next start"
            ) from error


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a text was expected, got {value!r}")
    return value


def _reasons(value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise TypeError("failed is no object")
    return {key: _text(reason) for key, reason in value.items()}


def _seconds(value: Any) -> dict[str, float]:
    if not isinstance(value, dict):
        raise TypeError("seconds is no object")
    for key, seconds in value.items():
        if isinstance(seconds, bool) or not isinstance(seconds, int | float):
            raise TypeError(f"{key} is no number")
        if not math.isfinite(seconds) or seconds <= 0:
            raise ValueError(f"{key} is {seconds}, must be finite and over 0")
    return {key: float(seconds) for key, seconds in value.items()}
