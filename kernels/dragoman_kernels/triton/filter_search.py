"""From which key on a row keeps its tokens: one program a row halves the range of its candidates until one value is left."""

from __future__ import annotations

import triton
import triton.language as tl

from dragoman_kernels.triton.filter_terms import (
    KEEPS_ALL,
    LEAST_TEMPERATURE,
    is_finite,
    least_of,
    share_of,
    top_p_of,
    weights_of,
    word_of,
)
from dragoman_kernels.triton.sampling import row_max


@triton.jit
def _tile(keys_ptr, start, num_keys, low, high, TILE: tl.constexpr):
    """A tile of the candidates, and which of them are between `low` and `high`."""
    offsets = start + tl.arange(0, TILE)
    inside = offsets < num_keys
    keys = tl.load(keys_ptr + offsets, mask=inside, other=0)
    return keys, inside & (keys >= low) & (keys <= high)


@triton.jit
def _amounts(keys, least, BY_COUNT: tl.constexpr):
    """What candidates add: one each, or their weight."""
    amounts = tl.full(keys.shape, 1, tl.int64)
    if not BY_COUNT:
        amounts = weights_of(tl.where(keys < 0, keys ^ 0x7FFFFFFF, keys).to(tl.float32, bitcast=True), least)
    return amounts


@triton.jit
def _range(keys_ptr, num_keys, TILE: tl.constexpr):
    """The smallest and the largest candidate."""
    least = tl.full([TILE], 2147483647, tl.int32)
    most = tl.full([TILE], -2147483648, tl.int32)
    for start in range(0, num_keys, TILE):
        keys, inside = _tile(keys_ptr, start, num_keys, KEEPS_ALL, 0, TILE)
        least = tl.minimum(least, tl.where(inside, keys, 2147483647))
        most = tl.maximum(most, tl.where(inside, keys, -2147483648))
    return tl.min(least, axis=0), tl.max(most, axis=0)


@triton.jit
def _split(keys_ptr, num_keys, low, middle, high, least, BY_COUNT: tl.constexpr, TILE: tl.constexpr):
    """Of the candidates from `low` to `high`: amount of those from `middle` on, the smallest of these, the largest under it."""
    sums = tl.zeros([TILE], tl.int64)
    above = tl.full([TILE], 2147483647, tl.int32)
    below = tl.full([TILE], -2147483648, tl.int32)
    for start in range(0, num_keys, TILE):
        keys, inside = _tile(keys_ptr, start, num_keys, low, high, TILE)
        is_over = inside & (keys >= middle)
        sums += tl.where(is_over, _amounts(keys, least, BY_COUNT), 0)
        above = tl.minimum(above, tl.where(is_over, keys, 2147483647))
        below = tl.maximum(below, tl.where(inside & (keys < middle), keys, -2147483648))
    return tl.sum(sums, axis=0), tl.min(above, axis=0), tl.max(below, axis=0)


@triton.jit
def _shrink(keys_ptr, num_keys, low, high, TILE: tl.constexpr):
    """Keep the candidates from `low` to `high` alone, in their place; how many."""
    count = num_keys * 0
    for start in range(0, num_keys, TILE):
        keys, inside = _tile(keys_ptr, start, num_keys, low, high, TILE)
        tl.debug_barrier()  # what is written lies at or before what was read
        tl.store(keys_ptr + count + tl.cumsum(inside.to(tl.int32), axis=0) - 1, keys, mask=inside)
        count += tl.sum(inside.to(tl.int32), axis=0)
    tl.debug_barrier()
    return count


@triton.jit
def _search(
    keys_ptr, num_keys, low, high, needed, least, may_shrink, BY_COUNT: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """The largest candidate from which on the amount of those up to `high` reaches `needed`; both ends are candidates."""
    while low < high:
        middle = low + ((high - low + 1) >> 1)
        amount, above, below = _split(keys_ptr, num_keys, low, middle, high, least, BY_COUNT, TILE)
        is_enough = amount >= needed
        low = tl.where(is_enough, above, low)
        high = tl.where(is_enough, high, below)
        needed = tl.where(is_enough, needed, needed - amount)
        if (num_keys > TILE) & may_shrink:
            num_keys = _shrink(keys_ptr, num_keys, low, high, TILE)
    return low


@triton.jit(
    do_not_specialize=["num_rows", "vocab", "num_blocks"],
    do_not_specialize_on_alignment=["words_ptr", "temperature_ptr"],
)
def filter_search_kernel(
    words_ptr, max_ptr, temperature_ptr, counts_ptr, needed_ptr, candidates_ptr, threshold_ptr,
    num_rows, vocab, num_blocks, TILE: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """The key from which on a row keeps its tokens."""
    at = tl.program_id(0)
    row = word_of(words_ptr, 0, at, num_rows).to(tl.int64)
    k = word_of(words_ptr, 1, at, num_rows)
    p = top_p_of(words_ptr, at, num_rows)
    is_filtered = ((k > 0) | (p < 1.0)) & (tl.load(temperature_ptr + row) >= LEAST_TEMPERATURE)
    if is_filtered & is_finite(row_max(max_ptr, row, num_blocks, PADDED)):
        least = least_of(words_ptr, at, num_rows)
        keys_ptr = candidates_ptr + at.to(tl.int64) * vocab
        num_keys = tl.load(counts_ptr + at)
        needed = tl.load(needed_ptr + at)
        low, high = _range(keys_ptr, num_keys, TILE)
        if k > 0:
            wanted = tl.minimum(needed, num_keys.to(tl.int64))
            low = _search(keys_ptr, num_keys, low, high, wanted, least, p >= 1.0, True, TILE)
            if p < 1.0:
                mass, _, _ = _split(keys_ptr, num_keys, low, low, high, least, False, TILE)
                needed = share_of(p, mass)
        if p < 1.0:
            low = _search(keys_ptr, num_keys, low, high, needed, least, True, False, TILE)
        tl.store(threshold_ptr + at, low)
