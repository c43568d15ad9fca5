"""Top-k, top-p and min-p of a few rows, without a sort: what a row keeps is found, then one token is drawn from it.

16 sums a block tell between which two marks, evenly spaced over the row's range, its threshold lies. The tokens between them are
gathered, and one program a row halves their range until one value is left. Every sum is of integers, so no order of addition
and no neighbour moves a draw. engine/host_sampler.py defines what is kept: tokens that tie with the last one are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from dragoman_kernels.triton.filter_search import filter_search_kernel
from dragoman_kernels.triton.filter_terms import (
    KEEPS_ALL,
    LEAST_TEMPERATURE,
    LOWEST_SCALED,
    is_finite,
    keys_of,
    least_of,
    scaled_logits,
    share_of,
    top_p_of,
    weights_of,
    word_of,
)
from dragoman_kernels.triton.sampling import BLOCK, SamplingWorkspace, row_max

NUM_WORDS = 6  # int32 of a row: its row of the logits, top-k, top-p (float32 bits), least weight (two), its row of edited logits
_BINS = tl.constexpr(16)
_TILE = 2048  # candidates looked at at once
_MAX_ROWS = 256  # of one call; bounds the candidates to as many times the vocabulary's words


class FilterWorkspace:
    """What the kernels of this file pass on, for at most `max_num_rows` rows at once."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        """For batches of `num_rows`."""
        self.max_num_rows = rows = min(num_rows, _MAX_ROWS)
        blocks = triton.cdiv(vocab_size, BLOCK)
        self.coarse = torch.empty((rows, blocks, _BINS.value), dtype=torch.int64, device=device)
        self.counts = torch.empty((rows,), dtype=torch.int32, device=device)
        self.needed = torch.empty((rows,), dtype=torch.int64, device=device)
        self.candidates = torch.empty((rows, vocab_size), dtype=torch.int32, device=device)
        self.thresholds = torch.empty((rows,), dtype=torch.int32, device=device)


@triton.jit
def _lowest_mark(min_ptr, row, num_blocks, best, temperature, PADDED: tl.constexpr):
    """The end of the range that the marks divide: the row's smallest value, or where weights end."""
    blocks = tl.arange(0, PADDED)
    minima = tl.load(min_ptr + row * num_blocks + blocks, mask=blocks < num_blocks, other=float("inf"))
    return tl.maximum(tl.div_rn(tl.min(minima, axis=0) - best, temperature), LOWEST_SCALED)


@triton.jit(
    do_not_specialize=["num_rows", "vocab", "num_blocks"],
    do_not_specialize_on_alignment=["words_ptr", "temperature_ptr"],
)
def _filter_coarse_kernel(
    logits_ptr, edited_ptr, words_ptr, max_ptr, min_ptr, temperature_ptr, coarse_ptr, counts_ptr,
    num_rows, vocab, stride, num_blocks, BLOCK: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """How many tokens, or how much weight, a block has from each mark on."""
    at = tl.program_id(0)
    block = tl.program_id(1)
    row = word_of(words_ptr, 0, at, num_rows).to(tl.int64)
    k = word_of(words_ptr, 1, at, num_rows)
    temperature = tl.load(temperature_ptr + row)
    if ((k > 0) | (top_p_of(words_ptr, at, num_rows) < 1.0)) & (temperature >= LEAST_TEMPERATURE):
        best = row_max(max_ptr, row, num_blocks, PADDED)
        if is_finite(best):
            edited = word_of(words_ptr, 5, at, num_rows)
            columns = block * BLOCK + tl.arange(0, BLOCK)
            scaled = scaled_logits(logits_ptr, edited_ptr, row, edited, columns, vocab, stride, best, temperature)
            lowest = _lowest_mark(min_ptr, row, num_blocks, best, temperature, PADDED)
            out = coarse_ptr + (at.to(tl.int64) * num_blocks + block) * _BINS
            # Tokens without weight may be counted: they come last.
            if k > 0:
                for mark in tl.static_range(1, _BINS):
                    over = scaled >= lowest * (mark / _BINS)
                    tl.store(out + mark - 1, tl.sum(over.to(tl.int32), axis=0).to(tl.int64))
                tl.store(out + _BINS - 1, tl.sum((scaled >= LOWEST_SCALED).to(tl.int32), axis=0).to(tl.int64))
            else:
                weights = weights_of(scaled, least_of(words_ptr, at, num_rows))
                for mark in tl.static_range(1, _BINS):
                    over = scaled >= lowest * (mark / _BINS)
                    tl.store(out + mark - 1, tl.sum(tl.where(over, weights, 0), axis=0))
                tl.store(out + _BINS - 1, tl.sum(weights, axis=0))
            if block == 0:
                tl.store(counts_ptr + at, 0)


@triton.jit(
    do_not_specialize=["num_rows", "vocab", "num_blocks"],
    do_not_specialize_on_alignment=["words_ptr", "temperature_ptr"],
)
def _filter_gather_kernel(
    logits_ptr, edited_ptr, words_ptr, max_ptr, min_ptr, temperature_ptr, coarse_ptr, counts_ptr, needed_ptr, candidates_ptr,
    num_rows, vocab, stride, num_blocks, BLOCK: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """The keys of the tokens among which the threshold is, in any order: those between two marks, or for top-k from a mark on."""
    at = tl.program_id(0)
    block = tl.program_id(1)
    row = word_of(words_ptr, 0, at, num_rows).to(tl.int64)
    k = word_of(words_ptr, 1, at, num_rows)
    p = top_p_of(words_ptr, at, num_rows)
    temperature = tl.load(temperature_ptr + row)
    if ((k > 0) | (p < 1.0)) & (temperature >= LEAST_TEMPERATURE):
        best = row_max(max_ptr, row, num_blocks, PADDED)
        if is_finite(best):
            blocks = tl.arange(0, PADDED)
            bins = tl.arange(0, _BINS)
            places = (at.to(tl.int64) * num_blocks + blocks[:, None]) * _BINS + bins[None, :]
            totals = tl.sum(tl.load(coarse_ptr + places, mask=blocks[:, None] < num_blocks, other=0), axis=0)
            total = tl.max(totals, axis=0)  # the last one
            needed = tl.where(k > 0, k.to(tl.int64), share_of(p, total))
            place = tl.minimum(tl.sum((totals < needed).to(tl.int32), axis=0), _BINS - 1)
            lowest = _lowest_mark(min_ptr, row, num_blocks, best, temperature, PADDED)
            lower = tl.where(place == _BINS - 1, LOWEST_SCALED, lowest * ((place + 1).to(tl.float32) * (1.0 / _BINS)))
            upper = tl.where((place == 0) | (k > 0), 1.0, lowest * (place.to(tl.float32) * (1.0 / _BINS)))
            if block == 0:
                over = tl.max(tl.where(bins < place, totals, 0), axis=0)
                tl.store(needed_ptr + at, tl.where(k > 0, needed, needed - over))
            highest = tl.div_rn(tl.load(max_ptr + row * num_blocks + block) - best, temperature)
            if highest >= lower:
                edited = word_of(words_ptr, 5, at, num_rows)
                columns = block * BLOCK + tl.arange(0, BLOCK)
                scaled = scaled_logits(logits_ptr, edited_ptr, row, edited, columns, vocab, stride, best, temperature)
                is_one = ((scaled >= lower) & (scaled < upper)).to(tl.int32)
                count = tl.sum(is_one, axis=0)
                if count > 0:
                    start = tl.atomic_add(counts_ptr + at, count)
                    out = candidates_ptr + at.to(tl.int64) * vocab + start
                    tl.store(out + tl.cumsum(is_one, axis=0) - 1, keys_of(scaled), mask=is_one > 0)


@triton.jit
def _threshold(words_ptr, threshold_ptr, at, num_rows):
    """The key from which on a row keeps its tokens; all where it has neither top-k nor top-p."""
    threshold = word_of(words_ptr, 1, at, num_rows)
    if (threshold > 0) | (top_p_of(words_ptr, at, num_rows) < 1.0):
        threshold = tl.load(threshold_ptr + at)
    else:
        threshold = threshold * 0 + KEEPS_ALL
    return threshold


@triton.jit
def _kept(
    logits_ptr, edited_ptr, words_ptr, threshold, at, num_rows, row, block, vocab, stride, best, temperature,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Weights of the tokens of a block that the filters keep."""
    edited = word_of(words_ptr, 5, at, num_rows)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    scaled = scaled_logits(logits_ptr, edited_ptr, row, edited, columns, vocab, stride, best, temperature)
    return tl.where(keys_of(scaled) >= threshold, weights_of(scaled, least_of(words_ptr, at, num_rows)), 0)


@triton.jit(
    do_not_specialize=["num_rows", "vocab", "num_blocks"],
    do_not_specialize_on_alignment=["words_ptr", "temperature_ptr"],
)
def _kept_sum_kernel(
    logits_ptr, edited_ptr, words_ptr, max_ptr, temperature_ptr, threshold_ptr, sum_ptr,
    num_rows, vocab, stride, num_blocks, BLOCK: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0)
    block = tl.program_id(1)
    row = word_of(words_ptr, 0, at, num_rows).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    if temperature >= LEAST_TEMPERATURE:
        best = row_max(max_ptr, row, num_blocks, PADDED)
        if is_finite(best):
            threshold = _threshold(words_ptr, threshold_ptr, at, num_rows)
            highest = tl.div_rn(tl.load(max_ptr + row * num_blocks + block) - best, temperature)
            total = threshold.to(tl.int64) * 0
            if keys_of(highest) >= threshold:
                kept = _kept(
                    logits_ptr, edited_ptr, words_ptr, threshold, at, num_rows, row, block, vocab, stride, best,
                    temperature, BLOCK,
                )  # fmt: skip
                total = tl.sum(kept, axis=0)
            tl.store(sum_ptr + row * num_blocks + block, total)


@triton.jit(
    do_not_specialize=["num_rows", "vocab", "num_blocks"],
    do_not_specialize_on_alignment=["words_ptr", "temperature_ptr", "uniform_ptr"],
)
def _kept_pick_kernel(
    logits_ptr, edited_ptr, words_ptr, max_ptr, arg_ptr, sum_ptr, temperature_ptr, uniform_ptr, threshold_ptr,
    ids_ptr, finite_ptr, num_rows, vocab, stride, num_blocks, BLOCK: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0)
    row = word_of(words_ptr, 0, at, num_rows).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    best = row_max(max_ptr, row, num_blocks, PADDED)
    finite = is_finite(best)
    tl.store(finite_ptr + row, finite.to(tl.int32))
    blocks = tl.arange(0, PADDED)
    inside = blocks < num_blocks
    if (temperature < LEAST_TEMPERATURE) | (finite == 0):
        maxima = tl.load(max_ptr + row * num_blocks + blocks, mask=inside, other=float("-inf"))
        places = tl.load(arg_ptr + row * num_blocks + blocks, mask=inside, other=2147483647)
        chosen = tl.min(tl.where(maxima == best, places, 2147483647), axis=0)
        tl.store(ids_ptr + row, tl.where(finite, chosen, 0))
    else:
        sums = tl.load(sum_ptr + row * num_blocks + blocks, mask=inside, other=0)
        total = tl.sum(sums, axis=0)
        uniform = tl.load(uniform_ptr + row)
        # A double holds fewer bits than the total may have; the product must not round up to the total.
        target = tl.minimum((uniform * total.to(tl.float64)).to(tl.int64), total - 1)
        block = tl.sum((tl.cumsum(sums, axis=0) <= target).to(tl.int32), axis=0)
        rest = target - tl.sum(tl.where(blocks < block, sums, 0), axis=0)
        threshold = _threshold(words_ptr, threshold_ptr, at, num_rows)
        kept = _kept(
            logits_ptr, edited_ptr, words_ptr, threshold, at, num_rows, row, block, vocab, stride, best,
            temperature, BLOCK,
        )  # fmt: skip
        running = tl.cumsum(kept, axis=0)
        tl.store(ids_ptr + row, block * BLOCK + tl.sum((running <= rest).to(tl.int32), axis=0))


@dataclass(frozen=True, slots=True)
class Drawn:
    """What rows are drawn by and where what they draw goes, [num_rows of the logits] each, on the device."""

    temperatures: torch.Tensor  # float32
    uniforms: torch.Tensor  # float64
    token_ids: torch.Tensor  # int32
    finite: torch.Tensor  # int32


def draw_rows(
    logits: torch.Tensor,
    edited: torch.Tensor,
    words: torch.Tensor,
    num_rows: int,
    workspace: SamplingWorkspace,
    filters: FilterWorkspace,
    drawn: Drawn,
    *,
    has_filters: bool,
    has_random: bool,
) -> None:
    """Draw again the rows that `words` int32 begins with, [NUM_WORDS, num_rows]; at most `filters.max_num_rows`.

    `sample_rows` was called with the same `logits` [any, vocab_size] and `workspace` before. A row's edited logits are in
    `edited` float32 [any, vocab_size] where its words name a row there, else -1. `has_filters`: some of the rows have top-k
    (not 0, under vocab_size) or top-p (under 1); `has_random`: some have a temperature.
    """
    vocab = logits.shape[1]
    num_blocks = triton.cdiv(vocab, BLOCK)
    padded = triton.next_power_of_2(num_blocks)
    grid, one = (num_rows, num_blocks), (num_rows,)
    w, f, d = workspace, filters, drawn
    source = (logits, edited, words)
    sizes = (num_rows, vocab, logits.stride(0), num_blocks)
    if has_filters:
        _filter_coarse_kernel[grid](
            *source, w.maxima, w.minima, d.temperatures, f.coarse, f.counts, *sizes,
            BLOCK=BLOCK, PADDED=padded, num_warps=8,
        )  # fmt: skip
        _filter_gather_kernel[grid](
            *source, w.maxima, w.minima, d.temperatures, f.coarse, f.counts, f.needed, f.candidates, *sizes,
            BLOCK=BLOCK, PADDED=padded, num_warps=8,
        )  # fmt: skip
        filter_search_kernel[one](
            words, w.maxima, d.temperatures, f.counts, f.needed, f.candidates, f.thresholds,
            num_rows, vocab, num_blocks, TILE=_TILE, PADDED=padded, num_warps=8,
        )  # fmt: skip
    if has_random:
        _kept_sum_kernel[grid](
            *source, w.maxima, d.temperatures, f.thresholds, w.sums, *sizes, BLOCK=BLOCK, PADDED=padded, num_warps=8
        )
    _kept_pick_kernel[one](
        *source, w.maxima, w.places, w.sums, d.temperatures, d.uniforms, f.thresholds, d.token_ids, d.finite, *sizes,
        BLOCK=BLOCK, PADDED=padded, num_warps=8,
    )  # fmt: skip
