"""SiLU of the gate times the up projection."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dragoman_kernels.triton.dependent import begin, launch_options


@triton.jit
def _silu_mul_kernel(gate_up_ptr, out_ptr, width, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    begin(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(gate_up_ptr + row * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * width + width + columns, mask=inside, other=0.0)
    # Rounded to the output type between the two, as the reference does.
    silu = (gate / (1.0 + tl.exp(-gate))).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * width + columns, silu * up, mask=inside)


def silu_mul(gate_up: torch.Tensor, *, dependent: bool = False, block: int = 1024, num_warps: int = 4) -> torch.Tensor:
    """silu(gate) * up of `gate_up` [num_tokens, 2 * width], gate first; returns [num_tokens, width]."""
    num_tokens, double = gate_up.shape
    out = torch.empty((num_tokens, double // 2), dtype=gate_up.dtype, device=gate_up.device)
    _silu_mul_kernel[(num_tokens, triton.cdiv(double // 2, block))](
        gate_up, out, double // 2, BLOCK=block, num_warps=num_warps, **launch_options(dependent)
    )
    return out
