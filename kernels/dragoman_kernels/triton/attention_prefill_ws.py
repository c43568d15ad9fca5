"""Paged prefill attention by warps with roles, in Gluon for Hopper: one fetches tiles, groups of four attend.

Each group has 64 queries. While its product of weights and V runs, it turns the next scores into weights; while it does
that, the other group's products run. Blocks stay and take one work item after the other, so that the next item's first tiles
come while the last one's outputs leave. (The schedule of FlashAttention-3, arXiv 2407.08608, over pages.) Triton's
interpreter knows no Gluon: tests run these functions with threads for warps (tests/kernels/triton/warp_roles.py).
"""

from __future__ import annotations

from functools import lru_cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from dragoman_kernels.triton.attention_prefill_tma import Address
from dragoman_kernels.triton.launches import WS_REGISTERS

ROWS = gl.constexpr(64)  # queries of a group of four warps


@gluon.jit
def _turn(turn, num_programs):
    """The work of this block's `turn`: to and fro over what is sorted by length, so that no block has the longest always."""
    place = gl.program_id(0)
    if turn % 2 == 1:
        place = num_programs - 1 - place
    return turn * num_programs + place


@gluon.jit
def _item(index, work, NUM_HEADS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """(head, first row of q, queries, first query's position, context, its block table, tiles) of work item `index`, the last
    where there are fewer.
    """
    tables_ptr, starts_ptr, lens_ptr, work_ptr, table_stride, num_items, _num_programs = work
    index = gl.minimum(index, num_items * NUM_HEADS - 1)
    head = index % NUM_HEADS
    item = index // NUM_HEADS
    seq = gl.load(work_ptr + item * 2)
    first_query = gl.load(work_ptr + item * 2 + 1)
    chunk_start = gl.load(starts_ptr + seq)
    chunk_len = gl.load(starts_ptr + seq + 1) - chunk_start
    context = gl.load(lens_ptr + seq)
    first_position = context - chunk_len + first_query
    count = gl.minimum(chunk_len - first_query, BLOCK_M)
    num_tiles = gl.maximum((first_position + count + BLOCK_N - 1) // BLOCK_N, 0)
    if count <= 0:
        num_tiles = 0
    table_ptr = tables_ptr + gl.cast(seq, gl.int64) * table_stride
    return head, chunk_start + first_query, count, first_position, context, table_ptr, num_tiles


@gluon.jit
def _following(stage, phase, NUM_STAGES: gl.constexpr):
    """The next stage, and the phase of its barriers."""
    stage = stage + 1
    if stage == NUM_STAGES:
        stage = 0
        phase = phase ^ 1
    return stage, phase


@gluon.jit
def _place(table_ptr, tile, kv_head, NUM_KV_HEADS: gl.constexpr, PAGE: gl.constexpr, BLOCK_N: gl.constexpr):
    """Of the cache seen as [num_blocks * NUM_KV_HEADS * PAGE, head_dim]: where tile `tile` of a sequence begins."""
    start = tile * BLOCK_N
    return (gl.load(table_ptr + start // PAGE) * NUM_KV_HEADS + kv_head) * PAGE + start % PAGE


@gluon.jit
def _fetch(
    q_desc, k_desc, v_desc, work, smem, NUM_HEADS: gl.constexpr, NUM_KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, PAGE: gl.constexpr,
    BLOCK_N: gl.constexpr, NUM_GROUPS: gl.constexpr, NUM_STAGES: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """The warp that fetches."""
    num_items, num_programs = work[5], work[6]
    q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty = smem
    BLOCK_M: gl.constexpr = NUM_GROUPS * ROWS
    TILE_BYTES: gl.constexpr = BLOCK_N * HEAD_DIM * 2
    stage = 0
    phase = 1  # of what is empty from the beginning
    q_phase = 1
    turn = 0
    index = _turn(turn, num_programs)
    total_work = num_items * NUM_HEADS
    head, row, _count, _first, _context, table_ptr, num_tiles = _item(
        index, work, NUM_HEADS, BLOCK_M, BLOCK_N
    )  # fmt: skip
    while index < total_work:
        turn = turn + 1
        following = _turn(turn, num_programs)
        next_head, next_row, _count, _first, _context, next_table_ptr, next_tiles = _item(
            following, work, NUM_HEADS, BLOCK_M, BLOCK_N
        )  # fmt: skip
        if num_tiles > 0:
            kv_head = head // (NUM_HEADS // NUM_KV_HEADS)
            mbarrier.wait(q_empty, q_phase)
            q_phase = q_phase ^ 1
            mbarrier.expect(q_full, BLOCK_M * HEAD_DIM * 2)
            for group in gl.static_range(NUM_GROUPS):
                tma.async_copy_global_to_shared(
                    q_desc, [row + group * ROWS, head * HEAD_DIM], q_full, q_smem.index(group)
                )
            last = num_tiles - 1  # of the second half of a last stage there may be none: it is read again, and masked
            place = _place(table_ptr, 0, kv_head, NUM_KV_HEADS, PAGE, BLOCK_N)
            other = _place(table_ptr, gl.minimum(1, last), kv_head, NUM_KV_HEADS, PAGE, BLOCK_N)
            for tile in range(0, num_tiles, PARTS):
                # Asked for a stage ahead: a table's entry takes as long to come as a tile to be attended to.
                next_place = _place(table_ptr, gl.minimum(tile + PARTS, last), kv_head, NUM_KV_HEADS, PAGE, BLOCK_N)
                next_other = _place(table_ptr, gl.minimum(tile + PARTS + 1, last), kv_head, NUM_KV_HEADS, PAGE, BLOCK_N)
                mbarrier.wait(k_empty.index(stage), phase)
                mbarrier.expect(k_full.index(stage), PARTS * TILE_BYTES)
                tma.async_copy_global_to_shared(k_desc, [place, 0], k_full.index(stage), k_smem.index(stage * PARTS))
                if PARTS == 2:
                    tma.async_copy_global_to_shared(
                        k_desc, [other, 0], k_full.index(stage), k_smem.index(stage * 2 + 1)
                    )
                mbarrier.wait(v_empty.index(stage), phase)
                mbarrier.expect(v_full.index(stage), PARTS * TILE_BYTES)
                tma.async_copy_global_to_shared(v_desc, [place, 0], v_full.index(stage), v_smem.index(stage * PARTS))
                if PARTS == 2:
                    tma.async_copy_global_to_shared(
                        v_desc, [other, 0], v_full.index(stage), v_smem.index(stage * 2 + 1)
                    )
                stage, phase = _following(stage, phase, NUM_STAGES)
                place = next_place
                other = next_other
        index = following
        head = next_head
        row = next_row
        table_ptr = next_table_ptr
        num_tiles = next_tiles


@gluon.jit
def _masked(scores, start, position, BLOCK_N: gl.constexpr, SCORES: gl.constexpr):
    """Without what lies behind each query."""
    columns = start + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, SCORES))
    return gl.where(gl.expand_dims(columns, 0) <= gl.expand_dims(position, 1), scores, gl.full_like(scores, -1e30))


@gluon.jit
def _weights(
    scores, other, best, total, scale_log2, start, position, diagonal,
    BLOCK_N: gl.constexpr, PARTS: gl.constexpr, SCORES: gl.constexpr,
):  # fmt: skip
    """Weights of one stage's scores, the new best and total, and what the outputs so far shrink by."""
    if diagonal:
        scores = _masked(scores, start, position, BLOCK_N, SCORES)
        if PARTS == 2:
            other = _masked(other, start + BLOCK_N, position, BLOCK_N, SCORES)
    highest = gl.max(gl.maximum(scores, other), axis=1) if PARTS == 2 else gl.max(scores, axis=1)
    new_best = gl.maximum(best, highest * scale_log2)
    weights = gl.exp2(scores * scale_log2 - gl.expand_dims(new_best, 1))
    shrink = gl.exp2(best - new_best)
    if PARTS == 2:
        other = gl.exp2(other * scale_log2 - gl.expand_dims(new_best, 1))
        total = total * shrink + gl.sum(weights + other, axis=1)
    else:
        total = total * shrink + gl.sum(weights, axis=1)
    return weights, other, new_best, total, shrink


@gluon.jit
def _begin_scores(q, k_smem, stage, nothing, PARTS: gl.constexpr):
    """Products under way: of each part of a stage, the second the first again where there is one."""
    scores = warpgroup_mma(q, k_smem.index(stage * PARTS).permute((1, 0)), nothing, use_acc=False, is_async=True)
    if PARTS == 2:
        other = warpgroup_mma(q, k_smem.index(stage * 2 + 1).permute((1, 0)), nothing, use_acc=False, is_async=True)
    else:
        other = scores
    return scores, other


@gluon.jit
def _end_scores(scores, other, num_outstanding: gl.constexpr, PARTS: gl.constexpr):
    if PARTS == 2:
        scores, other = warpgroup_mma_wait(num_outstanding, (scores, other))
    else:
        scores = warpgroup_mma_wait(num_outstanding, (scores,))
        other = scores
    return scores, other


@gluon.jit
def _begin_outputs(p, p_other, v_smem, stage, acc, PARTS: gl.constexpr):
    acc = warpgroup_mma(p, v_smem.index(stage * PARTS), acc, is_async=True)
    if PARTS == 2:
        acc = warpgroup_mma(p_other, v_smem.index(stage * 2 + 1), acc, is_async=True)
    return acc


@gluon.jit
def _made(total):
    """`total`, with a branch that is never taken: the wait for the product under way stays behind what makes the weights, which
    the assembler would put behind the wait.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 lo; mov.u32 lo, 0; setp.lt.f32 p, $1, 0f00000000; @p st.shared.f32 [lo], $1; mov.b32 $0, $1; }", "=r,r", [total], dtype=gl.float32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _without_rest(v_tile, num_valid, ROWWISE: gl.constexpr, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Past a context's end a page may hold anything, NaN too, which no weight of 0 takes away."""
    if num_valid < BLOCK_N:
        v = v_tile.load(ROWWISE)
        inside = gl.expand_dims(gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, ROWWISE)), 1) < num_valid
        v_tile.store(gl.where(inside, v, gl.full_like(v, 0.0)))
        fence_async_shared()
        gl.thread_barrier()


@gluon.jit
def _attend(
    out_ptr, scale_log2, work, smem, GROUP: gl.constexpr, NUM_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr,
    NUM_GROUPS: gl.constexpr, NUM_STAGES: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """A group of four warps."""
    num_items, num_programs = work[5], work[6]
    q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty = smem
    BLOCK_M: gl.constexpr = NUM_GROUPS * ROWS
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    OUTPUTS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUTPUTS, 2)
    QUERIES: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    ROWWISE: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    dtype: gl.constexpr = k_smem.dtype
    stage = 0
    phase = 0
    q_phase = 0
    turn = 0
    index = _turn(turn, num_programs)
    total_work = num_items * NUM_HEADS
    head, row, count, first_position, context, _table_ptr, num_tiles = _item(
        index, work, NUM_HEADS, BLOCK_M, BLOCK_N
    )  # fmt: skip
    while index < total_work:
        turn = turn + 1
        following = _turn(turn, num_programs)
        # Read while this item is attended to.
        next_head, next_row, next_count, next_first, next_context, _table_ptr, next_tiles = _item(
            following, work, NUM_HEADS, BLOCK_M, BLOCK_N
        )  # fmt: skip
        if num_tiles > 0:
            position = first_position + GROUP * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
            full_tiles = (first_position + GROUP * ROWS + 1) // BLOCK_N
            mbarrier.wait(q_full, q_phase)
            q_phase = q_phase ^ 1
            q = q_smem.index(GROUP).load(QUERIES)

            nothing = gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES)
            best = gl.full([ROWS], -1e30, gl.float32, gl.SliceLayout(1, SCORES))
            total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SCORES))
            acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, OUTPUTS)

            mbarrier.wait(k_full.index(stage), phase)
            scores_later, other_later = _begin_scores(q, k_smem, stage, nothing, PARTS)
            scores, other = _end_scores(scores_later, other_later, 0, PARTS)
            # Not before: a load that was begun orders nothing for the copy engine, which would put the next item's queries
            # under it. That product has used them, so they are in registers.
            mbarrier.arrive(q_empty)
            mbarrier.arrive(k_empty.index(stage))
            weights, other, best, total, shrink = _weights(
                scores, other, best, total, scale_log2, 0, position, full_tiles < PARTS, BLOCK_N, PARTS, SCORES
            )  # fmt: skip
            p = gl.convert_layout(gl.cast(weights, dtype), WEIGHTS)
            p_other = gl.convert_layout(gl.cast(other, dtype), WEIGHTS)
            v_stage = stage
            v_phase = phase
            for tile in range(PARTS, num_tiles, PARTS):
                stage, phase = _following(stage, phase, NUM_STAGES)
                mbarrier.wait(k_full.index(stage), phase)
                scores_later, other_later = _begin_scores(q, k_smem, stage, nothing, PARTS)
                mbarrier.wait(v_full.index(v_stage), v_phase)
                acc_later = _begin_outputs(p, p_other, v_smem, v_stage, acc, PARTS)
                scores, other = _end_scores(scores_later, other_later, PARTS, PARTS)
                mbarrier.arrive(k_empty.index(stage))
                weights, other, best, total, shrink = _weights(
                    scores, other, best, total, scale_log2, tile * BLOCK_N, position, tile + PARTS > full_tiles,
                    BLOCK_N, PARTS, SCORES,
                )  # fmt: skip
                total = _made(total)
                acc = warpgroup_mma_wait(0, (acc_later,))
                mbarrier.arrive(v_empty.index(v_stage))
                acc = acc * gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, OUTPUTS)), 1)
                p = gl.convert_layout(gl.cast(weights, dtype), WEIGHTS)
                p_other = gl.convert_layout(gl.cast(other, dtype), WEIGHTS)
                v_stage = stage
                v_phase = phase
            mbarrier.wait(v_full.index(v_stage), v_phase)
            left = context - (num_tiles - 1) // PARTS * PARTS * BLOCK_N  # keys of the last stage
            _without_rest(v_smem.index(v_stage * PARTS), left, ROWWISE, BLOCK_N, HEAD_DIM)
            if PARTS == 2:
                _without_rest(v_smem.index(v_stage * 2 + 1), left - BLOCK_N, ROWWISE, BLOCK_N, HEAD_DIM)
            acc_later = _begin_outputs(p, p_other, v_smem, v_stage, acc, PARTS)
            acc = warpgroup_mma_wait(0, (acc_later,))
            mbarrier.arrive(v_empty.index(v_stage))
            stage, phase = _following(stage, phase, NUM_STAGES)
            acc = acc / gl.expand_dims(gl.convert_layout(total, gl.SliceLayout(1, OUTPUTS)), 1)
            out = gl.convert_layout(gl.cast(acc, dtype), ROWWISE)
            rows = GROUP * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, ROWWISE))
            dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, ROWWISE))
            first = (gl.cast(row, gl.int64) * NUM_HEADS + head) * HEAD_DIM
            offsets = gl.expand_dims(rows, 1) * (NUM_HEADS * HEAD_DIM) + gl.expand_dims(dims, 0)
            gl.store(out_ptr + first + offsets, out, mask=gl.expand_dims(rows, 1) < count)
        index = following
        head = next_head
        row = next_row
        count = next_count
        first_position = next_first
        context = next_context
        num_tiles = next_tiles


@gluon.jit(
    do_not_specialize=["table_stride", "num_items", "num_programs"],
    do_not_specialize_on_alignment=["tables_ptr", "starts_ptr", "lens_ptr", "work_ptr"],
)
def _prefill_ws_kernel(
    q_desc, k_desc, v_desc, tables_ptr, starts_ptr, lens_ptr, work_ptr, out_ptr, scale_log2, table_stride, num_items,
    num_programs,
    NUM_HEADS: gl.constexpr, NUM_KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, PAGE: gl.constexpr,
    BLOCK_N: gl.constexpr, NUM_GROUPS: gl.constexpr, NUM_STAGES: gl.constexpr, PARTS: gl.constexpr,
    NUM_REGISTERS: gl.constexpr,
    num_warps: gl.constexpr = 4,
):  # fmt: skip
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [NUM_GROUPS, ROWS, HEAD_DIM], q_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [NUM_STAGES * PARTS, BLOCK_N, HEAD_DIM], k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [NUM_STAGES * PARTS, BLOCK_N, HEAD_DIM], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=NUM_GROUPS)
    for stage in gl.static_range(NUM_STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=NUM_GROUPS)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=NUM_GROUPS)
    fence_async_shared()
    smem = (q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty)
    work = (tables_ptr, starts_ptr, lens_ptr, work_ptr, table_stride, num_items, num_programs)
    # Constants are written out each time: in a tuple with a name they would be none.
    if NUM_GROUPS == 2:
        gl.warp_specialize([
            (_attend, (out_ptr, scale_log2, work, smem, 0, NUM_HEADS, HEAD_DIM, BLOCK_N, NUM_GROUPS, NUM_STAGES, PARTS)),
            (_attend, (out_ptr, scale_log2, work, smem, 1, NUM_HEADS, HEAD_DIM, BLOCK_N, NUM_GROUPS, NUM_STAGES, PARTS)),
            (_fetch, (q_desc, k_desc, v_desc, work, smem, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE, BLOCK_N, NUM_GROUPS,
                      NUM_STAGES, PARTS)),
        ], [4, 1], [NUM_REGISTERS, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_attend, (out_ptr, scale_log2, work, smem, 0, NUM_HEADS, HEAD_DIM, BLOCK_N, NUM_GROUPS, NUM_STAGES, PARTS)),
            (_attend, (out_ptr, scale_log2, work, smem, 1, NUM_HEADS, HEAD_DIM, BLOCK_N, NUM_GROUPS, NUM_STAGES, PARTS)),
            (_attend, (out_ptr, scale_log2, work, smem, 2, NUM_HEADS, HEAD_DIM, BLOCK_N, NUM_GROUPS, NUM_STAGES, PARTS)),
            (_fetch, (q_desc, k_desc, v_desc, work, smem, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE, BLOCK_N, NUM_GROUPS,
                      NUM_STAGES, PARTS)),
        ], [4, 4, 1], [NUM_REGISTERS, NUM_REGISTERS, 24])  # fmt: skip


@lru_cache(maxsize=4096)  # two a layer, and one for each place that q lies at
def _descriptor(
    address: int, dtype: torch.dtype, num_rows: int, width: int, block: tuple[int, int]
) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout.get_default_for(list(block), gl.bfloat16)  # float16 has the same
    return TensorDescriptor(Address(address, dtype), [num_rows, width], [width, 1], list(block), layout)


@lru_cache(maxsize=16)
def _num_multiprocessors(device: torch.device) -> int:
    """1 where nothing runs: what is compiled is the same."""
    is_card = str(device).startswith("cuda")
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if is_card else 1


def prefill_with_roles(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    work_list: torch.Tensor,
    scale: float,
    *,
    block_m: int,
    block_n: int,
    num_stages: int,
    num_warps: int,
    out: torch.Tensor,
) -> None:
    """As `prefill_by_descriptors`, which calls it: a group of four warps for each 64 queries of an item, and four of which
    one fetches; a stage has `block_n` keys in tiles of 64.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_blocks, num_kv_heads, page, _ = k_cache.shape
    num_groups, num_rows = block_m // 64, num_blocks * num_kv_heads * page
    keys, values = (
        _descriptor(cache.data_ptr(), cache.dtype, num_rows, head_dim, (64, head_dim)) for cache in (k_cache, v_cache)
    )
    queries = _descriptor(q.data_ptr(), q.dtype, num_tokens, num_heads * head_dim, (64, head_dim))
    num_programs = min(_num_multiprocessors(q.device), num_heads * work_list.shape[0])
    _prefill_ws_kernel[(num_programs,)](
        queries, keys, values, block_tables, query_starts, context_lens, work_list, out, scale, block_tables.stride(0),
        work_list.shape[0], num_programs,
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, PAGE=page, BLOCK_N=64, NUM_GROUPS=num_groups,
        NUM_STAGES=num_stages, PARTS=block_n // 64, NUM_REGISTERS=WS_REGISTERS[num_groups], num_warps=4,
    )  # fmt: skip
