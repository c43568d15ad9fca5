"""Whole decoder layers, timed as a step runs them: what kernels take from and hide of each other shows only in a chain. Pure."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from dragoman_agent.model.config import ModelConfig
from dragoman_agent.pal import step_cost
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

    def rows(self, batch: int) -> int:
        """Rows of the products of a step of `batch` sequences."""
        return max(batch, self.min_gemm_rows)

    def products(self, model: ModelConfig, batch: int) -> tuple[GemmDecode, ...]:
        """The layers' matrices that such a step multiplies with the kernel of few rows; `max_rows` is the step's rows."""
        rows = self.rows(batch)
        found: dict[tuple[int, int], GemmDecode] = {}
        for one in self.gemm:
            if rows <= one.max_rows and (one.n, one.k) in step_cost.matrices(model):
                found.setdefault((one.n, one.k), replace(one, max_rows=rows))
        return tuple(found[size] for size in sorted(found))


def layer_case(model: ModelConfig, choices: LayerChoices, batch: int, *, dependent: bool) -> LayerCase:
    """The chain that a step of `batch` sequences runs; equal work has equal keys, whichever plan it is of."""
    shape = {"batch": batch, "context": min(CONTEXT, model.max_context_tokens), "layers": num_layers(model)}
    config = {
        "model": asdict(model),
        "page_size": choices.page_size,
        "attention": asdict(replace(decode_for(choices.attention, batch), max_batch=batch)),
        "gemm_decode": [asdict(choice) for choice in choices.products(model, batch)],
        "min_gemm_rows": choices.rows(batch),
    }
    digest = hashlib.sha256(json.dumps([shape, config], sort_keys=True).encode()).hexdigest()[:12]
    key = f"decode-layers/{digest}/b{batch}/{'dependent' if dependent else 'plain'}"
    return LayerCase(key, "decode-layers", shape, {**config, "dependent": dependent})


def layer_cases(model: ModelConfig, choices: LayerChoices, max_num_seqs: int) -> Iterator[LayerCase]:
    """The chains that tell whether dependent launch pays, by batch."""
    for batch, dependent in itertools.product(_batches(max_num_seqs), (False, True)):
        yield layer_case(model, choices, batch, dependent=dependent)


def plan_layer_cases(model: ModelConfig, plan: Plan) -> list[LayerCase]:
    """`layer_cases` of the choices that `plan` made from the times of its kernels."""
    choices = LayerChoices(plan.page_size, plan.decode_attention, plan.min_gemm_rows, plan.gemm_decode)
    return list(layer_cases(model, choices, plan.max_num_seqs))


def num_layers(model: ModelConfig) -> int:
    """Layers of a chain: enough that their weights do not fit in L2."""
    one, none = (replace(model, num_layers=count).num_parameters for count in (1, 0))
    return max(2, min(_MAX_LAYERS, -(-_CHAIN_BYTES // (2 * (one - none)))))


def layer_seconds(
    timings: Timings | None, model: ModelConfig, choices: LayerChoices, max_num_seqs: int
) -> list[tuple[int, float, float]]:
    """(batch, seconds of a step's layers without, with dependent launch) where both were timed."""
    found = []
    for batch in _batches(max_num_seqs) if timings else ():
        cases = [layer_case(model, choices, batch, dependent=on) for on in (False, True)]
        pair = [timings.get(case.key) for case in cases] if timings else []
        if all(seconds is not None for seconds in pair):
            plain, dependent = (float(seconds or 0) * model.num_layers / num_layers(model) for seconds in pair)
            found.append((batch, plain, dependent))
    return found


def _batches(max_num_seqs: int) -> Sequence[int]:
    return list(dict.fromkeys(min(batch, max_num_seqs) for batch in BATCHES))
