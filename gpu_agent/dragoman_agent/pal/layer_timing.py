"""Whole decoder layers, timed with and without dependent launch: what overlaps between kernels shows only in a chain. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from dragoman_agent.model.config import ModelConfig
from dragoman_agent.pal.plan import DecodeAttention, GemmDecode, Plan, decode_for
from dragoman_agent.pal.timings import Timings

BATCHES = (1, 8, 64, 256)
CONTEXT = 512  # of every sequence: attention takes its part and does not hide the rest
_CHAIN_BYTES = 300 << 20  # of weights, above any L2 there is
_MAX_LAYERS = 24


@dataclass(frozen=True, slots=True)
class LayerCase:
    """A chain of layers to time; see `candidates.TuningCase`. Its seconds are of the chain of `shape["layers"]`."""

    key: str
    kind: str
    shape: Mapping[str, int]
    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class LayerChoices:
    """What of a plan decides how long a layer takes."""

    page_size: int
    attention: tuple[DecodeAttention, ...]
    min_gemm_rows: int
    gemm: tuple[GemmDecode, ...]


def layer_cases(model: ModelConfig, choices: LayerChoices, max_num_seqs: int) -> Iterator[LayerCase]:
    """The chains that tell whether dependent launch pays, by batch."""
    for batch in _batches(max_num_seqs):
        shape = {"batch": batch, "context": min(CONTEXT, model.max_context_tokens), "layers": num_layers(model)}
        for dependent in (False, True):
            config = {
                "model": asdict(model),
                "page_size": choices.page_size,
                "attention": asdict(decode_for(choices.attention, batch)),
                "gemm_decode": [asdict(choice) for choice in choices.gemm],
                "min_gemm_rows": choices.min_gemm_rows,
                "dependent": dependent,
            }
            yield LayerCase(layer_key(model, choices, batch, dependent), "decode-layers", shape, config)


def plan_layer_cases(model: ModelConfig, plan: Plan) -> list[LayerCase]:
    """`layer_cases` of the choices that `plan` made from the times of its kernels."""
    choices = LayerChoices(plan.page_size, plan.decode_attention, plan.min_gemm_rows, plan.gemm_decode)
    return list(layer_cases(model, choices, plan.max_num_seqs))


def layer_key(model: ModelConfig, choices: LayerChoices, batch: int, dependent: bool) -> str:
    """The name in Timings: equal names are equal work."""
    body = [asdict(model), asdict(choices)]
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:12]
    return f"decode-layers/{digest}/b{batch}/{'dependent' if dependent else 'plain'}"


def num_layers(model: ModelConfig) -> int:
    """Layers of a chain: enough that their weights do not fit in L2."""
    one, none = (replace(model, num_layers=count).num_parameters for count in (1, 0))
    return max(2, min(_MAX_LAYERS, -(-_CHAIN_BYTES // (2 * (one - none)))))


def layer_seconds(
    timings: Timings | None, model: ModelConfig, choices: LayerChoices, max_num_seqs: int
) -> list[tuple[int, float, float]]:
    """(batch, seconds of a step's layers without, with dependent launch) where both were timed."""
    found = []
    for batch in _batches(max_num_seqs):
        pair = [timings.get(layer_key(model, choices, batch, on)) for on in (False, True)] if timings else [None]
        if all(seconds is not None for seconds in pair):
            plain, dependent = (float(seconds or 0) * model.num_layers / num_layers(model) for seconds in pair)
            found.append((batch, plain, dependent))
    return found


def _batches(max_num_seqs: int) -> Sequence[int]:
    return list(dict.fromkeys(min(batch, max_num_seqs) for batch in BATCHES))
