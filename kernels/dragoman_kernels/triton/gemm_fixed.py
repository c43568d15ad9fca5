"""Matrix product whose every output is summed in one order by one tile shape, whatever the number of rows.

One binary a matrix serves a decode step of one row and a chunk of thousands: a row's bits depend on the row and the matrix
alone. Which tile a matrix has is the plan's business; it must not depend on the rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ROW_TILES_A_GROUP = 8  # neighbours in launch order that share a tile of the weights while it is in L2


# The number of rows must not make another binary. Rows are whole numbers of 16 bytes, so every operand is aligned alike.
@triton.jit(do_not_specialize=["num_rows"])
def _gemm_fixed_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, num_rows, num_outputs,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr, NUM_STAGES: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    num_row_tiles = tl.cdiv(num_rows, BLOCK_M)
    width = GROUP * tl.cdiv(num_outputs, BLOCK_N)
    first = program // width * GROUP
    size = tl.minimum(num_row_tiles - first, GROUP)
    row_tile = first + program % width % size
    outputs = program % width // size * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    inner = tl.arange(0, BLOCK_K)
    row_in = rows < num_rows
    output_in = outputs < num_outputs
    x_rows = x_ptr + rows.to(tl.int64)[:, None] * K
    weight_rows = weight_ptr + outputs.to(tl.int64)[:, None] * K
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=NUM_STAGES):
        at = start + inner
        if K % BLOCK_K == 0:
            x = tl.load(x_rows + at[None, :], mask=row_in[:, None], other=0.0)
            weight = tl.load(weight_rows + at[None, :], mask=output_in[:, None], other=0.0)
        else:
            k_in = at < K
            x = tl.load(x_rows + at[None, :], mask=row_in[:, None] & k_in[None, :], other=0.0)
            weight = tl.load(weight_rows + at[None, :], mask=output_in[:, None] & k_in[None, :], other=0.0)
        acc = tl.dot(x, tl.trans(weight), acc)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + outputs, mask=output_in, other=0.0).to(tl.float32)[None, :]
    target = out_ptr + rows.to(tl.int64)[:, None] * num_outputs + outputs[None, :]
    tl.store(target, acc.to(out_ptr.dtype.element_ty), mask=row_in[:, None] & output_in[None, :])


def gemm_fixed(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    block_m: int = 64,
    block_n: int = 64,
    block_k: int = 64,
    num_stages: int = 3,
    num_warps: int = 4,
) -> torch.Tensor:
    """`x` [num_rows, k] times `weight` [n, k] transposed, plus `bias` [n]; returns [num_rows, n]. Any number of rows.

    Equal launches give a row equal bits whatever rows are beside it and wherever in `x` it is.
    """
    num_rows, k = x.shape
    num_outputs = weight.shape[0]
    out = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return out
    grid = (triton.cdiv(num_rows, block_m) * triton.cdiv(num_outputs, block_n),)
    _gemm_fixed_kernel[grid](
        x.contiguous(), weight, bias, out, num_rows, num_outputs,
        K=k, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, GROUP=_ROW_TILES_A_GROUP,
        NUM_STAGES=num_stages, HAS_BIAS=bias is not None, num_warps=num_warps, enable_fp_fusion=False,
    )  # fmt: skip
    return out
