"""What both samplers share: the definition's constants and a step's sparse edits as flat arrays. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from dragoman_agent.device.base import Float32Array, Penalties, SamplingBatch

GREEDY_BELOW = 1e-5  # temperatures under it are greedy: dividing by them only risks overflow
MIN_LOGPROB = -9999.0  # what JSON can carry in the place of minus infinity
WEIGHT_ONE = 1 << 40  # weight of the likeliest token; 2**22 tokens of it still fit an int64 sum

Int64Array: TypeAlias = npt.NDArray[np.int64]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Entries:
    """Single logits of a batch: the row and the token id of each, [n]."""

    rows: Int64Array
    ids: Int64Array

    def places(self, vocab_size: int) -> Int64Array:
        """In logits [num_rows, vocab_size] seen as one array, [n]."""
        return self.rows * vocab_size + self.ids


def is_edited(batch: SamplingBatch) -> bool:
    """Whether any row's logits are changed before sampling."""
    return bool(batch.penalties or batch.logit_bias or batch.banned or batch.allowed or len(batch.masked_rows))


def check_masks(batch: SamplingBatch, vocab_size: int) -> None:
    """Raises ValueError when the grammar masks are too narrow for the vocabulary."""
    if batch.masks.shape[1] * 32 < vocab_size:
        raise ValueError(
            f"masks have {batch.masks.shape[1] * 32} bits a row, but the vocabulary has {vocab_size} tokens"
        )


def is_plain_greedy(batch: SamplingBatch) -> bool:
    """Whether an argmax of the raw logits is all the batch asks for."""
    greedy = bool((batch.temperatures < GREEDY_BELOW).all()) and bool((batch.num_logprobs < 0).all())
    return greedy and not is_edited(batch)


def entries(ids_by_row: Mapping[int, npt.NDArray[Any]], vocab_size: int, what: str) -> Entries:
    """The entries of `ids_by_row`, row after row. Raises ValueError on an id outside the vocabulary."""
    ids = np.concatenate([np.asarray(values, np.int64) for values in ids_by_row.values()])
    rows = np.repeat(np.fromiter(ids_by_row, np.int64), [len(values) for values in ids_by_row.values()])
    if len(ids) and (ids.min() < 0 or ids.max() >= vocab_size):
        wrong = int(ids.min() if ids.min() < 0 else ids.max())
        raise ValueError(
            f"{what} names token {wrong}, but the vocabulary has {vocab_size} tokens (0 to {vocab_size - 1})"
        )
    return Entries(rows, ids)


def bias_terms(batch: SamplingBatch, vocab_size: int) -> tuple[Entries, Float32Array]:
    """Where to add what."""
    added = np.concatenate([values for _, values in batch.logit_bias.values()]).astype(np.float32)
    return entries({row: ids for row, (ids, _) in batch.logit_bias.items()}, vocab_size, "logit_bias"), added


def penalty_terms(penalties: Mapping[int, Penalties], vocab_size: int) -> tuple[Entries, Float32Array, Float32Array]:
    """Seen tokens, the factor that divides their positive and multiplies their negative logits, then what is subtracted.

    Repetition (CTRL, arXiv 1909.05858) looks at prompt and output, presence and frequency at the output.
    """
    ids_by_row: dict[int, Int64Array] = {}
    factors: list[Float32Array] = []
    offsets: list[Float32Array] = []
    for row, penalty in penalties.items():
        seen = np.concatenate((penalty.output_ids, penalty.prompt_ids)).astype(np.int64)
        in_output = np.arange(len(seen)) < len(penalty.output_ids)
        unique, inverse = np.unique(seen, return_inverse=True)
        counts = np.bincount(inverse, weights=in_output, minlength=len(unique))
        ids_by_row[row] = unique
        factors.append(np.full(len(unique), penalty.repetition, np.float32))
        offsets.append((counts * penalty.frequency + (counts > 0) * penalty.presence).astype(np.float32))
    return entries(ids_by_row, vocab_size, "penalties"), np.concatenate(factors), np.concatenate(offsets)


def edit_terms(batch: SamplingBatch, vocab_size: int) -> dict[str, npt.NDArray[Any]]:
    """All edits of a batch as flat arrays, so that they go to a device at once; absent ones have no array.

    `biased` and `added` [n]; `seen` and `in_output` [n], each token as often as it was seen, and `penalties` [num_samples, 3];
    `banned` [n]; `allowed` [n] and `allowed_rows`; `masked_rows` and `masks` as in the batch. Places are
    row * vocab_size + token id. Raises ValueError on an id outside the vocabulary and on too narrow masks.
    """
    terms: dict[str, npt.NDArray[Any]] = {}
    if batch.logit_bias:
        at, terms["added"] = bias_terms(batch, vocab_size)
        terms["biased"] = at.places(vocab_size)
    if batch.penalties:
        terms.update(_seen_terms(batch.penalties, len(batch.temperatures), vocab_size))
    if batch.banned:
        terms["banned"] = entries(batch.banned, vocab_size, "banned").places(vocab_size)
    if batch.allowed:
        terms["allowed"] = entries(batch.allowed, vocab_size, "allowed").places(vocab_size)
        terms["allowed_rows"] = np.fromiter(batch.allowed, np.int64)
    if len(batch.masked_rows):
        check_masks(batch, vocab_size)
        terms["masked_rows"], terms["masks"] = batch.masked_rows.astype(np.int64), batch.masks
    return terms


def _seen_terms(penalties: Mapping[int, Penalties], num_rows: int, vocab_size: int) -> dict[str, npt.NDArray[Any]]:
    """What `penalty_terms` is made of: counting seen tokens takes a device no time, and the host a sort a row."""
    output = entries({row: part.output_ids for row, part in penalties.items()}, vocab_size, "penalties")
    prompt = entries({row: part.prompt_ids for row, part in penalties.items()}, vocab_size, "penalties")
    in_output = output.places(vocab_size)
    table = np.zeros((num_rows, 3))
    table[list(penalties)] = [(part.repetition, part.presence, part.frequency) for part in penalties.values()]
    seen = np.concatenate((in_output, prompt.places(vocab_size)))
    return {"seen": seen, "in_output": in_output, "penalties": table}
