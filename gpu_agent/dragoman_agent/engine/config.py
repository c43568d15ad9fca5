"""What the rpc process tells the engine process at its start: device, model and plan, as one JSON object."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from dragoman.step_model import StepModel
from dragoman_agent.cache.tier_choice import TierSizes
from dragoman_agent.pal.plan import (
    DecodeAttention,
    DecodeList,
    GemmDecode,
    GemmFixed,
    LibraryGemm,
    LibraryPrefill,
    LongPrefill,
    MemoryLine,
    Plan,
    PrefillAttention,
    ShortGroups,
)


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
    kv_disk_dir: str = ""
    trace_dir: str = ""
    capability: str = ""  # of a CUDA device, as "9.0", for kernels compiled before it is open; empty: none are

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
    def tier_sizes(self) -> TierSizes:
        """The KV tiers below the device."""
        plan = self.plan
        return TierSizes(plan.kv_host_bytes, plan.kv_disk_bytes, self.kv_disk_dir, plan.kv_link_bytes_per_second)

    @property
    def cache_path(self) -> Path | None:
        """The cache directory, None for Dragoman's own."""
        return Path(self.cache_dir) if self.cache_dir else None


def _plan(value: Any) -> Plan:
    _check_keys("plan", value, Plan, required={f.name for f in fields(Plan)})
    _check_keys("step model", value["step_model"], StepModel, required={f.name for f in fields(StepModel)})
    step_model: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in value["step_model"].items()}
    prefill, library = value["prefill_attention"], value["library_prefill"]
    nested = {
        "memory": _each("memory line", value["memory"], MemoryLine),
        "step_model": StepModel(**step_model),
        "graph_batch_sizes": tuple(value["graph_batch_sizes"]),
        "mixed_graph_tokens": tuple(value["mixed_graph_tokens"]),
        "switches_off": tuple(value["switches_off"]),
        "decode_attention": _each("decode attention", value["decode_attention"], DecodeAttention),
        "short_groups": _each("group of short sequences", value["short_groups"], ShortGroups),
        "decode_lists": _each("work list of decode attention", value["decode_lists"], DecodeList),
        "gemm_decode": _each("few-row product", value["gemm_decode"], GemmDecode),
        "library_gemm": _each("product of the library", value["library_gemm"], LibraryGemm),
        "gemm_fixed": _each("product in fixed order", value["gemm_fixed"], GemmFixed),
        "prefill_attention": None if prefill is None else _each("prefill attention", [prefill], PrefillAttention)[0],
        "long_prefill": None if value["long_prefill"] is None else _long_prefill(value["long_prefill"]),
        "library_prefill": None if library is None else _each("library prefill", [library], LibraryPrefill)[0],
    }
    return Plan(**{**value, **nested})


def _long_prefill(value: Any) -> LongPrefill:
    own: LongPrefill = _each("long prefill", [value], LongPrefill)[0]
    return replace(own, attention=_each("prefill attention", [own.attention], PrefillAttention)[0])


def _each(what: str, values: Any, cls: type[Any]) -> tuple[Any, ...]:
    for value in values:
        _check_keys(what, value, cls, required={f.name for f in fields(cls)})
    return tuple(cls(**value) for value in values)


def _check_keys(what: str, value: Any, cls: type[Any], required: set[str]) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"{what}: a JSON object was expected, found {type(value).__name__}")
    known = {f.name for f in fields(cls)}
    if unknown := sorted(value.keys() - known):
        raise ValueError(f"{what}: unknown key {unknown[0]!r}; both processes must run the same version")
    if missing := sorted(required - value.keys()):
        raise ValueError(f"{what}: key {missing[0]!r} is missing")
