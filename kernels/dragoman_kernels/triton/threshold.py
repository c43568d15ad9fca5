"""From which key on the values of a row reach a sum: bisection over all keys, without a sort.

Each row says whether it wants to be looked at, so that nobody on the host has to ask.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 2048


@triton.jit(do_not_specialize=["vocab"])
def _threshold_kernel(keys_ptr, values_ptr, needed_ptr, settled_ptr, threshold_ptr, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(settled_ptr + row) == 0:
        needed = tl.load(needed_ptr + row)
        # Keys below `high` exclude the row's least threshold, those from `low` on reach the sum.
        low = needed * 0 - 2147483648
        high = needed * 0 + 2147483648
        for _ in range(32):
            middle = (low + high) >> 1
            sums = tl.zeros([BLOCK], tl.int64)
            for start in range(0, vocab, BLOCK):
                columns = start + tl.arange(0, BLOCK)
                inside = columns < vocab
                keys = tl.load(keys_ptr + row * vocab + columns, mask=inside, other=-2147483648)
                values = tl.load(values_ptr + row * vocab + columns, mask=inside, other=0)
                sums += tl.where(keys.to(tl.int64) >= middle, values, 0)
            is_enough = tl.sum(sums, axis=0) >= needed
            low = tl.where(is_enough, middle, low)
            high = tl.where(is_enough, high, middle)
        tl.store(threshold_ptr + row, low.to(tl.int32))


def find_thresholds(
    keys: torch.Tensor, values: torch.Tensor, needed: torch.Tensor, settled: torch.Tensor, thresholds: torch.Tensor
) -> None:
    """Write the largest t with sum(values[keys >= t]) >= needed into the `thresholds` of rows that are not `settled`.

    `keys` int32 and `values` int64 [n, vocab_size], contiguous; `needed` int64 [n], at most the row's sum; `settled` int8
    [n], not 0 for a row that is; `thresholds` int32 [n].
    """
    _threshold_kernel[(keys.shape[0],)](
        keys, values, needed, settled, thresholds, keys.shape[1], BLOCK=BLOCK, num_warps=8
    )
