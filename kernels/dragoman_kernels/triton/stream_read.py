"""A read-only stream over device memory: what the read bandwidth of a card is measured with."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _stream_read_kernel(source_ptr, sums_ptr, items_a_program, BLOCK: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    base = source_ptr + program * items_a_program
    for start in tl.range(0, items_a_program, BLOCK, num_stages=4):
        total += tl.load(base + start + tl.arange(0, BLOCK), eviction_policy="evict_first")
    tl.store(sums_ptr + program, tl.sum(total, axis=0))


def stream_read(source: torch.Tensor, sums: torch.Tensor, block: int = 4096) -> None:
    """Read all of `source` float32 once; `sums` [num_programs] gets the sum of each equal part.

    len(source) is a multiple of num_programs * block.
    """
    items = source.numel() // sums.numel()
    if items * sums.numel() != source.numel() or items % block:
        raise ValueError(f"{source.numel()} items do not divide into {sums.numel()} parts of whole blocks of {block}")
    _stream_read_kernel[(sums.numel(),)](source, sums, items, BLOCK=block, num_warps=8)
