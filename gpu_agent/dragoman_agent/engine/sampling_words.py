"""What a GPU's kernels are told about rows that temperature alone does not draw: one int32 array, copied at once. Pure.

First NUM_WORDS words a row, field by field, then NUM_FIELDS for each edited row, then their lists and masks; what the fields
are is said where they are read, in dragoman_kernels/triton/filters.py and edits.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from dragoman_agent.device.base import Int32Array, SamplingBatch
from dragoman_agent.engine.sampling_terms import (
    GREEDY_BELOW,
    WEIGHT_ONE,
    Int64Array,
    check_masks,
    edit_terms,
    is_edited,
)

T = TypeVar("T")

NUM_WORDS = 6
NUM_FIELDS = 18
# The fields that are set here by name; a list has its place, then how long it is.
_ROW, _BIAS, _NUM_BIAS, _BIAS_STRIDE, _TURNS, _SEEN, _NUM_OUTPUT, _NUM_SEEN = range(8)
_BANNED, _NUM_BANNED, _ALLOWED, _NUM_ALLOWED, _MASK, _REPETITION, _PRESENCE = range(8, 15)
_FREQUENCY = 16


@dataclass(frozen=True, slots=True)
class Words:
    """The words of some rows, and which kernels they need."""

    parts: list[Int32Array]  # one after another
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
    if not is_edited(sampling):
        return set()
    rows = {*sampling.penalties, *sampling.logit_bias, *sampling.banned, *sampling.allowed}
    return rows.union(sampling.masked_rows.tolist())


def rows_to_draw(sampling: SamplingBatch, edited: set[int]) -> Int64Array:
    """Rows that a draw by temperature alone does not do for, rising; `edited` are those of `edited_rows`."""
    chosen = (sampling.top_ks > 0) | (sampling.top_ps < 1.0) | (sampling.min_ps > 0.0)
    chosen &= sampling.temperatures >= GREEDY_BELOW
    if edited:
        chosen[list(edited)] = True
    return np.flatnonzero(chosen)


def words_of(sampling: SamplingBatch, rows: Int64Array, edited: set[int], vocab_size: int) -> Words:
    """The words of `rows`; `edited` as above. Raises ValueError on a token outside the vocabulary and on too narrow masks."""
    num_rows = len(rows)
    top_ks, top_ps = sampling.top_ks[rows], sampling.top_ps[rows]
    random = sampling.temperatures[rows] >= GREEDY_BELOW
    words = np.empty((NUM_WORDS, num_rows), np.int32)
    words[0] = rows
    words[1] = np.where(top_ks < vocab_size, np.maximum(top_ks, 0), 0)
    words[2] = np.clip(top_ps, 0.0, 1.0, dtype=np.float32).view(np.int32)
    least = np.ceil(np.minimum(sampling.min_ps[rows].astype(np.float64), 1.0) * WEIGHT_ONE).astype("<i8")
    words[3:5] = least.view("<i4").reshape(num_rows, 2).T
    words[5] = -1
    has_filters = bool((((words[1] > 0) | (top_ps < 1.0)) & random).any())
    parts, changed, has_lists = [words.reshape(-1)], list[int](), False
    if edited:
        changed = [row for row in rows.tolist() if row in edited]
        words[5, np.searchsorted(rows, changed)] = np.arange(len(changed))
        made = _EditWords(sampling, changed, vocab_size, words.size)
        parts += made.parts()
        has_lists = made.has_lists
    return Words(parts, num_rows, len(changed), has_filters, bool(random.any()), has_lists)


class _EditWords:
    """Fields and lists of edited rows, the first word at `base`."""

    def __init__(self, sampling: SamplingBatch, rows: list[int], vocab_size: int, base: int) -> None:
        self._sampling, self._vocab_size = sampling, vocab_size
        self._places = {row: place for place, row in enumerate(rows)}
        self._fields = np.zeros((NUM_FIELDS, len(rows)), np.int32)
        self._fields[_ROW] = rows
        self._fields[_NUM_ALLOWED] = self._fields[_MASK] = -1
        self._lists: list[Int32Array] = []
        self._end = base + self._fields.size

    @property
    def has_lists(self) -> bool:
        """Whether any row has more than a mask."""
        return bool(self._lists)

    def parts(self) -> list[Int32Array]:
        """All words, a few arrays."""
        sampling = self._sampling
        if sampling.logit_bias:
            self._put_bias()
        if sampling.penalties:
            self._put_seen()
        self._put(sampling.banned, _BANNED)
        self._put(sampling.allowed, _ALLOWED)
        masks = [self._masks()] if len(sampling.masked_rows) else []
        return [self._fields.reshape(-1), *self._lists, *masks]

    def _known(self, by_row: Mapping[int, T]) -> tuple[list[int], list[T]]:
        """Places of the rows that have some, and what they have."""
        rows = [row for row in by_row if row in self._places]
        return [self._places[row] for row in rows], [by_row[row] for row in rows]

    def _add(self, arrays: Sequence[Int32Array]) -> tuple[Int64Array, Int64Array]:
        """Where each list of tokens lies, and how long it is."""
        lengths = np.fromiter(map(len, arrays), np.int64, len(arrays))
        starts = self._end + np.cumsum(lengths) - lengths
        ids = np.concatenate(arrays)
        if len(ids) and (ids.min() < 0 or ids.max() >= self._vocab_size):
            edit_terms(self._sampling, self._vocab_size)  # says which and where
        self._append(ids)
        return starts, lengths

    def _append(self, words: Int32Array) -> None:
        self._lists.append(words)
        self._end += len(words)

    def _put(self, by_row: Mapping[int, Int32Array], field: int) -> None:
        places, arrays = self._known(by_row)
        if arrays:
            self._fields[field, places], self._fields[field + 1, places] = self._add(arrays)

    def _put_bias(self) -> None:
        """Tokens of all rows, then what is added, then how many entries of the same row and token come before each."""
        places, pairs = self._known(self._sampling.logit_bias)
        if not pairs:
            return
        starts, lengths = self._add([ids for ids, _ in pairs])
        keys = np.repeat(np.array(places, np.int64), lengths) * self._vocab_size + self._lists[-1]
        before = _times_before(keys)
        self._append(np.concatenate([added for _, added in pairs]).astype(np.float32, copy=False).view(np.int32))
        self._append(before)
        fields = self._fields
        fields[_BIAS, places], fields[_NUM_BIAS, places] = starts, lengths
        fields[_BIAS_STRIDE], fields[_TURNS, places] = len(before), 1 + before.max(initial=-1)

    def _put_seen(self) -> None:
        """Tokens of a row's output, then those of its prompt."""
        places, penalties = self._known(self._sampling.penalties)
        if not penalties:
            return
        starts, lengths = self._add([ids for one in penalties for ids in (one.output_ids, one.prompt_ids)])
        fields = self._fields
        fields[_SEEN, places], fields[_NUM_OUTPUT, places] = starts[0::2], lengths[0::2]
        fields[_NUM_SEEN, places] = lengths[0::2] + lengths[1::2]
        fields[_REPETITION, places] = np.array([one.repetition for one in penalties], np.float32).view(np.int32)
        numbers = np.array([(one.presence, one.frequency) for one in penalties], "<f8").view("<i4")
        fields[_PRESENCE : _FREQUENCY + 2, places] = numbers.T

    def _masks(self) -> Int32Array:
        """The masks of the rows, one after another."""
        sampling = self._sampling
        check_masks(sampling, self._vocab_size)
        chosen = [number for number, row in enumerate(sampling.masked_rows.tolist()) if row in self._places]
        places = [self._places[row] for row in sampling.masked_rows[chosen].tolist()]
        width = sampling.masks.shape[1]
        self._fields[_MASK, places] = self._end + np.arange(len(places)) * width
        masks = sampling.masks if len(chosen) == len(sampling.masks) else sampling.masks[chosen]
        return np.ascontiguousarray(masks, dtype="<i4").reshape(-1)


def _times_before(keys: Int64Array) -> Int32Array:
    """How many equal ones come before each: what is added to a token is added in its order."""
    before = np.zeros(len(keys), np.int32)
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    (again,) = (ordered[1:] == ordered[:-1]).nonzero()
    if len(again):
        is_first = np.ones(len(keys), np.bool_)
        is_first[again + 1] = False
        numbers = np.arange(len(keys))
        before[order] = numbers - np.maximum.accumulate(np.where(is_first, numbers, 0))
    return before
