"""Greedy and temperature sampling of whole rows in two passes over the logits, without a sort.

A token weighs floor(exp((logit - max) / temperature) * 2**40). Integer sums do not depend on the order of addition, so a
draw depends on its own row alone. filters.py draws rows again that have filters, edits.py those whose logits are changed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dragoman_kernels.triton.dependent import begin, launch_options

BLOCK = 4096
GREEDY_BELOW = 1e-5
_WEIGHT_ONE = tl.constexpr(1099511627776.0)  # 2**40
_GREEDY_BELOW = tl.constexpr(GREEDY_BELOW)


@triton.jit
def block_extremes(values, columns):
    """The largest value (+inf where there is a NaN), the lowest id that has it, and the smallest that is not -inf."""
    # NaN must win, as in torch: it is found by comparing with itself.
    clean = tl.where(values != values, float("inf"), values)
    best = tl.max(clean, axis=0)
    place = tl.min(tl.where(clean == best, columns, 2147483647), axis=0)
    least = tl.min(tl.where(clean > float("-inf"), clean, float("inf")), axis=0)
    return best, place, least


@triton.jit(do_not_specialize=["vocab", "num_blocks"])
def _block_max_kernel(
    logits_ptr, max_ptr, arg_ptr, min_ptr, vocab, stride, num_blocks, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
):
    begin(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(logits_ptr + row * stride + columns, mask=columns < vocab, other=float("-inf")).to(tl.float32)
    best, place, least = block_extremes(values, columns)
    tl.store(max_ptr + row * num_blocks + block, best)
    tl.store(arg_ptr + row * num_blocks + block, place)
    tl.store(min_ptr + row * num_blocks + block, least)


@triton.jit
def row_max(max_ptr, row, num_blocks, PADDED: tl.constexpr):
    blocks = tl.arange(0, PADDED)
    maxima = tl.load(max_ptr + row * num_blocks + blocks, mask=blocks < num_blocks, other=float("-inf"))
    return tl.max(maxima, axis=0)


@triton.jit
def _weights_of(values, best, temperature):
    return (tl.exp((values - best) / temperature).to(tl.float64) * _WEIGHT_ONE).to(tl.int64)


@triton.jit(do_not_specialize=["vocab", "num_blocks"], do_not_specialize_on_alignment=["temperature_ptr"])
def _block_sum_kernel(
    logits_ptr, max_ptr, temperature_ptr, sum_ptr, vocab, stride, num_blocks, BLOCK: tl.constexpr, PADDED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    begin(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    if temperature >= _GREEDY_BELOW:
        best = row_max(max_ptr, row, num_blocks, PADDED)
        if (best < float("inf")) & (best > float("-inf")):
            columns = block * BLOCK + tl.arange(0, BLOCK)
            inside = columns < vocab
            values = tl.load(logits_ptr + row * stride + columns, mask=inside, other=float("-inf")).to(tl.float32)
            tl.store(sum_ptr + row * num_blocks + block, tl.sum(_weights_of(values, best, temperature), axis=0))


@triton.jit(
    do_not_specialize=["vocab", "num_blocks"], do_not_specialize_on_alignment=["temperature_ptr", "uniform_ptr"]
)
def _pick_kernel(
    logits_ptr, max_ptr, arg_ptr, sum_ptr, temperature_ptr, uniform_ptr, ids_ptr, finite_ptr,
    vocab, stride, num_blocks, BLOCK: tl.constexpr, PADDED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    begin(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    best = row_max(max_ptr, row, num_blocks, PADDED)
    # +inf marks NaN and +inf; -inf means that no token is left.
    finite = (best < float("inf")) & (best > float("-inf"))
    tl.store(finite_ptr + row, finite.to(tl.int32))
    blocks = tl.arange(0, PADDED)
    inside = blocks < num_blocks
    if (temperature < _GREEDY_BELOW) | (finite == 0):
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
        before = tl.cumsum(sums, axis=0)
        block = tl.sum((before <= target).to(tl.int32), axis=0)
        rest = target - tl.sum(tl.where(blocks < block, sums, 0), axis=0)
        columns = block * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(logits_ptr + row * stride + columns, mask=columns < vocab, other=float("-inf")).to(tl.float32)
        running = tl.cumsum(_weights_of(values, best, temperature), axis=0)
        tl.store(ids_ptr + row, block * BLOCK + tl.sum((running <= rest).to(tl.int32), axis=0))


class SamplingWorkspace:
    """Per-block results for the largest batch; `sample_rows` leaves those of its rows for who draws some of them again."""

    def __init__(self, max_num_rows: int, vocab_size: int, device: torch.device) -> None:
        blocks = triton.cdiv(vocab_size, BLOCK)
        self.maxima = torch.empty((max_num_rows, blocks), dtype=torch.float32, device=device)
        self.places = torch.empty((max_num_rows, blocks), dtype=torch.int32, device=device)
        self.minima = torch.empty((max_num_rows, blocks), dtype=torch.float32, device=device)
        self.sums = torch.empty((max_num_rows, blocks), dtype=torch.int64, device=device)


def sample_rows(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    uniforms: torch.Tensor,
    workspace: SamplingWorkspace,
    token_ids: torch.Tensor,
    finite: torch.Tensor,
    *,
    dependent: bool = False,
) -> None:
    """Sample one token a row of `logits` [num_rows, vocab_size] into `token_ids` int32 and `finite` int32 (0 or 1).

    `temperatures` float32 (under 1e-5: argmax, the lowest id on ties), `uniforms` float64 in [0, 1). A row with NaN or +inf, or
    with nothing but -inf, is not finite and gets id 0.
    """
    num_rows, vocab = logits.shape
    num_blocks = triton.cdiv(vocab, BLOCK)
    padded = triton.next_power_of_2(num_blocks)
    grid = (num_rows, num_blocks)
    stride = logits.stride(0)
    w, options = workspace, launch_options(dependent)
    _block_max_kernel[grid](
        logits, w.maxima, w.places, w.minima, vocab, stride, num_blocks, BLOCK=BLOCK, num_warps=8, **options
    )
    _block_sum_kernel[grid](
        logits, w.maxima, temperatures, w.sums, vocab, stride, num_blocks, BLOCK=BLOCK, PADDED=padded, num_warps=8,
        **options,
    )  # fmt: skip
    _pick_kernel[(num_rows,)](
        logits, w.maxima, w.places, w.sums, temperatures, uniforms, token_ids, finite,
        vocab, stride, num_blocks, BLOCK=BLOCK, PADDED=padded, num_warps=8, **options,
    )  # fmt: skip
