"""Turns logits into token ids on any torch device; a row's token depends on nothing but its own row and request.

Sampling weighs token i by the integer floor(exp(z_i) * 2**40), z = (logit - max) / temperature in fp32. Integer sums do
not depend on the order of addition, so neither the batch nor the device's reduction order can move a draw.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dragoman_agent.device.base import Penalties, SamplingBatch
from dragoman_agent.engine.philox import uniforms

GREEDY_BELOW = 1e-5  # temperatures under it are greedy: dividing by them only risks overflow
MIN_LOGPROB = -9999.0  # what JSON can carry in the place of minus infinity
_WEIGHT_ONE = 1 << 40  # weight of the likeliest token; 2**22 tokens of it still fit an int64 sum
_HEAD = 512  # candidates looked at before a search over the whole vocabulary
_MAX_RANDOM_ROWS = 64  # rows drawn at once: bounds the scratch to 64 * vocab_size * ~40 bytes


@dataclass(frozen=True, slots=True)
class Sampled:
    """Tensors on the device of the logits; meanings as in StepResult. Logprob parts are None when no row asked."""

    token_ids: Tensor  # int64 [num_samples]; 0 where not finite
    finite: Tensor  # bool [num_samples]
    logprobs: Tensor | None = None  # float32 [num_samples]; 0 in rows that did not ask
    top_ids: Tensor | None = None  # int64 [num_samples, k], ties by lowest id; -1 in rows that did not ask
    top_logprobs: Tensor | None = None  # float32 [num_samples, k]


def is_plain_greedy(batch: SamplingBatch) -> bool:
    """Whether an argmax of the raw logits is all the batch asks for."""
    edited = batch.penalties or batch.logit_bias or batch.banned or batch.allowed
    return not edited and bool((batch.temperatures < GREEDY_BELOW).all()) and bool((batch.num_logprobs < 0).all())


def sample(logits: Tensor, batch: SamplingBatch) -> Sampled:
    """Sample one token a row from float32 `logits` [num_samples, vocab_size], which are left as they are.

    Order: logit bias, penalties, banned and allowed ids, temperature, min-p, top-k, top-p (each over what the one before
    left, the mass renormalised), then one uniform and the inverse CDF in vocabulary order. Tokens that tie with the
    last one kept by top-k or top-p are kept. Logprobs are the log-softmax of the raw logits: before bias, penalties,
    temperature and filters. A row is not finite when a logit is NaN or +inf, or when no token is left to sample.
    Raises ValueError on a token id outside the vocabulary.
    """
    if is_plain_greedy(batch):
        best = logits.argmax(dim=-1)  # NaN counts as the largest, so the winner's value tells about the row
        finite = torch.isfinite(logits.gather(1, best.unsqueeze(1)).squeeze(1))
        return Sampled(torch.where(finite, best, 0), finite)
    finite = torch.isfinite(logits.amax(dim=-1))
    edited = _edit(logits, batch)
    ids = edited.argmax(dim=-1)
    if edited is not logits:
        finite &= torch.isfinite(edited.gather(1, ids.unsqueeze(1)).squeeze(1))
    random_rows = np.flatnonzero(batch.temperatures >= GREEDY_BELOW)
    for start in range(0, len(random_rows), _MAX_RANDOM_ROWS):
        rows = random_rows[start : start + _MAX_RANDOM_ROWS]
        index = torch.from_numpy(rows).to(logits.device)
        usable = finite[index].unsqueeze(1)
        ids[index] = _draw(torch.where(usable, edited[index], 0.0), batch, rows)
    token_ids = torch.where(finite, ids, 0)
    return Sampled(token_ids, finite, *_logprobs(logits, token_ids, finite, batch))


def _draw(logits: Tensor, batch: SamplingBatch, rows: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Tensor:
    """Token ids [n] of the rows' finite `logits` [n, vocab_size]; `rows` are their places in the batch."""
    device = logits.device
    temperatures = torch.from_numpy(batch.temperatures[rows]).to(device).unsqueeze(1)
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperatures
    weights = _weights(scaled)
    min_ps = batch.min_ps[rows].astype(np.float64)
    if (min_ps > 0).any():
        least = torch.from_numpy(np.ceil(min_ps * _WEIGHT_ONE).astype(np.int64)).to(device)
        weights *= weights >= least.unsqueeze(1)
    vocab_size = logits.shape[1]
    top_ks = np.where(batch.top_ks[rows] > 0, np.minimum(batch.top_ks[rows], vocab_size), vocab_size).astype(np.int64)
    top_ps = np.clip(batch.top_ps[rows].astype(np.float64), 0.0, 1.0)
    filtered = np.flatnonzero((top_ks < vocab_size) | (top_ps < 1.0))
    if len(filtered):
        index = torch.from_numpy(filtered).to(device)
        weights[index] = _filter(scaled[index], weights[index], top_ks[filtered], top_ps[filtered])
    cumulative = weights.cumsum(dim=-1)
    total = cumulative[:, -1]
    uniform = torch.from_numpy(uniforms(batch.seeds[rows], batch.choices[rows], batch.cursors[rows])).to(device)
    # A double holds fewer bits than the total may have; the product must not round up to the total.
    target = torch.minimum((uniform * total.double()).long(), total - 1)
    return torch.searchsorted(cumulative, target.unsqueeze(1), right=True).squeeze(1)


def _weights(scaled: Tensor) -> Tensor:
    return (scaled.exp().double() * _WEIGHT_ONE).long()


def _filter(
    scaled: Tensor,
    weights: Tensor,
    top_ks: np.ndarray[tuple[int], np.dtype[np.int64]],
    top_ps: np.ndarray[tuple[int], np.dtype[np.float64]],
) -> Tensor:
    """`weights` [n, vocab_size] with zeros outside top-k, then outside top-p of what is left."""
    device = scaled.device
    keys = _ordered_keys(scaled)
    head_keys, head_index = keys.topk(min(_HEAD, keys.shape[1]), dim=-1)  # best first
    k = torch.from_numpy(top_ks).to(device)
    weights = torch.where(keys >= _top_k_threshold(keys, head_keys, k).unsqueeze(1), weights, 0)
    if (top_ps >= 1.0).all():
        return weights
    p = torch.from_numpy(top_ps).to(device)
    mass = weights.sum(dim=-1)
    needed = torch.where(p < 1.0, (p * mass.double()).ceil().long().clamp(min=1), 0)
    needed = torch.minimum(needed, mass)
    head_mass = weights.gather(1, head_index).cumsum(dim=-1)
    place = torch.searchsorted(head_mass, needed.unsqueeze(1))
    found = place.squeeze(1) < head_mass.shape[1]
    threshold = head_keys.gather(1, place.clamp(max=head_mass.shape[1] - 1)).squeeze(1)
    threshold = torch.where(p < 1.0, threshold, torch.iinfo(torch.int32).min)
    missing = torch.nonzero(~found & (p < 1.0)).squeeze(1)
    if len(missing):
        threshold[missing] = _search(keys[missing], weights[missing], needed[missing])
    return torch.where(keys >= threshold.unsqueeze(1), weights, 0)


def _top_k_threshold(keys: Tensor, head_keys: Tensor, k: Tensor) -> Tensor:
    """The k-th largest key of each row, [n]; the smallest key there is where k is the whole vocabulary."""
    vocab_size, head = keys.shape[1], head_keys.shape[1]
    threshold = head_keys.gather(1, (k.clamp(max=head) - 1).unsqueeze(1)).squeeze(1)
    threshold = torch.where(k < vocab_size, threshold, torch.iinfo(torch.int32).min)
    missing = torch.nonzero((k > head) & (k < vocab_size)).squeeze(1)
    if len(missing):
        threshold[missing] = _search(keys[missing], torch.ones_like(keys[missing], dtype=torch.int64), k[missing])
    return threshold


def _ordered_keys(values: Tensor) -> Tensor:
    """int32 keys that order as the float32 values do; both zeros are one key."""
    bits = (values + 0.0).view(torch.int32)
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _search(keys: Tensor, values: Tensor, needed: Tensor) -> Tensor:
    """The largest int32 key t a row with sum(values[keys >= t]) >= needed, by bisection over the keys' 32 bits.

    `keys` and `values` [n, vocab_size], `needed` [n] at most the row's sum. Exact, without a sort.
    """
    low = torch.full_like(needed, torch.iinfo(torch.int32).min)
    high = keys.amax(dim=-1).long() + 1
    for _ in range(32):
        middle = (low + high) >> 1
        enough = torch.where(keys >= middle.unsqueeze(1), values, 0).sum(dim=-1) >= needed
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    return low.int()


def _logprobs(
    logits: Tensor, token_ids: Tensor, finite: Tensor, batch: SamplingBatch
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Logprobs of the sampled tokens and of the best ones, from the raw logits."""
    asking = np.flatnonzero(batch.num_logprobs >= 0)
    if not len(asking):
        return None, None, None
    index = torch.from_numpy(asking).to(logits.device)
    raw = torch.where(finite[index].unsqueeze(1), logits[index], 0.0)
    highest = raw.amax(dim=-1, keepdim=True)
    total = _weights(raw - highest).sum(dim=-1, keepdim=True)
    offset = highest.double() + (total.double() / _WEIGHT_ONE).log()

    def values_at(ids: Tensor) -> Tensor:
        return (raw.gather(1, ids).double() - offset).clamp(min=MIN_LOGPROB).float()

    logprobs = torch.zeros(len(token_ids), device=logits.device)
    logprobs[index] = values_at(token_ids[index].unsqueeze(1)).squeeze(1)
    k = min(int(batch.num_logprobs.max()), logits.shape[1])
    if k == 0:
        return logprobs, None, None
    # Ties go to the lowest id: the id, complemented, makes the low half of the key.
    complements = torch.arange(logits.shape[1], 0, -1, device=logits.device)
    best = ((_ordered_keys(raw).long() << 32) | complements).topk(k, dim=-1).indices
    top_ids = torch.full((len(token_ids), k), -1, dtype=torch.int64, device=logits.device)
    top_ids[index] = best
    top_logprobs = torch.zeros(len(token_ids), k, device=logits.device)
    top_logprobs[index] = values_at(best)
    return logprobs, top_ids, top_logprobs


def _edit(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """`logits` with bias, penalties and masks applied to a copy; the same tensor when there is nothing to apply."""
    if not (batch.logit_bias or batch.penalties or batch.banned or batch.allowed):
        return logits
    edited = logits.clone()
    vocab_size = logits.shape[1]
    if batch.logit_bias:
        rows, ids = _flatten({row: ids for row, (ids, _) in batch.logit_bias.items()}, vocab_size, "logit_bias")
        added = np.concatenate([values for _, values in batch.logit_bias.values()]).astype(np.float32)
        edited.index_put_(_place(rows, ids, logits), torch.from_numpy(added).to(logits.device), accumulate=True)
    if batch.penalties:
        _penalise(edited, batch.penalties)
    if batch.banned:
        rows, ids = _flatten(batch.banned, vocab_size, "banned")
        edited[_place(rows, ids, logits)] = -torch.inf
    if batch.allowed:
        rows, ids = _flatten(batch.allowed, vocab_size, "allowed")
        place = _place(rows, ids, logits)
        kept = edited[place]
        edited[torch.tensor(list(batch.allowed), device=logits.device)] = -torch.inf
        edited[place] = kept
    return edited


def _penalise(edited: Tensor, penalties: dict[int, Penalties]) -> None:
    """Repetition over prompt and output, then frequency and presence over the output, in place."""
    ids_by_row: dict[int, np.ndarray[tuple[int], np.dtype[np.int64]]] = {}
    factors: list[np.ndarray[tuple[int], np.dtype[np.float32]]] = []
    offsets: list[np.ndarray[tuple[int], np.dtype[np.float32]]] = []
    for row, penalty in penalties.items():
        seen = np.concatenate((penalty.output_ids, penalty.prompt_ids)).astype(np.int64)
        in_output = np.arange(len(seen)) < len(penalty.output_ids)
        unique, inverse = np.unique(seen, return_inverse=True)
        counts = np.bincount(inverse, weights=in_output, minlength=len(unique))
        ids_by_row[row] = unique
        factors.append(np.full(len(unique), penalty.repetition, np.float32))
        offsets.append((counts * penalty.frequency + (counts > 0) * penalty.presence).astype(np.float32))
    rows, ids = _flatten(ids_by_row, edited.shape[1], "penalties")
    place = _place(rows, ids, edited)
    factor = torch.from_numpy(np.concatenate(factors)).to(edited.device)
    offset = torch.from_numpy(np.concatenate(offsets)).to(edited.device)
    values = edited[place]
    edited[place] = torch.where(values > 0, values / factor, values * factor) - offset


_IdArray = np.ndarray[tuple[int], np.dtype[np.int64]]


def _flatten(
    ids_by_row: dict[int, np.ndarray[tuple[int], np.dtype[np.int32]]] | dict[int, _IdArray], vocab_size: int, what: str
) -> tuple[_IdArray, _IdArray]:
    """Row and token id of each entry. Raises ValueError on an id outside the vocabulary."""
    ids = np.concatenate([np.asarray(values, np.int64) for values in ids_by_row.values()])
    rows = np.repeat(np.fromiter(ids_by_row, np.int64), [len(values) for values in ids_by_row.values()])
    if len(ids) and (ids.min() < 0 or ids.max() >= vocab_size):
        wrong = int(ids.min() if ids.min() < 0 else ids.max())
        raise ValueError(
            f"{what} names token {wrong}, but the vocabulary has {vocab_size} tokens (0 to {vocab_size - 1})"
        )
    return rows, ids


def _place(rows: _IdArray, ids: _IdArray, logits: Tensor) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(rows).to(logits.device), torch.from_numpy(ids).to(logits.device)
