"""Paged decode attention by a work list: contexts of unequal length, cut into items of about equal length.

One kernel makes the list once a step from the lengths that are on the device, so that a graph replays for any lengths. Each
item is a program for each KV head; the one that ends last of a sequence's merges what they found, in the order of the items,
so a list gives the same bits each time. How a context is cut depends on the other lengths of the step, and so do the last
bits of a row: a plan of fixed order has no lists.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from dragoman_kernels.triton.attention_decode import DecodeWorkspace, attend_tiles
from dragoman_kernels.triton.dependent import begin, launch_options
from dragoman_kernels.triton.float8 import is_float8

# int32 of an item: sequence or -1, first and last tile, the sequence's first item, its number of items, its length; 2 unused.
ITEM_WORDS = 8
_ITEMS_A_PROGRAM = 16  # of the kernel that makes the list
_WORDS = tl.constexpr(ITEM_WORDS)
_AHEAD = tl.constexpr(4)  # parts of a merge whose loads are under way together


@triton.jit(
    do_not_specialize=["num_seqs", "num_items", "min_tiles"], do_not_specialize_on_alignment=["lens_ptr", "items_ptr"]
)
def _decode_list_kernel(
    lens_ptr, items_ptr, num_seqs, num_items, min_tiles, BLOCK_N: tl.constexpr, SEQS: tl.constexpr, ITEMS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """ITEMS rows of the list; each program finds the cut for itself, which takes less than a second kernel would."""
    begin(DEPENDENT)
    seqs = tl.arange(0, SEQS)
    lens = tl.load(lens_ptr + seqs, mask=seqs < num_seqs, other=0)
    tiles = tl.cdiv(lens, BLOCK_N)
    is_seq = seqs < num_seqs
    total = tl.sum(tiles, axis=0)
    # The shortest items of which there are not too many. Rounding up adds at most one a sequence: the upper end is enough.
    longest = tl.maximum(tl.cdiv(total, num_items), min_tiles)
    enough = tl.maximum(tl.cdiv(total, num_items - num_seqs), longest)
    while longest < enough:
        middle = (longest + enough) // 2
        fits = tl.sum(tl.where(is_seq, tl.maximum(tl.cdiv(tiles, middle), 1), 0), axis=0) <= num_items
        longest, enough = tl.where(fits, longest, middle + 1), tl.where(fits, middle, enough)
    counts = tl.where(is_seq, tl.maximum(tl.cdiv(tiles, longest), 1), 0)  # one also where there is no context
    ends = tl.cumsum(counts, axis=0)
    items = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    seq = tl.sum((ends[:, None] <= items[None, :]).to(tl.int32), axis=0)
    is_of = seqs[:, None] == seq[None, :]
    first_item = tl.sum(tl.where(is_of, (ends - counts)[:, None], 0), axis=0)
    count = tl.maximum(tl.sum(tl.where(is_of, counts[:, None], 0), axis=0), 1)
    context = tl.sum(tl.where(is_of, lens[:, None], 0), axis=0)
    length = tl.cdiv(context, BLOCK_N)
    nth = items - first_item
    row = items_ptr + items * _WORDS
    is_item = items < num_items
    tl.store(row, tl.where(seq < num_seqs, seq, -1), mask=is_item)
    tl.store(row + 1, nth * length // count, mask=is_item)
    tl.store(row + 2, (nth + 1) * length // count, mask=is_item)
    tl.store(row + 3, first_item, mask=is_item)
    tl.store(row + 4, count, mask=is_item)
    tl.store(row + 5, context, mask=is_item)


@triton.jit
def _merge(
    seq, kv_head, first_item, count, partial_ptr, lse_ptr, out_ptr,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr,
):  # fmt: skip
    """The parts of one sequence and KV head, in the order of the items."""
    rows = tl.arange(0, GROUP_PAD)
    dims = tl.arange(0, DIM_PAD)
    row_in = rows < GROUP
    mask = row_in[:, None] & (dims < HEAD_DIM)[None, :]
    heads = kv_head * GROUP + rows
    num_heads: tl.constexpr = NUM_KV_HEADS * GROUP
    best = tl.full([GROUP_PAD], -1e30, tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
    for base in tl.range(0, count, _AHEAD):
        for ahead in tl.static_range(_AHEAD):
            is_part = base + ahead < count
            slot = (first_item + base + ahead).to(tl.int64) * num_heads + heads
            # From L2, where other multiprocessors have written them: what L1 holds may be of the layer before.
            lse = tl.load(lse_ptr + slot, mask=row_in & is_part, other=-1e30, cache_modifier=".cg")
            offsets = slot[:, None] * HEAD_DIM + dims[None, :]
            part = tl.load(partial_ptr + offsets, mask=mask & is_part, other=0.0, cache_modifier=".cg")
            new_best = tl.maximum(best, lse)
            shrink, weight = tl.exp2(best - new_best), tl.exp2(lse - new_best)
            weight = tl.where(is_part, weight, 0.0)
            total = total * shrink + weight
            acc = acc * shrink[:, None] + part * weight[:, None]
            best = new_best
    out = acc / tl.maximum(total, 1e-30)[:, None]
    offsets = (seq * num_heads + heads[:, None]) * HEAD_DIM + dims[None, :]
    tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["tables_ptr", "items_ptr", "arrived_ptr"]
)  # fmt: skip
def _decode_items_kernel(
    q_ptr, k_ptr, v_ptr, tables_ptr, items_ptr, arrived_ptr, out_ptr, partial_ptr, lse_ptr,
    scale_log2, value_scale, table_stride,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr, FLOAT8: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    begin(DEPENDENT)
    # Programs start in this order: those that find nothing to do come last, and take no place of others.
    kv_head = tl.program_id(0)
    item = tl.program_id(1)
    row = items_ptr + item * _WORDS
    # All at once: each that waits for another makes every program later.
    seq, first, last = tl.load(row).to(tl.int64), tl.load(row + 1), tl.load(row + 2)
    first_item, count, context = tl.load(row + 3), tl.load(row + 4), tl.load(row + 5)
    if seq < 0:
        return
    best, total, acc = attend_tiles(
        seq, first, last, context, kv_head, q_ptr, k_ptr, v_ptr, tables_ptr,
        scale_log2, value_scale, table_stride,
        NUM_KV_HEADS, GROUP, GROUP_PAD, HEAD_DIM, DIM_PAD, PAGE, BLOCK_N, NUM_STAGES, FLOAT8,
    )  # fmt: skip
    rows = tl.arange(0, GROUP_PAD)
    dims = tl.arange(0, DIM_PAD)
    row_in = rows < GROUP
    mask = row_in[:, None] & (dims < HEAD_DIM)[None, :]
    heads = kv_head * GROUP + rows
    num_heads: tl.constexpr = NUM_KV_HEADS * GROUP
    part = acc / tl.maximum(total, 1e-30)[:, None]
    if count == 1:
        offsets = (seq * num_heads + heads[:, None]) * HEAD_DIM + dims[None, :]
        tl.store(out_ptr + offsets, part.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        slot = item.to(tl.int64) * num_heads + heads
        lse = tl.where(total > 0, best + tl.log2(tl.maximum(total, 1e-30)), -1e30)
        tl.store(lse_ptr + slot, lse, mask=row_in)
        tl.store(partial_ptr + slot[:, None] * HEAD_DIM + dims[None, :], part, mask=mask)
        # Every thread's part is written before one of them says so for all.
        tl.debug_barrier()
        arrived = arrived_ptr + first_item * NUM_KV_HEADS + kv_head
        if tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == count - 1:
            tl.debug_barrier()
            _merge(
                seq, kv_head, first_item, count, partial_ptr, lse_ptr, out_ptr,
                NUM_KV_HEADS, GROUP, GROUP_PAD, HEAD_DIM, DIM_PAD,
            )  # fmt: skip
            tl.store(arrived, 0)  # as the next layer finds it


@dataclass(frozen=True, slots=True)
class Cut:
    """How a step's contexts are cut: into `num_items` at most, each of `min_tiles` tiles of `block_n` keys at least, but for
    contexts that are shorter. More items than sequences.
    """

    num_items: int
    min_tiles: int
    block_n: int


class DecodeItems:
    """The list of a step, for the largest; and how many programs of each sequence have ended, which is 0 between launches."""

    def __init__(self, max_num_items: int, max_num_seqs: int, num_kv_heads: int, device: torch.device):
        self.rows = torch.empty((max_num_items, ITEM_WORDS), dtype=torch.int32, device=device)
        self.arrived = torch.zeros((max_num_items * num_kv_heads,), dtype=torch.int32, device=device)
        self.padded_seqs = max(16, triton.next_power_of_2(max_num_seqs))  # one binary, whatever the step

    def make(self, context_lens: torch.Tensor, cut: Cut, *, dependent: bool = False) -> None:
        """The list of a step of sequences with `context_lens` [num_seqs] int32, 0 for a padding row."""
        (num_seqs,) = context_lens.shape
        if not num_seqs < cut.num_items <= len(self.rows):
            raise ValueError(f"{num_seqs} sequences cannot be cut into {cut.num_items} items, of {len(self.rows)}")
        if num_seqs > self.padded_seqs:
            raise ValueError(
                f"a list of {num_seqs} sequences is longer than the {self.padded_seqs} that its kernel reads"
            )
        _decode_list_kernel[(triton.cdiv(cut.num_items, _ITEMS_A_PROGRAM),)](
            context_lens, self.rows, num_seqs, cut.num_items, cut.min_tiles, BLOCK_N=cut.block_n, SEQS=self.padded_seqs,
            ITEMS=_ITEMS_A_PROGRAM, **launch_options(dependent),
        )  # fmt: skip


def listed_decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    workspace: DecodeWorkspace,
    items: DecodeItems,
    cut: Cut,
    scale: float | None = None,
    *,
    num_stages: int = 3,
    num_warps: int = 4,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    dependent: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `paged_decode_attention`, by the list that `items` holds, which was made by `cut` for these sequences' lengths.

    `workspace` has room for `cut.num_items` parts of all heads.
    """
    _, num_heads, head_dim = q.shape
    _, num_kv_heads, page, _ = k_cache.shape
    group = num_heads // num_kv_heads
    if out is None:
        out = torch.empty_like(q)
    scale_log2 = (scale if scale is not None else head_dim**-0.5) * 1.4426950408889634 * key_scale
    _decode_items_kernel[(num_kv_heads, cut.num_items)](
        q, k_cache, v_cache, block_tables, items.rows, items.arrived, out, workspace.partial, workspace.lse,
        scale_log2, value_scale, block_tables.stride(0),
        NUM_KV_HEADS=num_kv_heads, GROUP=group, GROUP_PAD=max(16, triton.next_power_of_2(group)),
        HEAD_DIM=head_dim, DIM_PAD=triton.next_power_of_2(head_dim), PAGE=page, BLOCK_N=cut.block_n,
        NUM_STAGES=num_stages, FLOAT8=is_float8(k_cache), num_warps=num_warps, **launch_options(dependent),
    )  # fmt: skip
    return out
