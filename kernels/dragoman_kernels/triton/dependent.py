"""Programmatic dependent launch: a kernel may start while the one before it ends, and waits before it reads what that one wrote.

Every kernel of a chain must wait, even one that reads nothing of its predecessor: completion is only passed on by those
that waited (CUDA C++ Programming Guide, programmatic dependent launch).
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # a Triton without NVIDIA's backend, where no plan asks for DEPENDENT
    gdc_launch_dependents = gdc_wait = None

__all__ = ["begin", "gdc_launch_dependents", "gdc_wait", "launch_options"]


@triton.jit
def begin(DEPENDENT: tl.constexpr):
    """Let the next kernel start and wait for the one before. Call it before the first load of what that one wrote."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()


def launch_options(dependent: bool) -> dict[str, Any]:
    """Arguments of a launch whose kernel calls `begin(DEPENDENT=dependent)`."""
    return {"DEPENDENT": True, "launch_pdl": True} if dependent else {"DEPENDENT": False}
