"""What the rpc process tells the engine process at its start: device, model and plan, as one JSON object."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from dragoman.step_model import StepModel
from dragoman_agent.pal.plan import MemoryLine, Plan


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One engine process. `model` is a spec for `open_model`, or `null` or `null:NAME` with the null device."""

    device: str
    model: str
    plan: Plan
    cache_dir: str = ""
    null_oracle: str = "hash"
    null_speed: float = 0.0
    log_level: str = "info"

    def to_json(self) -> str:
        """The text for `--config`."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> EngineConfig:
        """Read `to_json`'s text. Raises ValueError saying what is missing or unknown."""
        value = json.loads(text)
        _check_keys("engine config", value, cls, required={"device", "model", "plan"})
        return cls(**{**value, "plan": _plan(value["plan"])})

    @property
    def cache_path(self) -> Path | None:
        """The cache directory, None for Dragoman's own."""
        return Path(self.cache_dir) if self.cache_dir else None


def _plan(value: Any) -> Plan:
    _check_keys("plan", value, Plan, required={f.name for f in fields(Plan)})
    _check_keys("step model", value["step_model"], StepModel, required={f.name for f in fields(StepModel)})
    step_model: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in value["step_model"].items()}
    memory = tuple(MemoryLine(**line) for line in value["memory"])
    graphs = tuple(value["graph_batch_sizes"])
    return Plan(**{**value, "memory": memory, "step_model": StepModel(**step_model), "graph_batch_sizes": graphs})


def _check_keys(what: str, value: Any, cls: type[Any], required: set[str]) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"{what}: a JSON object was expected, found {type(value).__name__}")
    known = {f.name for f in fields(cls)}
    if unknown := sorted(value.keys() - known):
        raise ValueError(f"{what}: unknown key {unknown[0]!r}; both processes must run the same version")
    if missing := sorted(required - value.keys()):
        raise ValueError(f"{what}: key {missing[0]!r} is missing")
