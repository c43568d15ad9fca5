"""The cases, as they are written in cases/*.yaml, read and checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped,unused-ignore]

FOLDER = Path(__file__).parent / "cases"
CALLS = (
    "generate", "embed", "tokenize", "detokenize", "quote", "cancel", "models", "agents", "hardware", "load",
    "load_streams",
)  # fmt: skip
STAGES = ("fleet", "open", "scripted", "doomed", "nowhere")
_CASE_KEYS = {"name", "why", "stage", "connect", "retry", "calls", "expect_stage", "timeout_seconds", "harness"}
_HARNESS_ACTIONS = ("kill_after_tokens", "freeze_after_tokens")
_RETRY_KEYS = (
    "max_attempts", "base_seconds", "max_delay_seconds", "resume_patience_seconds", "refused_patience_seconds", "budget",
)  # fmt: skip
# Quick enough for a test; a case may override each.
QUICK_RETRY = {"base_seconds": 0.02, "max_delay_seconds": 0.1, "resume_patience_seconds": 3.0}


class BadCaseError(Exception):
    """A case that is not written as it must be; the message names file, case and key."""


@dataclass(frozen=True, slots=True)
class Case:
    """One case. `stage` is the servers to play against: a kind and its arguments."""

    name: str
    why: str
    stage_kind: str
    stage: Mapping[str, Any]
    connect: Mapping[str, Any]
    retry: Mapping[str, float]
    calls: tuple[Mapping[str, Any], ...]
    expect_stage: Mapping[str, Any]
    harness: Mapping[str, Any]
    timeout_seconds: float


def load_cases(folder: Path = FOLDER) -> list[Case]:
    """Every case, sorted by file and in the order of the file. Raises BadCaseError."""
    cases: list[Case] = []
    for path in sorted(folder.glob("*.yaml")):
        for index, raw in enumerate(yaml.safe_load(path.read_text(encoding="utf-8"))):
            where = f"{path.name}[{index}]"
            if not isinstance(raw, dict) or not isinstance(raw.get("name"), str):
                raise BadCaseError(f"{where}: a case is a mapping with a name")
            cases.append(_case_of(raw, f"{path.name}: {raw['name']}", path.stem))
    names = [case.name for case in cases]
    for name in names:
        if names.count(name) > 1:
            raise BadCaseError(f"{name}: two cases have this name")
    return cases


def _case_of(raw: dict[str, Any], where: str, group: str) -> Case:
    unknown = set(raw) - _CASE_KEYS
    if unknown:
        raise BadCaseError(f"{where}: unknown key {min(unknown)!r} (known: {', '.join(sorted(_CASE_KEYS))})")
    for key in ("why", "calls", "stage"):
        if not raw.get(key):
            raise BadCaseError(f"{where}: {key} is missing")
    stage = raw["stage"]
    kind, arguments = (stage, {}) if isinstance(stage, str) else next(iter(stage.items()))
    if kind not in STAGES:
        raise BadCaseError(f"{where}: stage {kind!r} is not one of {', '.join(STAGES)}")
    for index, call in enumerate(raw["calls"]):
        if call.get("do") not in CALLS:
            raise BadCaseError(f"{where}: calls[{index}].do is {call.get('do')!r}, not one of {', '.join(CALLS)}")
        if "expect" not in call:
            raise BadCaseError(f"{where}: calls[{index}] expects nothing; a case that cannot fail is none")
    for key in raw.get("retry", {}):
        if key not in _RETRY_KEYS:
            raise BadCaseError(f"{where}: retry.{key} is not one of {', '.join(_RETRY_KEYS)}")
    for key in raw.get("harness", {}):
        if key not in _HARNESS_ACTIONS:
            raise BadCaseError(f"{where}: harness.{key} is not one of {', '.join(_HARNESS_ACTIONS)}")
    return Case(
        name=f"{group}/{raw['name']}",
        why=raw["why"],
        stage_kind=kind,
        stage=arguments or {},
        connect=raw.get("connect", {}),
        retry={**QUICK_RETRY, **raw.get("retry", {})},
        calls=tuple(raw["calls"]),
        expect_stage=raw.get("expect_stage", {}),
        harness=raw.get("harness", {}),
        timeout_seconds=float(raw.get("timeout_seconds", 20.0)),
    )
