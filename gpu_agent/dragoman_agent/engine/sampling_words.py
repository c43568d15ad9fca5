"""What a GPU's kernels are told about rows that temperature alone does not draw: one int32 array, copied at once. Pure.

First NUM_WORDS words a row, field by field, then NUM_FIELDS for each edited row, then their lists and masks; what the fields
are is said where they are read, in dragoman_kernels/triton/filters.py and edits.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dragoman_agent.device.base import Int32Array, SamplingBatch
from dragoman_agent.engine.sampling_terms import (
    GREEDY_BELOW,
    WEIGHT_ONE,
    Int64Array,
    check_masks,
    edit_terms,
    is_edited,
)

NUM_WORDS = 6
NUM_FIELDS = 17
_NO_IDS = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class Words:
    """The words of some rows, and which kernels they need."""

    words: Int32Array
    num_rows: int
    num_edited: int
    has_filters: bool  # top-k or top-p
    has_random: bool  # rows that are not greedy
    has_lists: bool  # edited rows with more than a mask

    @property
    def base(self) -> int:
        """Where the words of the edited rows begin."""
        return NUM_WORDS * self.num_rows


def edited_rows(sampling: SamplingBatch) -> set[int]:
    """Rows whose logits are changed before they are drawn."""
    rows = {*sampling.penalties, *sampling.logit_bias, *sampling.banned, *sampling.allowed}
    return rows.union(sampling.masked_rows.tolist())


def rows_to_draw(sampling: SamplingBatch) -> Int64Array:
    """Rows that a draw by temperature alone does not do for, rising."""
    chosen = (sampling.top_ks > 0) | (sampling.top_ps < 1.0) | (sampling.min_ps > 0.0)
    chosen &= sampling.temperatures >= GREEDY_BELOW
    if is_edited(sampling):
        chosen[list(edited_rows(sampling))] = True
    return np.flatnonzero(chosen)


def words_of(sampling: SamplingBatch, rows: Int64Array, vocab_size: int) -> Words:
    """The words of `rows`. Raises ValueError on a token id outside the vocabulary and on too narrow masks."""
    num_rows = len(rows)
    top_ks, top_ps = sampling.top_ks[rows], sampling.top_ps[rows]
    random = sampling.temperatures[rows] >= GREEDY_BELOW
    filters = np.empty((NUM_WORDS, num_rows), np.int32)
    filters[0] = rows
    filters[1] = np.where((top_ks > 0) & (top_ks < vocab_size), top_ks, 0)
    filters[2] = np.clip(top_ps, 0.0, 1.0, dtype=np.float32).view(np.int32)
    least = np.ceil(np.minimum(sampling.min_ps[rows].astype(np.float64), 1.0) * WEIGHT_ONE).astype("<i8")
    filters[3:5] = least.view("<i4").reshape(num_rows, 2).T
    filters[5] = -1
    has_filters = bool((((filters[1] > 0) | (top_ps < 1.0)) & random).any())
    edited: list[int] = []
    parts = [filters.reshape(-1)]
    has_lists = False
    if is_edited(sampling):
        changed = edited_rows(sampling)
        edited = [row for row in rows.tolist() if row in changed]
        filters[5, np.searchsorted(rows, edited)] = np.arange(len(edited))
        own, has_lists = _edit_words(sampling, edited, vocab_size, filters.size)
        parts += own
    return Words(np.concatenate(parts), num_rows, len(edited), has_filters, bool(random.any()), has_lists)


def _edit_words(sampling: SamplingBatch, rows: list[int], vocab_size: int, base: int) -> tuple[list[Int32Array], bool]:
    """Fields and lists of edited rows, the first at `base`; whether any has a list."""
    fields = np.zeros((len(rows), NUM_FIELDS), np.int32)
    parts: list[Int32Array] = []
    ids: list[Int32Array] = []  # those parts that are tokens
    end = base + fields.size

    def put(array: npt.NDArray[np.int32]) -> int:
        nonlocal end
        start = end
        parts.append(array)
        end += len(array)
        return start

    for place, row in enumerate(rows):
        field = fields[place]
        field[0], field[10], field[11] = row, -1, -1
        if (bias := sampling.logit_bias.get(row)) is not None and len(bias[0]):
            ids.append(bias[0])
            before = _times_before(bias[0])
            field[1], field[2], field[3] = put(bias[0]), len(bias[0]), 1 + before.max()
            put(bias[1].astype(np.float32, copy=False).view(np.int32))
            put(before)
        if (penalty := sampling.penalties.get(row)) is not None:
            ids += (penalty.output_ids, penalty.prompt_ids)
            num_output = len(penalty.output_ids)
            field[4], field[5], field[6] = put(penalty.output_ids), num_output, num_output + len(penalty.prompt_ids)
            put(penalty.prompt_ids)
            field[12:13].view(np.float32)[0] = penalty.repetition
            field[13:17] = np.array((penalty.presence, penalty.frequency), "<f8").view("<i4")
        if (banned := sampling.banned.get(row)) is not None:
            ids.append(banned)
            field[7], field[8] = put(banned), len(banned)
        if (allowed := sampling.allowed.get(row)) is not None:
            ids.append(allowed)
            field[9], field[10] = put(allowed), len(allowed)
    has_lists = bool(ids)
    if has_lists:
        all_ids = np.concatenate(ids) if len(ids) > 1 else ids[0]
        if len(all_ids) and (all_ids.min() < 0 or all_ids.max() >= vocab_size):
            edit_terms(sampling, vocab_size)  # says which and where
    if len(sampling.masked_rows):
        check_masks(sampling, vocab_size)
        start = put(np.ascontiguousarray(sampling.masks, dtype="<i4").reshape(-1))
        places = {row: place for place, row in enumerate(rows)}
        for number, row in enumerate(sampling.masked_rows.tolist()):
            if row in places:
                fields[places[row], 11] = start + number * sampling.masks.shape[1]
    return [np.ascontiguousarray(fields.T).reshape(-1), *parts], has_lists


def _times_before(ids: Int32Array) -> Int32Array:
    """How many entries of the same token come before each: what is added to a token is added in its order."""
    before = np.zeros(len(ids), np.int32)
    order = np.argsort(ids, kind="stable")
    sorted_ids = ids[order]
    is_first = np.append(True, sorted_ids[1:] != sorted_ids[:-1])
    if is_first.all():
        return before
    starts = np.maximum.accumulate(np.where(is_first, np.arange(len(ids)), 0))
    before[order] = np.arange(len(ids)) - starts
    return before
