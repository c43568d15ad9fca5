"""What a model asks of a device before anything is measured: memory by kind of device, number format, smaller ways."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING

from dragoman_agent.pal.changes import ModelSize, WeightFormat
from dragoman_agent.pal.found import UNTESTED_KINDS

if TYPE_CHECKING:
    from dragoman_agent.model.config import ModelConfig
    from dragoman_agent.model.source import ModelSource

_SHORT_SEQUENCE_TOKENS = 256
_ROOMY_TOKENS = 8192
# Bytes a weight of the GGUF formats that the CPU computes in as stored (block layouts of GGUF).
_CPU_FORMATS = MappingProxyType({"Q8_0": 34 / 32, "Q4_1": 20 / 32, "Q4_0": 18 / 32})


@dataclass(frozen=True, slots=True)
class KindNeeds:
    """What a model asks of one kind of device."""

    weight_bytes: int  # resident
    dtype: str = ""  # that its tensor cores must multiply; empty for any
    formats: tuple[WeightFormat, ...] = ()  # in which this kind could hold it instead


@dataclass(frozen=True, slots=True)
class Needs:
    """What a model asks of a device. `by_kind` replaces `weight_bytes` where a kind of device holds weights its own way."""

    model_name: str
    weight_bytes: int
    min_kv_bytes: int  # KV of one short sequence
    roomy_kv_bytes: int = 0  # KV with which a device counts as having room
    by_kind: Mapping[str, KindNeeds] = field(default_factory=dict)
    models: tuple[ModelSize, ...] = ()  # that could be served instead

    def of(self, kind: str) -> KindNeeds:
        """The needs on a kind of device."""
        return self.by_kind.get(kind) or KindNeeds(self.weight_bytes)


def needs_of(model: ModelSource) -> Needs:
    """The needs of an opened model. A GPU holds its weights in bfloat16, a CPU as the files do."""
    config = model.config
    return Needs(
        model.name,
        model.total_bytes,
        config.kv_bytes_per_token * _SHORT_SEQUENCE_TOKENS,
        config.kv_bytes_per_token * min(config.max_context_tokens, _ROOMY_TOKENS),
        {
            "cuda": KindNeeds(2 * config.num_parameters, "bfloat16"),
            **dict.fromkeys(UNTESTED_KINDS, KindNeeds(2 * config.num_parameters)),
            "cpu": KindNeeds(model.total_bytes, formats=cpu_formats(config)),
        },
        known_models(),
    )


def cpu_formats(config: ModelConfig) -> tuple[WeightFormat, ...]:
    """The formats in which the CPU computes weights as stored, with the model's size in each."""
    return tuple(
        WeightFormat(name, round(config.num_parameters * size), f"serve a GGUF file in {name}")
        for name, size in _CPU_FORMATS.items()
    )


@cache
def known_models() -> tuple[ModelSize, ...]:
    """The generating models whose shapes come along, at two bytes a weight."""
    from dragoman_agent.model.random_source import RandomSource, random_model_names

    configs = [RandomSource(name).config for name in random_model_names() if "embedding" not in name]
    return tuple(ModelSize(one.name, 2 * one.num_parameters, one.kv_bytes_per_token) for one in configs)
