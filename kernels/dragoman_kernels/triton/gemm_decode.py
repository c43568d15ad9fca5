"""Matrix product of few rows: bound by the weights' bytes, so every program streams its own rows of the weights once.

The weights are the left operand: their 16 rows fill the tensor core's long side and a batch of 8 its short side. Each output is
summed by one program in one order, so a row's result depends on no other row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dragoman_kernels.triton.dependent import gdc_launch_dependents, gdc_wait, launch_options

_MAX_PREFETCH_BYTES = 4 << 20  # of a matrix


@triton.jit
def _prefetch_l2(pointer):
    """Ask for the cache line at each address; nothing waits for it."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointer.to(tl.uint64, bitcast=True)],
        dtype=tl.uint32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def _gemm_decode_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, num_rows, num_outputs,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr, HAS_BIAS: tl.constexpr, PREFETCH: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    rows = tl.arange(0, BLOCK_M)
    output_in = outputs < num_outputs
    row_in = rows < num_rows
    weights = weight_ptr + outputs.to(tl.int64)[:, None] * K
    if DEPENDENT:
        gdc_launch_dependents()
        # Weights are nobody's output: their first bytes come while the kernel before still runs.
        lines = tl.arange(0, PREFETCH)
        ahead = weights + (lines * 64)[None, :]
        _prefetch_l2(tl.where(output_in[:, None] & (lines * 64 < K)[None, :], ahead, weight_ptr))
        gdc_wait()
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=NUM_STAGES):
        at = start + inner
        if K % BLOCK_K == 0:
            weight = tl.load(weights + at[None, :], mask=output_in[:, None], other=0.0)
            x = tl.load(x_ptr + rows[None, :] * K + at[:, None], mask=row_in[None, :], other=0.0)
        else:
            k_in = at < K
            weight = tl.load(weights + at[None, :], mask=output_in[:, None] & k_in[None, :], other=0.0)
            x = tl.load(x_ptr + rows[None, :] * K + at[:, None], mask=row_in[None, :] & k_in[:, None], other=0.0)
        acc = tl.dot(weight, x, acc)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + outputs, mask=output_in, other=0.0).to(tl.float32)[:, None]
    target = out_ptr + rows.to(tl.int64)[None, :] * num_outputs + outputs[:, None]
    tl.store(target, acc.to(out_ptr.dtype.element_ty), mask=output_in[:, None] & row_in[None, :])


def gemm_decode(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    block_n: int = 16,
    block_k: int = 256,
    num_stages: int = 5,
    num_warps: int = 2,
    dependent: bool = False,
) -> torch.Tensor:
    """`x` [num_rows, k] times `weight` [n, k] transposed, plus `bias` [n]; returns [num_rows, n]. At most GEMM_MAX_ROWS rows.

    With `dependent` the launch overlaps the end of the kernel before, and each program first asks for the first lines of
    its weight rows: few, for they come out of the bandwidth and the L2 cache of the kernel that still runs.
    """
    num_rows, k = x.shape
    num_outputs = weight.shape[0]
    out = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device)
    lines = min(16, _MAX_PREFETCH_BYTES // (128 * num_outputs))
    dependent = dependent and lines > 0  # a matrix this tall has nothing to gain from an early start
    block_m = max(8, triton.next_power_of_2(num_rows))
    _gemm_decode_kernel[(triton.cdiv(num_outputs, block_n),)](
        x, weight, bias, out, num_rows, num_outputs,
        K=k, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=min(block_k, triton.next_power_of_2(k)),
        NUM_STAGES=num_stages, HAS_BIAS=bias is not None, PREFETCH=1 << (max(lines, 1).bit_length() - 1),
        num_warps=num_warps, **launch_options(dependent),
    )  # fmt: skip
    return out
