"""The sampler on the host, in numpy: the definition of sampler.py, one row at a time in buffers that stay in cache."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dragoman_agent.device.base import Float32Array, Int32Array, SamplingBatch
from dragoman_agent.engine.philox import uniforms
from dragoman_agent.engine.sampling_terms import (
    GREEDY_BELOW,
    MIN_LOGPROB,
    WEIGHT_ONE,
    Int64Array,
    bias_terms,
    check_masks,
    entries,
    is_edited,
    is_plain_greedy,
    penalty_terms,
)

# Scaled logits down to which tokens are looked at before the next rung, and then all of them.
_RUNGS = (-2.0, -4.0, -8.0, -14.0)
_SORTED_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class HostSampled:
    """Arrays as `Sampled`'s tensors."""

    token_ids: Int64Array
    finite: npt.NDArray[np.bool_]
    logprobs: Float32Array | None = None
    top_ids: Int64Array | None = None
    top_logprobs: Float32Array | None = None


class HostSampler:
    """Samples rows of `vocab_size` logits; keeps its buffers. Not to be used by two threads at once."""

    def __init__(self, vocab_size: int) -> None:
        self._scaled = np.empty(vocab_size, np.float32)
        self._exponentials = np.empty(vocab_size, np.float32)
        self._weights = np.empty(vocab_size, np.int64)
        self._cumulative = np.empty(vocab_size, np.int64)

    def sample(self, logits: Float32Array, batch: SamplingBatch) -> HostSampled:
        """One token a row of `logits` [num_samples, vocab_size], which are left as they are; see sampler.sample."""
        if is_plain_greedy(batch):
            ids, finite = _best(logits)
            return HostSampled(ids, finite)
        finite = np.isfinite(logits.max(axis=-1))
        edited = _edit(logits, batch)
        ids, has_best = _best(edited)
        finite &= has_best
        random_rows = np.flatnonzero(finite & (batch.temperatures >= GREEDY_BELOW))
        drawn = uniforms(batch.seeds[random_rows], batch.choices[random_rows], batch.cursors[random_rows])
        for row, uniform in zip(random_rows.tolist(), drawn.tolist(), strict=True):
            ids[row] = self._draw(
                edited[row],
                uniform,
                batch.temperatures[row],
                int(batch.top_ks[row]),
                min(max(float(batch.top_ps[row]), 0.0), 1.0),
                min(float(batch.min_ps[row]), 1.0),
            )
        ids[~finite] = 0
        return HostSampled(ids, finite, *self._logprobs(logits, ids, finite, batch))

    def _draw(
        self, row: Float32Array, uniform: float, temperature: np.float32, top_k: int, top_p: float, min_p: float
    ) -> int:
        weights = self._weigh(row, temperature)
        if min_p > 0:
            weights[weights < int(np.ceil(min_p * WEIGHT_ONE))] = 0
        if not 0 < top_k < len(row):
            top_k = 0
        if top_k == 0 and top_p >= 1.0:
            return _pick(np.cumsum(weights, out=self._cumulative), uniform)
        kept = _nucleus(self._scaled, weights, top_k, top_p)
        return int(kept[_pick(np.cumsum(weights[kept]), uniform)])

    def _weigh(self, row: Float32Array, temperature: np.float32 | float) -> Int64Array:
        """Weights [vocab_size] of a finite row, in a buffer; `_scaled` then holds (row - max) / temperature."""
        with np.errstate(over="ignore"):
            np.subtract(row, row.max(), out=self._scaled)
            if temperature != 1.0:
                np.divide(self._scaled, temperature, out=self._scaled)
        np.exp(self._scaled, out=self._exponentials)
        np.multiply(self._exponentials, np.float32(WEIGHT_ONE), out=self._exponentials)  # a power of two: exact
        np.copyto(self._weights, self._exponentials, casting="unsafe")
        return self._weights

    def _logprobs(
        self, logits: Float32Array, ids: Int64Array, finite: npt.NDArray[np.bool_], batch: SamplingBatch
    ) -> tuple[Float32Array | None, Int64Array | None, Float32Array | None]:
        asking = np.flatnonzero(batch.num_logprobs >= 0)
        if not len(asking):
            return None, None, None
        k = min(int(batch.num_logprobs.max()), logits.shape[1])
        logprobs = np.zeros(len(ids), np.float32)
        top_ids = np.full((len(ids), k), -1, np.int64)
        top_logprobs = np.zeros((len(ids), k), np.float32)
        for row in asking[finite[asking]].tolist():
            logprobs[row] = self._logprobs_of(logits[row], int(ids[row]), top_ids[row], top_logprobs[row])
        return (logprobs, top_ids, top_logprobs) if k else (logprobs, None, None)

    def score(
        self, logits: Float32Array, token_ids: Int32Array, num_top: int
    ) -> tuple[Float32Array, Int64Array, Float32Array]:
        """Logprobs [n] of given tokens under `logits` [n, vocab_size], and the best `num_top` of each row; see sampler.score."""
        k = min(num_top, logits.shape[1])
        finite = np.isfinite(logits.max(axis=-1))
        logprobs = np.full(len(token_ids), np.nan, np.float32)
        top_ids = np.full((len(token_ids), k), -1, np.int64)
        top_logprobs = np.zeros((len(token_ids), k), np.float32)
        for row in np.flatnonzero(finite).tolist():
            logprobs[row] = self._logprobs_of(logits[row], int(token_ids[row]), top_ids[row], top_logprobs[row])
        return logprobs, top_ids, top_logprobs

    def _logprobs_of(self, row: Float32Array, token_id: int, top_ids: Int64Array, top_logprobs: Float32Array) -> float:
        """Log-softmax of a finite row at `token_id`; the best ids and their values go into the two [k] arrays."""
        total = int(self._weigh(row, 1.0).sum())
        offset = float(row.max()) + float(np.log(total / WEIGHT_ONE))
        if len(top_ids):
            top_ids[:] = best = _top(self._scaled, len(top_ids))
            top_logprobs[:] = np.maximum(row[best].astype(np.float64) - offset, MIN_LOGPROB)
        return max(float(row[token_id]) - offset, MIN_LOGPROB)


def _best(logits: Float32Array) -> tuple[Int64Array, npt.NDArray[np.bool_]]:
    """The best id of each row, the lowest of a tie, and whether its logit is finite; NaN counts as the largest."""
    ids = logits.argmax(axis=-1)
    finite = np.isfinite(logits[np.arange(len(ids)), ids])
    ids[~finite] = 0
    return ids, finite


def _pick(cumulative: Int64Array, uniform: float) -> int:
    """Index of the first sum over the uniform's share of the total."""
    total = int(cumulative[-1])
    return int(np.searchsorted(cumulative, min(int(uniform * total), total - 1), side="right"))


def _nucleus(scaled: Float32Array, weights: Int64Array, top_k: int, top_p: float) -> Int64Array:
    """Ascending ids inside top-k (0 is off), then inside top-p of what it left.

    Only tokens over a rung are looked at: the highest that holds top_k tokens, or top-p's share of the mass.
    """
    mass = 0 if top_k else int(weights.sum())
    needed = max(1, int(np.ceil(top_p * mass)))
    ids = np.flatnonzero(weights)
    for rung in _RUNGS:
        over = np.flatnonzero((scaled >= rung) & (weights > 0))
        if len(over) >= top_k if top_k else int(weights[over].sum()) >= needed:
            ids = over
            break
    keys, shares = scaled[ids], weights[ids]
    if 0 < top_k < len(ids):
        over = keys >= np.partition(keys, len(keys) - top_k)[len(keys) - top_k]
        ids, keys, shares = ids[over], keys[over], shares[over]
    if top_p < 1.0:
        if top_k:
            needed = max(1, int(np.ceil(top_p * int(shares.sum()))))
        ids = ids[keys >= _threshold(keys, shares, needed)]
    return ids


def _threshold(keys: Float32Array, shares: Int64Array, needed: int) -> np.float32:
    """The largest key at or over which the shares sum to `needed`; halves the range of keys, then sorts what is left."""
    while len(keys) > _SORTED_AT_ONCE:
        low, high = keys.min(), keys.max()
        middle = low + (high - low) / np.float32(2)
        upper = keys >= middle
        if middle == low:
            break
        mass = int(shares[upper].sum())
        if mass < needed:
            needed -= mass
            upper = ~upper
        keys, shares = keys[upper], shares[upper]
    order = np.argsort(-keys)
    place = int(np.searchsorted(np.cumsum(shares[order]), needed))
    return np.float32(keys[order[min(place, len(keys) - 1)]])


def _top(scaled: Float32Array, k: int) -> Int64Array:
    """Ids of the k largest, best first, ties by lowest id."""
    ids = np.arange(len(scaled))
    for rung in _RUNGS:
        over = np.flatnonzero(scaled >= rung)
        if len(over) >= k:
            ids = over
            break
    return ids[np.argsort(-scaled[ids], kind="stable")[:k]]


def _edit(logits: Float32Array, batch: SamplingBatch) -> Float32Array:
    """`logits` with bias, penalties and masks applied to a copy; the same array when there is nothing to apply."""
    if not is_edited(batch):
        return logits
    edited = logits.copy()
    vocab_size = logits.shape[1]
    if batch.logit_bias:
        at, added = bias_terms(batch, vocab_size)
        np.add.at(edited, (at.rows, at.ids), added)
    if batch.penalties:
        at, factor, offset = penalty_terms(batch.penalties, vocab_size)
        values = edited[at.rows, at.ids]
        edited[at.rows, at.ids] = np.where(values > 0, values / factor, values * factor) - offset
    if batch.banned:
        at = entries(batch.banned, vocab_size, "banned")
        edited[at.rows, at.ids] = -np.inf
    if batch.allowed:
        at = entries(batch.allowed, vocab_size, "allowed")
        kept = edited[at.rows, at.ids]
        edited[list(batch.allowed)] = -np.inf
        edited[at.rows, at.ids] = kept
    if len(batch.masked_rows):
        check_masks(batch, vocab_size)
        words = np.ascontiguousarray(batch.masks, dtype="<i4").view(np.uint8)
        for row, octets in zip(batch.masked_rows.tolist(), words, strict=True):
            may = np.unpackbits(octets, count=vocab_size, bitorder="little")
            edited[row, may == 0] = -np.inf
    return edited
