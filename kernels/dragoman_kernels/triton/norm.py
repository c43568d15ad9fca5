"""RMS norm, with the residual addition before it fused in."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dragoman_kernels.triton.dependent import begin, launch_options


@triton.jit
def _rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, width, eps,
    HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    begin(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    x = tl.load(x_ptr + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + row * width + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(residual_ptr + row * width + columns, x.to(residual_ptr.dtype.element_ty), mask=inside)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / width + eps)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + columns, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    *,
    dependent: bool = False,
    num_warps: int | None = None,
) -> torch.Tensor:
    """RMS norm of `x` [num_tokens, width]; with `residual`, of x + residual, which is written back into `residual`.

    Mean and scale are taken in float32. `x`, `weight` and `residual` are contiguous.
    """
    num_tokens, width = x.shape
    out = torch.empty_like(x)
    block = triton.next_power_of_2(width)
    _rms_norm_kernel[(num_tokens,)](
        x, residual, weight, out, width, eps,
        HAS_RESIDUAL=residual is not None, BLOCK=block, num_warps=num_warps or min(max(block // 512, 1), 8),
        **launch_options(dependent),
    )  # fmt: skip
    return out
