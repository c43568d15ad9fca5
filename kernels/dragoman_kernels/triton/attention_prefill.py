"""Paged prefill attention: chunks of query tokens at the end of their contexts, causal, over paged K and V.

The host cuts the chunks into work items of BLOCK_M queries, longest first, so that the tail of the grid is short work.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from dragoman_kernels.triton.attention_prefill_tma import prefill_by_descriptors
from dragoman_kernels.triton.float8 import is_float8
from dragoman_kernels.triton.paging import tile_offsets

BLOCK_M = 64


def prefill_work_list(
    query_starts: npt.NDArray[np.int32], context_lens: npt.NDArray[np.int32], block_m: int = BLOCK_M
) -> npt.NDArray[np.int32]:
    """[num_items, 2]: (sequence, first query inside its chunk), the items that read most context first."""
    lengths = np.diff(query_starts)
    counts = -(-lengths // block_m)
    sequences = np.repeat(np.arange(len(lengths), dtype=np.int32), counts)
    ends = np.cumsum(counts)
    inner = np.arange(ends[-1] if len(ends) else 0, dtype=np.int32) - np.repeat(ends - counts, counts).astype(np.int32)
    first = inner * block_m
    seen = (context_lens - lengths)[sequences] + np.minimum(first + block_m, lengths[sequences])
    order = np.argsort(-seen, kind="stable")
    return np.stack([sequences[order], first[order]], axis=1).astype(np.int32)


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["tables_ptr", "starts_ptr", "lens_ptr", "work_ptr"],
)
def _prefill_kernel(
    q_ptr, k_ptr, v_ptr, tables_ptr, starts_ptr, lens_ptr, work_ptr, out_ptr,
    scale_log2, value_scale, table_stride,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr,
    FLOAT8: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(1)
    head = tl.program_id(0)
    seq = tl.load(work_ptr + item * 2).to(tl.int64)
    first_query = tl.load(work_ptr + item * 2 + 1)
    chunk_start = tl.load(starts_ptr + seq)
    chunk_len = tl.load(starts_ptr + seq + 1) - chunk_start
    context = tl.load(lens_ptr + seq)
    before = context - chunk_len  # tokens in the cache before this chunk
    kv_head = head // (NUM_HEADS // NUM_KV_HEADS)

    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, DIM_PAD)
    columns = tl.arange(0, BLOCK_N)
    query = first_query + rows
    row_in = query < chunk_len
    dim_in = dims < HEAD_DIM
    q_offsets = ((chunk_start + query).to(tl.int64)[:, None] * NUM_HEADS + head) * HEAD_DIM + dims[None, :]
    q_mask = row_in[:, None] & dim_in[None, :]
    q = tl.load(q_ptr + q_offsets, mask=q_mask, other=0.0)
    if FLOAT8:
        q = q.to(tl.float16)
    position = before + query

    best = tl.full([BLOCK_M], -1e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DIM_PAD], tl.float32)
    # Tiles wholly before the first query need no mask.
    full_tiles = (before + first_query + 1) // BLOCK_N
    last_position = before + tl.minimum(first_query + BLOCK_M, chunk_len)
    num_tiles = tl.cdiv(last_position, BLOCK_N)
    for tile in tl.range(0, full_tiles, num_stages=NUM_STAGES):
        start = tile * BLOCK_N
        offsets = tile_offsets(
            tables_ptr, seq * table_stride, start, context, kv_head, columns, dims,
            NUM_KV_HEADS, HEAD_DIM, PAGE, BLOCK_N,
        )  # fmt: skip
        if DIM_PAD == HEAD_DIM:
            k = tl.load(k_ptr + offsets).to(q.dtype)
            v = tl.load(v_ptr + offsets).to(q.dtype)
        else:
            k = tl.load(k_ptr + offsets, mask=dim_in[None, :], other=0.0).to(q.dtype)
            v = tl.load(v_ptr + offsets, mask=dim_in[None, :], other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k))
        new_best = tl.maximum(best, tl.max(scores, axis=1) * scale_log2)
        shrink = tl.exp2(best - new_best)
        weights = tl.exp2(scores * scale_log2 - new_best[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(v.dtype), v, acc)
        best = new_best
    for tile in tl.range(full_tiles, num_tiles, num_stages=1):
        start = tile * BLOCK_N
        offsets = tile_offsets(
            tables_ptr, seq * table_stride, start, context, kv_head, columns, dims,
            NUM_KV_HEADS, HEAD_DIM, PAGE, BLOCK_N,
        )  # fmt: skip
        column = start + columns
        mask = (column < context)[:, None] & dim_in[None, :]
        k = tl.load(k_ptr + offsets, mask=mask, other=0.0).to(q.dtype)
        v = tl.load(v_ptr + offsets, mask=mask, other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k)) * scale_log2
        scores = tl.where(column[None, :] <= position[:, None], scores, -1e30)
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        shrink = tl.exp2(best - new_best)
        weights = tl.exp2(scores - new_best[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(v.dtype), v, acc)
        best = new_best
    out = acc / total[:, None]
    if FLOAT8:
        out = out * value_scale
    tl.store(out_ptr + q_offsets, out.to(out_ptr.dtype.element_ty), mask=q_mask)


def paged_prefill_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    work_list: torch.Tensor,
    scale: float | None = None,
    *,
    block_m: int = BLOCK_M,
    block_n: int = 64,
    num_stages: int = 3,
    num_warps: int = 8,
    tma: bool = False,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of query chunks over their paged contexts; returns [num_tokens, num_heads, head_dim], `out` where given.

    `q` [num_tokens, num_heads, head_dim], chunks one after another; `query_starts` [num_seqs + 1]; `context_lens`
    [num_seqs] with the chunk included; `work_list` from `prefill_work_list` with the same block_m; an item of a sequence
    without queries and context does nothing, and rows of no chunk are left as they are. All int32. A tile
    has `block_n` keys, of one page or of several. The defaults run on every architecture at head size 128; which launch
    is quickest is the plan's business. Caches in float8_e4m3fn are times `key_scale` and `value_scale`. With `tma` whole
    tiles of K and V come by tensor descriptors, which float8 has none of: ValueError, as for tiles of several pages.
    """
    _, num_heads, head_dim = q.shape
    _, num_kv_heads, page, _ = k_cache.shape
    if out is None:
        out = torch.empty_like(q)
    scale_log2 = (scale if scale is not None else head_dim**-0.5) * 1.4426950408889634 * key_scale
    if tma:
        prefill_by_descriptors(
            q, k_cache, v_cache, block_tables, query_starts, context_lens, work_list, scale_log2,
            block_m=block_m, block_n=block_n, num_stages=num_stages, num_warps=num_warps, out=out,
        )  # fmt: skip
        return out
    padded_dim = triton.next_power_of_2(head_dim)
    _prefill_kernel[(num_heads, work_list.shape[0])](
        q, k_cache, v_cache, block_tables, query_starts, context_lens, work_list, out,
        scale_log2, value_scale, block_tables.stride(0),
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, DIM_PAD=padded_dim,
        PAGE=page, BLOCK_M=block_m, BLOCK_N=block_n, NUM_STAGES=num_stages, FLOAT8=is_float8(k_cache),
        num_warps=num_warps,
    )  # fmt: skip
    return out
