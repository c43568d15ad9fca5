"""Paged attention in one order of arithmetic, for prompts and decode alike: a token's bits do not depend on how it came.

A context is cut into parts of a fixed number of tokens at absolute positions. Each part is begun afresh, walked in tiles of
fixed size, and parts are folded in order. The same binary computes the parts of a chunk of queries and of one decode token;
how many programs share the parts of a context is free, for each part is kept apart until it is folded. Multiplications and
additions are not fused behind our back, so the fold of the second kernel is that of the first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dragoman_kernels.triton.float8 import compute_type
from dragoman_kernels.triton.paging import tile_offsets

_LOG2_E = 1.4426950408889634


@triton.jit
def _fold(acc, best, total, part, part_best, part_total):
    """(scaled maximum, factor of what was there, factor of the part, sum) after the next part."""
    new_best = tl.maximum(best, part_best)
    old = tl.exp2(best - new_best)
    new = tl.exp2(part_best - new_best)
    return new_best, old, new, total * old + part_total * new


@triton.jit
def _attend(
    q, k_ptr, v_ptr, tables_ptr, table_row, first_tile, last_tile, context, kv_head, position, scale_log2, dims, dim_in,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """One part: unnormalised sum [ROWS, DIM_PAD], maximum and total [ROWS] over tiles first_tile ... last_tile - 1."""
    columns = tl.arange(0, BLOCK_N)
    best = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM_PAD], tl.float32)
    for tile in tl.range(first_tile, last_tile, num_stages=NUM_STAGES):
        start = tile * BLOCK_N
        offsets = tile_offsets(
            tables_ptr, table_row, start, context, kv_head, columns, dims, NUM_KV_HEADS, HEAD_DIM, PAGE, BLOCK_N
        )
        column = start + columns
        inside = (column < context)[:, None]
        if DIM_PAD != HEAD_DIM:
            inside = inside & dim_in[None, :]
        # Every tile is masked in the same way: another order of operations would give other bits.
        k = tl.load(k_ptr + offsets, mask=inside, other=0.0).to(q.dtype)
        v = tl.load(v_ptr + offsets, mask=inside, other=0.0).to(q.dtype)
        visible = column[None, :] <= position[:, None]
        scores = tl.where(visible, tl.dot(q, tl.trans(k)) * scale_log2, -1e30)
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        shrink = tl.exp2(best - new_best)
        # A part that a row cannot see adds nothing, whatever its values are.
        weights = tl.where(visible, tl.exp2(scores - new_best[:, None]), 0.0)
        total = total * shrink + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(q.dtype), v, acc * shrink[:, None])
        best = new_best
    return acc, best, total


@triton.jit(
    do_not_specialize=["table_stride", "num_programs", "max_num_parts"],
    do_not_specialize_on_alignment=["tables_ptr", "starts_ptr", "lens_ptr", "work_ptr"],
)
def _attention_fixed_kernel(
    q_ptr, k_ptr, v_ptr, tables_ptr, starts_ptr, lens_ptr, work_ptr, out_ptr, partial_ptr, best_ptr, total_ptr,
    scale_log2, value_scale, table_stride, num_programs, max_num_parts,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, PART: tl.constexpr, NUM_STAGES: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0)
    program = tl.program_id(1)
    item = tl.program_id(2)
    queries: tl.constexpr = ROWS // GROUP
    num_heads: tl.constexpr = NUM_KV_HEADS * GROUP
    seq = tl.load(work_ptr + item * 2).to(tl.int64)
    first_query = tl.load(work_ptr + item * 2 + 1)
    chunk_start = tl.load(starts_ptr + seq)
    chunk_len = tl.load(starts_ptr + seq + 1) - chunk_start
    context = tl.load(lens_ptr + seq)
    before = context - chunk_len

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM_PAD)
    dim_in = dims < HEAD_DIM
    query = first_query + rows // GROUP
    row_in = (rows < queries * GROUP) & (query < chunk_len)
    mask = row_in[:, None] & dim_in[None, :]
    # Wide numbers are kept scalar: sums of whole tiles leave few registers.
    base = ((chunk_start + first_query).to(tl.int64) * num_heads + kv_head * GROUP) * HEAD_DIM
    offsets = (rows // GROUP * num_heads + rows % GROUP)[:, None] * HEAD_DIM + dims[None, :]
    q = tl.load(q_ptr + base + offsets, mask=mask, other=0.0).to(COMPUTE)
    position = before + query

    seen = before + tl.minimum(first_query + queries, chunk_len)
    tiles_a_part: tl.constexpr = PART // BLOCK_N
    num_tiles = tl.cdiv(seen, BLOCK_N)
    num_parts = tl.cdiv(seen, PART)
    is_alone = num_programs == 1
    best = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM_PAD], tl.float32)
    for index in tl.range(program, num_parts, num_programs, num_stages=1):
        first_tile = index * tiles_a_part
        part, part_best, part_total = _attend(
            q, k_ptr, v_ptr, tables_ptr, seq * table_stride, first_tile, tl.minimum(first_tile + tiles_a_part, num_tiles),
            context, kv_head, position, scale_log2, dims, dim_in,
            NUM_KV_HEADS, HEAD_DIM, DIM_PAD, PAGE, ROWS, BLOCK_N, NUM_STAGES,
        )  # fmt: skip
        if num_programs > 1:
            # A decode item has one query: its rows are the heads of a group. What is not scalar is known when compiled.
            slot = ((chunk_start.to(tl.int64) * NUM_KV_HEADS + kv_head) * max_num_parts + index) * GROUP
            tl.store(
                partial_ptr + slot * HEAD_DIM + (rows[:, None] * HEAD_DIM + dims[None, :]), part,
                mask=row_in[:, None] & dim_in[None, :],
            )  # fmt: skip
            tl.store(best_ptr + slot + rows, part_best, mask=row_in)
            tl.store(total_ptr + slot + rows, part_total, mask=row_in)
        best, old, new, total = _fold(acc, best, total, part, part_best, part_total)
        acc = acc * old[:, None] + part * new[:, None]
    factor = tl.div_rn(tl.full([ROWS], 1.0, tl.float32), tl.maximum(total, 1e-30)) * value_scale
    out = acc * factor[:, None]
    tl.store(out_ptr + base + offsets, out.to(out_ptr.dtype.element_ty), mask=mask & is_alone)


@triton.jit(do_not_specialize=["max_num_parts"], do_not_specialize_on_alignment=["lens_ptr"])
def _fold_fixed_kernel(
    partial_ptr, best_ptr, total_ptr, lens_ptr, out_ptr, value_scale, max_num_parts,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # over sequences, KV heads and the heads that share one
    dims = tl.arange(0, DIM_PAD)
    dim_in = dims < HEAD_DIM
    num_parts = tl.cdiv(tl.load(lens_ptr + row // NUM_HEADS), PART)
    best = tl.full([DIM_PAD], -1e30, tl.float32)
    total = tl.zeros([DIM_PAD], tl.float32)
    acc = tl.zeros([DIM_PAD], tl.float32)
    first = row // GROUP * max_num_parts
    for index in tl.range(0, num_parts, num_stages=4):
        slot = (first + index) * GROUP + row % GROUP
        part = tl.load(partial_ptr + slot * HEAD_DIM + dims, mask=dim_in, other=0.0)
        part_best = tl.load(best_ptr + slot + tl.zeros([DIM_PAD], tl.int64))
        part_total = tl.load(total_ptr + slot + tl.zeros([DIM_PAD], tl.int64))
        best, old, new, total = _fold(acc, best, total, part, part_best, part_total)
        acc = acc * old + part * new
    out = acc * (tl.div_rn(tl.full([DIM_PAD], 1.0, tl.float32), tl.maximum(total, 1e-30)) * value_scale)
    tl.store(out_ptr + row * HEAD_DIM + dims, out.to(out_ptr.dtype.element_ty), mask=dim_in)


class FixedWorkspace:
    """Parts of decode contexts that several programs share, and the work list of decode; one for the largest batch."""

    def __init__(
        self,
        max_num_seqs: int,
        num_heads: int,
        head_dim: int,
        max_num_parts: int,
        device: torch.device,
        max_num_shared: int | None = None,
    ) -> None:
        """`max_num_parts` of the longest context; `max_num_shared` sequences at most have several programs each."""
        shared = max_num_seqs if max_num_shared is None else max_num_shared
        slots = shared * num_heads * max_num_parts
        self.max_num_parts = max_num_parts
        self.partial = torch.empty((slots, head_dim), dtype=torch.float32, device=device)
        self.best = torch.empty((slots,), dtype=torch.float32, device=device)
        self.total = torch.empty((slots,), dtype=torch.float32, device=device)
        self.starts = torch.arange(max_num_seqs + 1, dtype=torch.int32, device=device)
        self.work = torch.zeros((max_num_seqs, 2), dtype=torch.int32, device=device)
        self.work[:, 0] = self.starts[:-1]


def queries_a_tile(rows: int, num_heads: int, num_kv_heads: int) -> int:
    """Queries of a work item whose tile has `rows` rows: each query brings the heads that share a KV head.

    Raises ValueError where not even one query fits.
    """
    queries = rows * num_kv_heads // num_heads
    if queries < 1:
        raise ValueError(f"{num_heads // num_kv_heads} heads share a KV head, more than a tile's {rows} rows")
    return queries


def fixed_prefill_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    work_list: torch.Tensor,
    workspace: FixedWorkspace,
    part_tokens: int,
    scale: float | None = None,
    *,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    rows: int = 64,
    block_n: int = 64,
    num_stages: int = 3,
    num_warps: int = 4,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `paged_prefill_attention`, with `work_list` of `queries_a_tile(rows, ...)` queries an item.

    `part_tokens` is a multiple of `block_n`. Keys and values in float8_e4m3fn are multiplied by their scales.
    """
    if out is None:
        out = torch.empty_like(q)
    grid = (k_cache.shape[1], 1, work_list.shape[0])
    _launch(
        grid, q, k_cache, v_cache, block_tables, query_starts, context_lens, work_list, out, workspace, part_tokens,
        scale, key_scale, value_scale, rows, block_n, num_stages, num_warps,
    )  # fmt: skip
    return out


def fixed_decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    workspace: FixedWorkspace,
    part_tokens: int,
    num_programs: int,
    scale: float | None = None,
    *,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    rows: int = 64,
    block_n: int = 64,
    num_stages: int = 3,
    num_warps: int = 4,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `paged_decode_attention`; `num_programs` share the parts of a context, which changes no bit of the result."""
    num_seqs, num_heads, head_dim = q.shape
    if out is None:
        out = torch.empty_like(q)
    grid = (k_cache.shape[1], num_programs, num_seqs)
    _launch(
        grid, q, k_cache, v_cache, block_tables, workspace.starts, context_lens, workspace.work, out, workspace,
        part_tokens, scale, key_scale, value_scale, rows, block_n, num_stages, num_warps,
    )  # fmt: skip
    if num_programs > 1:
        _fold_fixed_kernel[(num_seqs * num_heads,)](
            workspace.partial, workspace.best, workspace.total, context_lens, out, value_scale, workspace.max_num_parts,
            NUM_HEADS=num_heads, GROUP=num_heads // k_cache.shape[1], HEAD_DIM=head_dim,
            DIM_PAD=triton.next_power_of_2(head_dim), PART=part_tokens, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def _launch(
    grid: tuple[int, int, int],
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    work_list: torch.Tensor,
    out: torch.Tensor,
    workspace: FixedWorkspace,
    part_tokens: int,
    scale: float | None,
    key_scale: float,
    value_scale: float,
    rows: int,
    block_n: int,
    num_stages: int,
    num_warps: int,
) -> None:
    _, num_heads, head_dim = q.shape
    _, num_kv_heads, page, _ = k_cache.shape
    if part_tokens % block_n:
        raise ValueError(f"parts of {part_tokens} tokens are no multiple of tiles of {block_n}")
    _attention_fixed_kernel[grid](
        q, k_cache, v_cache, block_tables, query_starts, context_lens, work_list, out,
        workspace.partial, workspace.best, workspace.total,
        (scale if scale is not None else head_dim**-0.5) * _LOG2_E * key_scale, value_scale,
        block_tables.stride(0), grid[1], workspace.max_num_parts,
        NUM_KV_HEADS=num_kv_heads, GROUP=num_heads // num_kv_heads, HEAD_DIM=head_dim,
        DIM_PAD=triton.next_power_of_2(head_dim), PAGE=page, ROWS=rows, BLOCK_N=block_n, PART=part_tokens,
        NUM_STAGES=num_stages, COMPUTE=compute_type(q, k_cache),
        num_warps=num_warps, enable_fp_fusion=False,
    )  # fmt: skip
