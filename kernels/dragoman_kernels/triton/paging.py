"""Where a tile of keys or values lies in the paged cache, for tiles inside one page and tiles that span several."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_offsets(
    tables_ptr, row, start, context, kv_head, columns, dims,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Offsets [BLOCK_N, DIM] of tokens start ... start + BLOCK_N - 1 in a cache [num_blocks, NUM_KV_HEADS, PAGE, HEAD_DIM].

    `row` is where the sequence's block table begins. Of tokens past `context` only those in its last page have a place;
    the others point into the null block.
    """
    if BLOCK_N <= PAGE:  # one table entry serves the tile
        page = tl.load(tables_ptr + row + start // PAGE).to(tl.int64)
        base = ((page * NUM_KV_HEADS + kv_head) * PAGE + start % PAGE) * HEAD_DIM
        offsets = base + (columns[:, None] * HEAD_DIM + dims[None, :])
    else:
        tokens = start + columns
        pages = tl.load(tables_ptr + row + tokens // PAGE, mask=tokens < context, other=0).to(tl.int64)
        slots = (pages * NUM_KV_HEADS + kv_head) * PAGE + tokens % PAGE
        offsets = slots[:, None] * HEAD_DIM + dims[None, :]
    return offsets
