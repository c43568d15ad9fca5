"""Turns logits into token ids on any torch device; a row's token depends on nothing but its own row and request.

Sampling weighs token i by the integer floor(exp(z_i) * 2**40), z = (logit - max) / temperature in fp32. Integer sums do
not depend on the order of addition, so neither the batch nor the device's reduction order can move a draw. A GPU's steps draw by kernels
(device/cuda_redraw.py) and take logprobs from here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from dragoman_agent.device.base import SamplingBatch
from dragoman_agent.engine.packed_copy import send
from dragoman_agent.engine.philox import uniforms
from dragoman_agent.engine.sampling_terms import (
    GREEDY_BELOW,
    MIN_LOGPROB,
    WEIGHT_ONE,
    Int64Array,
    edit_terms,
    is_edited,
    is_plain_greedy,
)

_HEAD = 512  # candidates looked at before a search over the whole vocabulary
_MAX_MASKED_ROWS = 64  # rows masked at once: bounds the scratch to 64 * vocab_size * ~8 bytes
_MAX_RANDOM_ROWS = 64  # rows drawn at once: bounds the scratch to 64 * vocab_size * ~40 bytes
MAX_ROWS = 64  # rows of `logprobs_of` at once


@dataclass(frozen=True, slots=True)
class Sampled:
    """Tensors on the device of the logits; meanings as in StepResult. Logprob parts are None when no row asked."""

    token_ids: Tensor  # int64 [num_samples]; 0 where not finite
    finite: Tensor  # bool [num_samples]
    logprobs: Tensor | None = None  # float32 [num_samples]; 0 in rows that did not ask
    top_ids: Tensor | None = None  # int64 [num_samples, k], ties by lowest id; -1 in rows that did not ask
    top_logprobs: Tensor | None = None  # float32 [num_samples, k]


def sample(logits: Tensor, batch: SamplingBatch) -> Sampled:
    """Sample one token a row from float32 `logits` [num_samples, vocab_size], which are left as they are.

    Order: logit bias, penalties, banned and allowed ids, grammar mask, temperature, min-p, top-k, top-p (each over what the one before
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
        _draw(edited, finite, batch, rows, ids)
    token_ids = torch.where(finite, ids, 0)
    return logprobs_of(logits, token_ids, finite, batch) or Sampled(token_ids, finite)


def _draw(edited: Tensor, finite: Tensor, batch: SamplingBatch, rows: Int64Array, ids: Tensor) -> None:
    """Write the tokens that `rows` of the batch draw from `edited` [num_samples, vocab_size] into `ids`."""
    vocab_size = edited.shape[1]
    top_ks = np.where(batch.top_ks[rows] > 0, np.minimum(batch.top_ks[rows], vocab_size), vocab_size).astype(np.int64)
    top_ps = np.clip(batch.top_ps[rows].astype(np.float64), 0.0, 1.0)
    filtered = np.flatnonzero((top_ks < vocab_size) | (top_ps < 1.0))
    min_ps = np.minimum(batch.min_ps[rows].astype(np.float64), 1.0)
    terms = {
        "rows": rows,
        "temperatures": batch.temperatures[rows],
        "uniforms": uniforms(batch.seeds[rows], batch.choices[rows], batch.cursors[rows]),
        "least": np.ceil(min_ps * WEIGHT_ONE).astype(np.int64),
        "filtered": filtered,
    }
    sent = send(terms, edited.device)
    index = sent["rows"]
    logits = torch.where(finite[index].unsqueeze(1), edited[index], 0.0)
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / sent["temperatures"].unsqueeze(1)
    weights = _weights(scaled)
    if (min_ps > 0).any():
        weights *= weights >= sent["least"].unsqueeze(1)
    if len(filtered):
        some = sent["filtered"]
        weights[some] = _filter(scaled[some], weights[some], top_ks[filtered], top_ps[filtered])
    cumulative = weights.cumsum(dim=-1)
    total = cumulative[:, -1]
    # A double holds fewer bits than the total may have; the product must not round up to the total.
    target = torch.minimum((sent["uniforms"] * total.double()).long(), total - 1)
    ids[index] = torch.searchsorted(cumulative, target.unsqueeze(1), right=True).squeeze(1)


def _weights(scaled: Tensor) -> Tensor:
    return (scaled.exp().double() * WEIGHT_ONE).long()


def _filter(
    scaled: Tensor,
    weights: Tensor,
    top_ks: np.ndarray[tuple[int], np.dtype[np.int64]],
    top_ps: np.ndarray[tuple[int], np.dtype[np.float64]],
) -> Tensor:
    """`weights` [n, vocab_size] with zeros outside top-k, then outside top-p of what is left."""
    sent = send({"k": top_ks, "p": top_ps}, scaled.device)
    keys = _ordered_keys(scaled)
    head_keys, head_index = keys.topk(min(_HEAD, keys.shape[1]), dim=-1)  # best first
    least = _top_k_threshold(keys, head_keys, top_ks, sent["k"])
    weights = torch.where(keys >= least.unsqueeze(1), weights, 0)
    if (top_ps >= 1.0).all():
        return weights
    p = sent["p"]
    mass = weights.sum(dim=-1)
    needed = torch.where(p < 1.0, (p * mass.double()).ceil().long().clamp(min=1), 0)
    needed = torch.minimum(needed, mass)
    head_mass = weights.gather(1, head_index).cumsum(dim=-1)
    place = torch.searchsorted(head_mass, needed.unsqueeze(1))
    found = place.squeeze(1) < head_mass.shape[1]
    # Where top-k ends within the head, whatever it kept beyond the head ties with the last one kept.
    threshold = torch.where(found, head_keys.gather(1, place.clamp(max=head_mass.shape[1] - 1)).squeeze(1), least)
    threshold = torch.where(p < 1.0, threshold, torch.iinfo(torch.int32).min)
    settled = found | (sent["k"] <= head_keys.shape[1]) | (p >= 1.0)
    if ((top_ks > head_keys.shape[1]) & (top_ps < 1.0)).any() and len(missing := torch.nonzero(~settled).squeeze(1)):
        threshold[missing] = _search(keys[missing], weights[missing], needed[missing])
    return torch.where(keys >= threshold.unsqueeze(1), weights, 0)


def _top_k_threshold(keys: Tensor, head_keys: Tensor, top_ks: Int64Array, k: Tensor) -> Tensor:
    """The k-th largest key of each row, [n]; the smallest key there is where k is the whole vocabulary. `k` is `top_ks`."""
    vocab_size, head = keys.shape[1], head_keys.shape[1]
    threshold = head_keys.gather(1, (k.clamp(max=head) - 1).unsqueeze(1)).squeeze(1)
    threshold = torch.where(k < vocab_size, threshold, torch.iinfo(torch.int32).min)
    beyond = np.flatnonzero((top_ks > head) & (top_ks < vocab_size))
    if len(beyond):
        missing = send({"beyond": beyond}, keys.device)["beyond"]
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


def logprobs_of(logits: Tensor, token_ids: Tensor, finite: Tensor, batch: SamplingBatch) -> Sampled | None:
    """Tokens that were drawn, with the logprobs that rows of the batch ask for; None where none does.

    `logits` [num_samples, vocab_size] of any float type, `token_ids` and `finite` [at least num_samples].
    A few rows at a time: scratch is MAX_ROWS * vocab_size * ~24 bytes, however many rows there are.
    """
    asking = np.flatnonzero(batch.num_logprobs >= 0)
    if not len(asking):
        return None
    num_rows, k = len(batch.num_logprobs), min(int(batch.num_logprobs.max()), logits.shape[1])
    device = logits.device
    found = Sampled(token_ids[:num_rows].long(), finite[:num_rows] > 0, torch.zeros(num_rows, device=device))
    if k:
        top_ids = torch.full((num_rows, k), -1, dtype=torch.int64, device=device)
        found = replace(found, top_ids=top_ids, top_logprobs=torch.zeros(num_rows, k, device=device))
    for start in range(0, len(asking), MAX_ROWS):
        index = send({"rows": asking[start : start + MAX_ROWS]}, device)["rows"]
        raw = torch.where(found.finite[index].unsqueeze(1), logits[index].float(), 0.0)
        own, best, best_logprobs = _logprobs_of(raw, found.token_ids[index], k)
        assert found.logprobs is not None
        found.logprobs[index] = own
        if best is not None and best_logprobs is not None:
            assert found.top_ids is not None and found.top_logprobs is not None
            found.top_ids[index], found.top_logprobs[index] = best, best_logprobs
    return found


def score(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Logprobs [n] of given tokens under float32 `logits` [n, vocab_size], and the best `num_top` of each row.

    The same numbers as `sample` reports. NaN where a logit is NaN or +inf. Ids int64, logprobs float32.
    """
    finite = torch.isfinite(logits.amax(dim=-1))
    raw = torch.where(finite.unsqueeze(1), logits, 0.0)
    own, ids, top = _logprobs_of(raw, token_ids, min(num_top, logits.shape[1]))
    return torch.where(finite, own, torch.nan), ids, top


def _logprobs_of(raw: Tensor, token_ids: Tensor, k: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Log-softmax of finite rows at `token_ids` [n], and the best k ids and their values."""
    highest = raw.amax(dim=-1, keepdim=True)
    total = _weights(raw - highest).sum(dim=-1, keepdim=True)
    offset = highest.double() + (total.double() / WEIGHT_ONE).log()

    def values_at(ids: Tensor) -> Tensor:
        return (raw.gather(1, ids).double() - offset).clamp(min=MIN_LOGPROB).float()

    own = values_at(token_ids.unsqueeze(1)).squeeze(1)
    if k == 0:
        return own, None, None
    # Ties go to the lowest id: the id, complemented, makes the low half of the key.
    complements = torch.arange(raw.shape[1], 0, -1, device=raw.device)
    best = ((_ordered_keys(raw).long() << 32) | complements).topk(k, dim=-1).indices
    return own, best, values_at(best)


def _edit(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """`logits` with bias, penalties and masks applied to a copy; the same tensor when there is nothing to apply.

    One copy to the device and some thirty torch calls at most, however many rows there are.
    """
    if not is_edited(batch):
        return logits
    sent = send(edit_terms(batch, logits.shape[1]), logits.device)
    edited = logits.clone(memory_format=torch.contiguous_format)
    flat = edited.view(-1)
    if "biased" in sent:
        flat.index_put_((sent["biased"],), sent["added"], accumulate=True)
    if "seen" in sent:
        _penalise(flat, sent, logits.shape[1])
    if "banned" in sent:
        flat.index_fill_(0, sent["banned"], -torch.inf)
    if "allowed" in sent:
        kept = flat[sent["allowed"]]
        edited.index_fill_(0, sent["allowed_rows"], -torch.inf)
        flat[sent["allowed"]] = kept
    if "masks" in sent:
        _mask(edited, sent["masked_rows"], sent["masks"].view(-1, batch.masks.shape[1]))
    return edited


def _penalise(flat: Tensor, sent: dict[str, Tensor], vocab_size: int) -> None:
    """Penalties of seen tokens, as `penalty_terms` defines them. A token that was seen twice is written twice, the same."""
    seen, in_output = sent["seen"], sent["in_output"]
    counts = torch.zeros_like(flat, dtype=torch.int32)
    counts.scatter_add_(0, in_output, torch.ones_like(in_output, dtype=torch.int32))
    count = counts[seen]
    table = sent["penalties"].view(-1, 3)[seen // vocab_size]
    factor, (presence, frequency) = table[:, 0].float(), table[:, 1:].unbind(1)
    offset = (count * frequency + (count > 0) * presence).float()
    values = flat[seen]
    flat[seen] = torch.where(values > 0, values / factor, values * factor) - offset


def _mask(edited: Tensor, rows: Tensor, masks: Tensor) -> None:
    """Leave in `rows` what their `masks` int32 [num_masked, num_words] allow, in place."""
    bits = torch.arange(32, dtype=torch.int32, device=edited.device)
    for start in range(0, len(rows), _MAX_MASKED_ROWS):
        some, words = (part[start : start + _MAX_MASKED_ROWS] for part in (rows, masks))
        may = ((words.unsqueeze(2) >> bits) & 1).flatten(1)[:, : edited.shape[1]]
        edited[some] = edited[some].masked_fill(may == 0, -torch.inf)
