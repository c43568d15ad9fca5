"""Between the qkv product and attention: optional q/k norm, rotary embedding, and K and V into their pages."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dragoman_kernels.triton.dependent import begin, launch_options
from dragoman_kernels.triton.float8 import is_float8, to_cache

_HEADS = 8  # of a program: one head has too few bytes to keep a warp busy


@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"])
def _rope_cache_kernel(
    qkv_ptr, q_out_ptr, k_cache_ptr, v_cache_ptr, cos_ptr, sin_ptr, positions_ptr, slots_ptr, q_norm_ptr, k_norm_ptr,
    eps, key_inverse, value_inverse,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF_BLOCK: tl.constexpr,
    PAGE: tl.constexpr, HAS_NORM: tl.constexpr, HEADS: tl.constexpr, FLOAT8: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    begin(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    half: tl.constexpr = HEAD_DIM // 2
    lane = tl.arange(0, HALF_BLOCK)
    is_q = heads < NUM_HEADS
    is_k = (heads >= NUM_HEADS) & (heads < NUM_HEADS + NUM_KV_HEADS)
    is_v = (heads >= NUM_HEADS + NUM_KV_HEADS) & (heads < NUM_HEADS + 2 * NUM_KV_HEADS)
    lane_in = (lane < half)[None, :]
    inside = (heads < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & lane_in
    source = qkv_ptr + (token * (NUM_HEADS + 2 * NUM_KV_HEADS) + heads[:, None]) * HEAD_DIM + lane[None, :]
    first = tl.load(source, mask=inside, other=0.0)
    second = tl.load(source + half, mask=inside, other=0.0)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    page = slot // PAGE
    offset = slot % PAGE
    a = first.to(tl.float32)
    b = second.to(tl.float32)
    if HAS_NORM:
        scale = 1.0 / tl.sqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / HEAD_DIM + eps)[:, None]
        weights = tl.where(is_q[:, None], q_norm_ptr, k_norm_ptr) + lane[None, :]
        a = a * scale * tl.load(weights, mask=inside, other=0.0).to(tl.float32)
        b = b * scale * tl.load(weights + half, mask=inside, other=0.0).to(tl.float32)
        a = a.to(qkv_ptr.dtype.element_ty).to(tl.float32)
        b = b.to(qkv_ptr.dtype.element_ty).to(tl.float32)
    angles = tl.load(positions_ptr + token).to(tl.int64) * half + lane
    cos = tl.load(cos_ptr + angles, mask=lane < half, other=0.0)[None, :]
    sin = tl.load(sin_ptr + angles, mask=lane < half, other=0.0)[None, :]
    low = a * cos - b * sin
    high = b * cos + a * sin
    q_out = q_out_ptr + (token * NUM_HEADS + heads[:, None]) * HEAD_DIM + lane[None, :]
    tl.store(q_out, low.to(q_out_ptr.dtype.element_ty), mask=is_q[:, None] & lane_in)
    tl.store(q_out + half, high.to(q_out_ptr.dtype.element_ty), mask=is_q[:, None] & lane_in)
    k_cache = (
        k_cache_ptr + ((page * NUM_KV_HEADS + heads[:, None] - NUM_HEADS) * PAGE + offset) * HEAD_DIM + lane[None, :]
    )
    if FLOAT8:
        low = to_cache(low, key_inverse, FLOAT8)
        high = to_cache(high, key_inverse, FLOAT8)
        first = to_cache(first.to(tl.float32), value_inverse, FLOAT8)
        second = to_cache(second.to(tl.float32), value_inverse, FLOAT8)
    tl.store(k_cache, low.to(k_cache_ptr.dtype.element_ty), mask=is_k[:, None] & lane_in)
    tl.store(k_cache + half, high.to(k_cache_ptr.dtype.element_ty), mask=is_k[:, None] & lane_in)
    v_head = heads[:, None] - NUM_HEADS - NUM_KV_HEADS
    v_cache = v_cache_ptr + ((page * NUM_KV_HEADS + v_head) * PAGE + offset) * HEAD_DIM + lane[None, :]
    tl.store(v_cache, first.to(v_cache_ptr.dtype.element_ty), mask=is_v[:, None] & lane_in)
    tl.store(v_cache + half, second.to(v_cache_ptr.dtype.element_ty), mask=is_v[:, None] & lane_in)


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
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    dependent: bool = False,
    program_heads: int = _HEADS,
    num_warps: int = 4,
) -> torch.Tensor:
    """Rotate q and k, write k and v into their pages, return q [num_tokens, num_heads, head_dim].

    `qkv` [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]; caches [num_blocks, num_kv_heads, page, head_dim];
    `cos` and `sin` [max_position, head_dim / 2] float32, the half-split form; `slots` are block * page + offset. Caches in
    float8_e4m3fn take k over `key_scale` and v over `value_scale`, cut to what they hold. A program has
    `program_heads`, a power of two, of q, k and v together.
    """
    _, num_kv_heads, page, head_dim = k_cache.shape
    num_tokens = qkv.shape[0]
    q = torch.empty((num_tokens, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    _rope_cache_kernel[(num_tokens, triton.cdiv(num_heads + 2 * num_kv_heads, program_heads))](
        qkv, q, k_cache, v_cache, cos, sin, positions, slots, q_norm, k_norm, eps,
        1.0 / key_scale, 1.0 / value_scale,
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim,
        HALF_BLOCK=triton.next_power_of_2(head_dim // 2), PAGE=page, HAS_NORM=q_norm is not None, HEADS=program_heads,
        FLOAT8=is_float8(k_cache), num_warps=num_warps,
        **launch_options(dependent),
    )  # fmt: skip
    return q
