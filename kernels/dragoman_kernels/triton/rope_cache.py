"""Between the qkv product and attention: optional q/k norm, rotary embedding, and K and V into their pages."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dragoman_kernels.triton.dependent import begin, launch_options


@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"])
def _rope_cache_kernel(
    qkv_ptr, q_out_ptr, k_cache_ptr, v_cache_ptr, cos_ptr, sin_ptr, positions_ptr, slots_ptr, q_norm_ptr, k_norm_ptr,
    eps,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF_BLOCK: tl.constexpr,
    PAGE: tl.constexpr, HAS_NORM: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    begin(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    half: tl.constexpr = HEAD_DIM // 2
    lane = tl.arange(0, HALF_BLOCK)
    inside = lane < half
    source = qkv_ptr + (token * (NUM_HEADS + 2 * NUM_KV_HEADS) + head) * HEAD_DIM
    first = tl.load(source + lane, mask=inside, other=0.0)
    second = tl.load(source + half + lane, mask=inside, other=0.0)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    page = slot // PAGE
    offset = slot % PAGE
    if head >= NUM_HEADS + NUM_KV_HEADS:
        v_head = head - NUM_HEADS - NUM_KV_HEADS
        target = v_cache_ptr + ((page * NUM_KV_HEADS + v_head) * PAGE + offset) * HEAD_DIM
        tl.store(target + lane, first.to(v_cache_ptr.dtype.element_ty), mask=inside)
        tl.store(target + half + lane, second.to(v_cache_ptr.dtype.element_ty), mask=inside)
    else:
        a = first.to(tl.float32)
        b = second.to(tl.float32)
        if HAS_NORM:
            scale = 1.0 / tl.sqrt((tl.sum(a * a, axis=0) + tl.sum(b * b, axis=0)) / HEAD_DIM + eps)
            weight_ptr = q_norm_ptr if head < NUM_HEADS else k_norm_ptr
            a = a * scale * tl.load(weight_ptr + lane, mask=inside, other=0.0).to(tl.float32)
            b = b * scale * tl.load(weight_ptr + half + lane, mask=inside, other=0.0).to(tl.float32)
            a = a.to(qkv_ptr.dtype.element_ty).to(tl.float32)
            b = b.to(qkv_ptr.dtype.element_ty).to(tl.float32)
        position = tl.load(positions_ptr + token).to(tl.int64)
        cos = tl.load(cos_ptr + position * half + lane, mask=inside, other=0.0)
        sin = tl.load(sin_ptr + position * half + lane, mask=inside, other=0.0)
        low = a * cos - b * sin
        high = b * cos + a * sin
        if head < NUM_HEADS:
            target = q_out_ptr + (token * NUM_HEADS + head) * HEAD_DIM
            tl.store(target + lane, low.to(q_out_ptr.dtype.element_ty), mask=inside)
            tl.store(target + half + lane, high.to(q_out_ptr.dtype.element_ty), mask=inside)
        else:
            target = k_cache_ptr + ((page * NUM_KV_HEADS + head - NUM_HEADS) * PAGE + offset) * HEAD_DIM
            tl.store(target + lane, low.to(k_cache_ptr.dtype.element_ty), mask=inside)
            tl.store(target + half + lane, high.to(k_cache_ptr.dtype.element_ty), mask=inside)


def rope_and_cache(
    qkv: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    num_heads: int,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    dependent: bool = False,
) -> torch.Tensor:
    """Rotate q and k, write k and v into their pages, return q [num_tokens, num_heads, head_dim].

    `qkv` [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]; caches [num_blocks, num_kv_heads, page, head_dim];
    `cos` and `sin` [max_position, head_dim / 2] float32, the half-split form; `slots` are block * page + offset.
    """
    _, num_kv_heads, page, head_dim = k_cache.shape
    num_tokens = qkv.shape[0]
    q = torch.empty((num_tokens, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    _rope_cache_kernel[(num_tokens, num_heads + 2 * num_kv_heads)](
        qkv, q, k_cache, v_cache, cos, sin, positions, slots, q_norm, k_norm, eps,
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim,
        HALF_BLOCK=triton.next_power_of_2(head_dim // 2), PAGE=page, HAS_NORM=q_norm is not None, num_warps=1,
        **launch_options(dependent),
    )  # fmt: skip
    return q
