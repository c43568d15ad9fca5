"""Paged decode attention: one query token a sequence, its context split over several programs, then merged.

The number of splits is fixed by the caller (so a graph replays for any lengths); each program finds its own part from the
sequence's length. A row's result depends on its length and the number of splits, on no other row. Sequences may share a
program, one after another: short ones then start fewer programs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dragoman_kernels.triton.dependent import begin, launch_options
from dragoman_kernels.triton.float8 import is_float8
from dragoman_kernels.triton.paging import tile_offsets


@triton.jit
def attend_tiles(
    seq, first, last, context, kv_head, q_ptr, k_ptr, v_ptr, tables_ptr, scale_log2, value_scale, table_stride,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr, FLOAT8: tl.constexpr,
):  # fmt: skip
    """Tiles `first` to `last` of the context of sequence `seq` (int64), for the heads of one KV head.

    Returns the largest score [GROUP_PAD] in powers of two, the sum of weights relative to it [GROUP_PAD], and the values'
    sum by these weights [GROUP_PAD, DIM_PAD].
    """
    rows = tl.arange(0, GROUP_PAD)
    dims = tl.arange(0, DIM_PAD)
    columns = tl.arange(0, BLOCK_N)
    dim_in = dims < HEAD_DIM
    q_offsets = (seq * (NUM_KV_HEADS * GROUP) + kv_head * GROUP + rows[:, None]) * HEAD_DIM + dims[None, :]
    q = tl.load(q_ptr + q_offsets, mask=(rows < GROUP)[:, None] & dim_in[None, :], other=0.0)
    if FLOAT8:
        q = q.to(tl.float16)

    best = tl.full([GROUP_PAD], -1e30, tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
    for tile in tl.range(first, last, num_stages=NUM_STAGES):
        start = tile * BLOCK_N
        offsets = tile_offsets(
            tables_ptr, seq * table_stride, start, context, kv_head, columns, dims,
            NUM_KV_HEADS, HEAD_DIM, PAGE, BLOCK_N,
        )  # fmt: skip
        column_in = start + columns < context
        mask = column_in[:, None] & dim_in[None, :]
        k = tl.load(k_ptr + offsets, mask=mask, other=0.0).to(q.dtype)
        v = tl.load(v_ptr + offsets, mask=mask, other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k)) * scale_log2
        scores = tl.where(column_in[None, :], scores, -1e30)
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        shrink = tl.exp2(best - new_best)
        weights = tl.exp2(scores - new_best[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v)
        best = new_best
    if FLOAT8:
        acc = acc * value_scale
    return best, total, acc


@triton.jit
def _attend(
    seq, q_ptr, k_ptr, v_ptr, tables_ptr, lens_ptr, out_ptr, partial_ptr, lse_ptr,
    scale_log2, value_scale, table_stride,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
    NUM_SPLITS: tl.constexpr, NUM_STAGES: tl.constexpr, FLOAT8: tl.constexpr,
):  # fmt: skip
    """One part of the context of sequence `seq` (int64), for the heads of one KV head."""
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    context = tl.load(lens_ptr + seq)
    num_tiles = tl.cdiv(context, BLOCK_N)
    tiles_a_split = tl.cdiv(num_tiles, NUM_SPLITS)
    first = split * tiles_a_split
    last = tl.minimum(first + tiles_a_split, num_tiles)
    best, total, acc = attend_tiles(
        seq, first, last, context, kv_head, q_ptr, k_ptr, v_ptr, tables_ptr, scale_log2, value_scale, table_stride,
        NUM_KV_HEADS, GROUP, GROUP_PAD, HEAD_DIM, DIM_PAD, PAGE, BLOCK_N, NUM_STAGES, FLOAT8,
    )  # fmt: skip

    rows = tl.arange(0, GROUP_PAD)
    dims = tl.arange(0, DIM_PAD)
    heads = kv_head * GROUP + rows
    row_in = rows < GROUP
    num_heads: tl.constexpr = NUM_KV_HEADS * GROUP
    out_mask = row_in[:, None] & (dims < HEAD_DIM)[None, :]
    if NUM_SPLITS == 1:
        out = acc / tl.maximum(total, 1e-30)[:, None]
        out_offsets = (seq * num_heads + heads[:, None]) * HEAD_DIM + dims[None, :]
        tl.store(out_ptr + out_offsets, out.to(out_ptr.dtype.element_ty), mask=out_mask)
    else:
        slot = (seq * num_heads + heads) * NUM_SPLITS + split
        lse = tl.where(total > 0, best + tl.log2(tl.maximum(total, 1e-30)), -1e30)
        tl.store(lse_ptr + slot, lse, mask=row_in)
        partial = acc / tl.maximum(total, 1e-30)[:, None]
        tl.store(partial_ptr + slot[:, None] * HEAD_DIM + dims[None, :], partial, mask=out_mask)


# Neither the width of the tables nor where they lie in a packed buffer may make a new binary.
@triton.jit(
    do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["tables_ptr", "lens_ptr", "group_rows_ptr"]
)
def _decode_split_kernel(
    q_ptr, k_ptr, v_ptr, tables_ptr, lens_ptr, group_rows_ptr, out_ptr, partial_ptr, lse_ptr,
    scale_log2, value_scale, table_stride,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
    NUM_SPLITS: tl.constexpr, NUM_STAGES: tl.constexpr, FLOAT8: tl.constexpr, GROUPED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    begin(DEPENDENT)
    if GROUPED:
        # As many programs as sequences, whatever the word says, so that a graph serves every number of rows.
        num_rows = tl.load(group_rows_ptr)
        first_seq = tl.program_id(0).to(tl.int64) * num_rows
        last_seq = tl.minimum(first_seq + num_rows, tl.num_programs(0))
        for seq in tl.range(first_seq, last_seq):
            _attend(
                seq, q_ptr, k_ptr, v_ptr, tables_ptr, lens_ptr, out_ptr, partial_ptr, lse_ptr,
                scale_log2, value_scale, table_stride, NUM_KV_HEADS, GROUP, GROUP_PAD, HEAD_DIM, DIM_PAD, PAGE, BLOCK_N,
                NUM_SPLITS, NUM_STAGES, FLOAT8,
            )  # fmt: skip
    else:
        _attend(
            tl.program_id(0).to(tl.int64), q_ptr, k_ptr, v_ptr, tables_ptr, lens_ptr, out_ptr, partial_ptr, lse_ptr,
            scale_log2, value_scale, table_stride, NUM_KV_HEADS, GROUP, GROUP_PAD, HEAD_DIM, DIM_PAD, PAGE, BLOCK_N,
            NUM_SPLITS, NUM_STAGES, FLOAT8,
        )  # fmt: skip


@triton.jit
def _decode_merge_kernel(
    partial_ptr, lse_ptr, out_ptr, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, NUM_SPLITS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    begin(DEPENDENT)
    head = tl.program_id(0).to(tl.int64)  # over sequences and heads
    splits = tl.arange(0, NUM_SPLITS)
    dims = tl.arange(0, DIM_PAD)
    dim_in = dims < HEAD_DIM
    lse = tl.load(lse_ptr + head * NUM_SPLITS + splits)
    best = tl.max(lse, axis=0)
    weights = tl.exp2(lse - best)
    offsets = (head * NUM_SPLITS + splits)[:, None] * HEAD_DIM + dims[None, :]
    partial = tl.load(partial_ptr + offsets, mask=dim_in[None, :], other=0.0)
    out = tl.sum(partial * weights[:, None], axis=0) / tl.sum(weights, axis=0)
    tl.store(out_ptr + head * HEAD_DIM + dims, out.to(out_ptr.dtype.element_ty), mask=dim_in)


class DecodeWorkspace:
    """Partial results of split decode; one for the largest batch serves all smaller ones."""

    def __init__(self, max_num_seqs: int, num_heads: int, head_dim: int, max_num_splits: int, device: torch.device):
        self.partial = torch.empty(
            (max_num_seqs * num_heads * max_num_splits, head_dim), dtype=torch.float32, device=device
        )
        self.lse = torch.empty((max_num_seqs * num_heads * max_num_splits,), dtype=torch.float32, device=device)


def paged_decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    workspace: DecodeWorkspace,
    num_splits: int,
    scale: float | None = None,
    *,
    block_n: int = 64,
    num_stages: int = 3,
    num_warps: int = 4,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    dependent: bool = False,
    group_rows: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of one query token a sequence over its paged context; returns [num_seqs, num_heads, head_dim], `out` where given.

    `q` [num_seqs, num_heads, head_dim]; caches [num_blocks, num_kv_heads, page, head_dim]; `block_tables`
    [num_seqs, max_num_blocks] int32; `context_lens` [num_seqs] int32, 0 for a padding row, whose result is 0.
    `num_splits` is a power of two.
    A tile has `block_n` keys, of one page or of several. Which launch is quickest is the plan's business: the defaults
    are only ones that run on every architecture. Caches in float8_e4m3fn are times `key_scale` and `value_scale`.
    `group_rows`, int32 [1] on the device and at least 1 when the kernel runs: so many sequences one after another share a
    program, which changes no bit of them. None: each has programs of its own, in a binary that knows of no groups.
    """
    num_seqs, num_heads, head_dim = q.shape
    _, num_kv_heads, page, _ = k_cache.shape
    group = num_heads // num_kv_heads
    if out is None:
        out = torch.empty_like(q)
    scale_log2 = (scale if scale is not None else head_dim**-0.5) * 1.4426950408889634 * key_scale
    padded_dim = triton.next_power_of_2(head_dim)
    _decode_split_kernel[(num_seqs, num_kv_heads, num_splits)](
        q, k_cache, v_cache, block_tables, context_lens, group_rows, out, workspace.partial, workspace.lse,
        scale_log2, value_scale, block_tables.stride(0),
        NUM_KV_HEADS=num_kv_heads, GROUP=group, GROUP_PAD=max(16, triton.next_power_of_2(group)),
        HEAD_DIM=head_dim, DIM_PAD=padded_dim, PAGE=page, BLOCK_N=block_n,
        NUM_SPLITS=num_splits, NUM_STAGES=num_stages, FLOAT8=is_float8(k_cache),
        GROUPED=group_rows is not None, num_warps=num_warps, **launch_options(dependent),
    )  # fmt: skip
    if num_splits > 1:
        _decode_merge_kernel[(num_seqs * num_heads,)](
            workspace.partial, workspace.lse, out, HEAD_DIM=head_dim, DIM_PAD=padded_dim,
            NUM_SPLITS=num_splits, num_warps=2 if num_splits <= 32 else 4, **launch_options(dependent),
        )  # fmt: skip
    return out
