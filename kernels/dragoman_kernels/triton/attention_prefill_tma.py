"""Paged prefill attention whose K and V come by tensor descriptors: the copy engine of Hopper and later fetches whole tiles.

As attention_prefill.py, with fewer instructions a tile: no thread computes an address of K or V.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from dragoman_kernels.triton.launches import MAX_PLAIN_WARPS

_PART_N = 32  # keys of a tile at the end of a context
_INTERPRETED = triton.knobs.runtime.interpret


@triton.jit
def _attend(q, k, v, best, total, acc, scale_log2, start, columns, position, diagonal):
    """One tile of keys. `diagonal`: not every query sees all of them."""
    scores = tl.dot(q, tl.trans(k))
    if diagonal:
        scores = tl.where((start + columns)[None, :] <= position[:, None], scores, -1e30)
    new_best = tl.maximum(best, tl.max(scores, axis=1) * scale_log2)
    weights = tl.exp2(scores * scale_log2 - new_best[:, None])
    shrink = tl.exp2(best - new_best)
    total = total * shrink + tl.sum(weights, axis=1)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None])
    return new_best, total, acc


@triton.jit
def _row(tables_ptr, start, kv_head, NUM_KV_HEADS: tl.constexpr, PAGE: tl.constexpr):
    """Of a cache seen as [num_blocks * NUM_KV_HEADS * PAGE, head_dim]: where token `start` of a sequence lies."""
    page = tl.load(tables_ptr + start // PAGE)
    return (page * NUM_KV_HEADS + kv_head) * PAGE + start % PAGE


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["tables_ptr", "starts_ptr", "lens_ptr", "work_ptr"],
)
def _prefill_tma_kernel(
    q_ptr, k_desc, v_desc, k_ptr, v_ptr, tables_ptr, starts_ptr, lens_ptr, work_ptr, out_ptr, scale_log2, table_stride,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PART_N: tl.constexpr, NUM_STAGES: tl.constexpr,
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
    tables_ptr += seq * table_stride

    dims = tl.arange(0, HEAD_DIM)
    rows = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_N)
    offsets = rows[:, None] * (NUM_HEADS * HEAD_DIM) + dims[None, :]
    first = ((chunk_start + first_query).to(tl.int64) * NUM_HEADS + head) * HEAD_DIM
    q = tl.load(q_ptr + first + offsets, mask=(first_query + rows < chunk_len)[:, None], other=0.0)
    position = before + first_query + rows

    best = tl.full([BLOCK_M], -1e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    full_tiles = (before + first_query + 1) // BLOCK_N  # wholly before the first query
    num_seen = before + tl.minimum(first_query + BLOCK_M, chunk_len)
    # Past the context a page may hold anything, NaN too: a tile of its last tokens is not fetched whole.
    whole_tiles = tl.minimum(tl.cdiv(num_seen, BLOCK_N), context // BLOCK_N)
    for tile in tl.range(0, whole_tiles, num_stages=NUM_STAGES):
        start = tile * BLOCK_N
        place = _row(tables_ptr, start, kv_head, NUM_KV_HEADS, PAGE)
        k = k_desc.load([place, 0])
        v = v_desc.load([place, 0])
        best, total, acc = _attend(
            q, k, v, best, total, acc, scale_log2, start, columns, position, tile >= full_tiles
        )  # fmt: skip
    parts = tl.arange(0, PART_N)
    for part in tl.range(whole_tiles * (BLOCK_N // PART_N), tl.cdiv(num_seen, PART_N), num_stages=1):
        start = part * PART_N
        place = _row(tables_ptr, start, kv_head, NUM_KV_HEADS, PAGE)
        within = place.to(tl.int64) * HEAD_DIM + (parts[:, None] * HEAD_DIM + dims[None, :])
        inside = (start + parts < context)[:, None]
        k = tl.load(k_ptr + within, mask=inside, other=0.0)
        v = tl.load(v_ptr + within, mask=inside, other=0.0)
        best, total, acc = _attend(q, k, v, best, total, acc, scale_log2, start, parts, position, True)
    # Read once more: kept over the loops, what follows from them would take registers that products need.
    last_query = tl.load(work_ptr + item * 2 + 1, volatile=True)
    first = ((chunk_start + last_query).to(tl.int64) * NUM_HEADS + head) * HEAD_DIM
    out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + first + offsets, out, mask=(last_query + rows < chunk_len)[:, None])


class Address:
    """Where a descriptor's tensor lies: it keeps no memory, so that a descriptor may outlive its tensor."""

    __slots__ = ("_address", "dtype")

    def __init__(self, address: int, dtype: torch.dtype) -> None:
        self._address, self.dtype = address, dtype

    def data_ptr(self) -> int:
        """Address of the first value."""
        return self._address


@lru_cache(maxsize=1024)  # two a layer
def _descriptor(address: int, dtype: torch.dtype, num_rows: int, head_dim: int, block_n: int) -> TensorDescriptor:
    """Follows from its arguments alone, so one that was made for memory since freed is none too many."""
    return TensorDescriptor(Address(address, dtype), [num_rows, head_dim], [head_dim, 1], [block_n, head_dim])


def cache_descriptor(cache: torch.Tensor, block_n: int) -> TensorDescriptor:
    """Of one layer's K or V, contiguous [num_blocks, num_kv_heads, page, head_dim], in tiles [block_n, head_dim]."""
    num_blocks, num_kv_heads, page, head_dim = cache.shape
    num_rows = num_blocks * num_kv_heads * page
    if _INTERPRETED:  # the interpreter reads the tensor itself
        return TensorDescriptor(cache, [num_rows, head_dim], [head_dim, 1], [block_n, head_dim])
    return _descriptor(cache.data_ptr(), cache.dtype, num_rows, head_dim, block_n)


def prefill_by_descriptors(
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
    """As `paged_prefill_attention` with tma=True, which calls it: `scale` times log2(e), into `out`.

    Raises ValueError where no descriptor has such a tile: several pages, a head size that is no power of two, K and V
    of another type than q.
    """
    _, num_heads, head_dim = q.shape
    _, num_kv_heads, page, _ = k_cache.shape
    if (
        page % min(block_n, 64 if num_warps > MAX_PLAIN_WARPS else block_n)
        or head_dim & (head_dim - 1)
        or k_cache.dtype != q.dtype
    ):
        raise ValueError(
            f"tiles of {block_n} keys of {head_dim} values in {k_cache.dtype}, from pages of {page} tokens, for queries in "
            f"{q.dtype}: a tensor descriptor needs tiles inside a page, a head size that is a power of two and K and V of "
            "the type of q; use tma=False"
        )
    if num_warps > MAX_PLAIN_WARPS:
        from dragoman_kernels.triton.attention_prefill_ws import (
            prefill_with_roles,  # needs Gluon, which is slow to import
        )

        prefill_with_roles(
            q, k_cache, v_cache, block_tables, query_starts, context_lens, work_list, scale, block_m=block_m,
            block_n=block_n, num_stages=num_stages, num_warps=num_warps, out=out,
        )  # fmt: skip
        return
    _prefill_tma_kernel[(num_heads, work_list.shape[0])](
        q, cache_descriptor(k_cache, block_n), cache_descriptor(v_cache, block_n), k_cache, v_cache, block_tables,
        query_starts, context_lens, work_list, out, scale, block_tables.stride(0),
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, PAGE=page, BLOCK_M=block_m, BLOCK_N=block_n,
        PART_N=min(_PART_N, block_n), NUM_STAGES=num_stages, num_warps=num_warps,
    )  # fmt: skip
