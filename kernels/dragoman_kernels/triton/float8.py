"""K and V in eight bits: float8_e4m3fn, one scale for the keys of a layer and one for its values.

A stored number times its scale is the number that was meant. Attention converts to float16, which one instruction does on
compute capability 8.9 and later, where bfloat16 takes several; both have more bits than what was stored.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

MAX_FLOAT8 = 448.0  # of float8_e4m3fn, which has no infinity: larger numbers are cut to it


@triton.jit
def to_cache(x, inverse_scale, FLOAT8: tl.constexpr):
    """What is stored of float32 `x`: itself, or scaled and cut to what eight bits hold. NaN stays."""
    if FLOAT8:
        x = tl.clamp(x * inverse_scale, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return x


def is_float8(cache: torch.Tensor) -> bool:
    """Whether K or V are kept in eight bits."""
    return cache.dtype == torch.float8_e4m3fn


def compute_type(q: torch.Tensor, cache: torch.Tensor) -> Any:
    """What the products of attention are computed in."""
    return tl.float16 if is_float8(cache) else _TYPES[q.dtype]


_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
