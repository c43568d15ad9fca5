"""What the kernels of filters share: the words of a row, and the scaled logit, weight and key of a token, each rounded in one way."""

from __future__ import annotations

import triton
import triton.language as tl

from dragoman_kernels.triton.sampling import GREEDY_BELOW

_WEIGHT_ONE = tl.constexpr(1099511627776.0)  # 2**40
LEAST_TEMPERATURE = tl.constexpr(GREEDY_BELOW)
LOWEST_SCALED = tl.constexpr(-28.0)  # exp() of it weighs less than 1
KEEPS_ALL = tl.constexpr(-2147483648)  # a threshold of keys


@triton.jit
def word_of(words_ptr, field: tl.constexpr, row, num_rows):
    return tl.load(words_ptr + field * num_rows + row)


@triton.jit
def top_p_of(words_ptr, row, num_rows):
    return word_of(words_ptr, 2, row, num_rows).to(tl.float32, bitcast=True)


@triton.jit
def least_of(words_ptr, row, num_rows):
    low = word_of(words_ptr, 3, row, num_rows).to(tl.uint32, bitcast=True).to(tl.int64)
    return (word_of(words_ptr, 4, row, num_rows).to(tl.int64) << 32) | low


@triton.jit
def is_finite(best):
    return (best < float("inf")) & (best > float("-inf"))


@triton.jit
def scaled_logits(logits_ptr, edited_ptr, row, edited, columns, vocab, stride, best, temperature):
    """(logit - max) / temperature, rounded as the host rounds it; -inf outside of the vocabulary."""
    inside = columns < vocab
    if edited < 0:
        values = tl.load(logits_ptr + row * stride + columns, mask=inside, other=float("-inf")).to(tl.float32)
    else:
        source = edited_ptr + edited.to(tl.int64) * vocab
        values = tl.load(source + columns, mask=inside, other=float("-inf"))
    return tl.div_rn(values - best, temperature)


@triton.jit
def weights_of(scaled, least):
    weights = (tl.exp(scaled) * _WEIGHT_ONE).to(tl.int64)  # a power of two: exact
    return tl.where(weights >= least, weights, 0)


@triton.jit
def keys_of(scaled):
    """int32 that order as the values do, none of which is over 0; both zeros are one key."""
    bits = scaled.to(tl.int32, bitcast=True)
    return tl.where(scaled == 0, 0, bits ^ 0x7FFFFFFF)


@triton.jit
def share_of(p, mass):
    """What top-p wants of a mass."""
    wanted = tl.ceil(p.to(tl.float64) * mass.to(tl.float64)).to(tl.int64)
    return tl.minimum(tl.maximum(wanted, 1), mass)
