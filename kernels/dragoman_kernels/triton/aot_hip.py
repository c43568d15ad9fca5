"""Compiles the Triton kernels for AMD's architectures without a GPU and reads what they use. Nothing here has run on one.

What is launched is what `pal/planner_torch.py` plans: fixed attention launches, no dependent launch, no product of few rows,
no work list.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from triton.backends.compiler import GPUTarget

from dragoman_kernels.triton.aot import ModelShape, compiling_for, launch_common, launch_decode, launch_prefill
from dragoman_kernels.triton.launches import OTHER_LAUNCHES

# Threads in step, and registers a thread may have: of gfx942 half are accumulators (CDNA 3 and RDNA 3 ISA guides, "VGPRs").
HIP_TARGETS: Final = {"gfx942": (64, 512), "gfx1100": (32, 256)}
SHARED_LIMIT_BYTES: Final = 64 << 10  # of one work group, on both


@dataclass(frozen=True, slots=True)
class HipBuild:
    """One compiled kernel and what it uses."""

    kernel: str  # contract name
    target: str
    num_registers: int  # a thread, accumulators included
    num_spilled: int  # registers that went to memory
    shared_bytes: int  # a work group
    constants: str

    def problems(self) -> list[str]:
        """What keeps it from running, or from running well, each a sentence."""
        where = f"{self.kernel} on {self.target} ({self.constants})"
        limits = (
            ("registers a thread", self.num_registers, HIP_TARGETS[self.target][1]),
            ("registers spilled", self.num_spilled, 0),
            ("bytes of shared memory a work group", self.shared_bytes, SHARED_LIMIT_BYTES),
        )
        return [f"{where}: {used} {what}, {limit} allowed" for what, used, limit in limits if used > limit]


def compile_hip(shapes: Sequence[ModelShape], target: str, pages: Sequence[int]) -> list[HipBuild]:
    """Every kernel that serving `shapes` launches on `target`; equal binaries once."""
    group = HIP_TARGETS[target][0]
    decode, prefill = OTHER_LAUNCHES[group]
    with compiling_for(GPUTarget("hip", target, group)) as found:
        for shape in shapes:
            launch_common(shape)
            for page in pages:
                launch_decode(shape, page, decode)
                launch_prefill(shape, page, prefill)
    return [
        HipBuild(name, target, *resource_usage(compiled.asm["amdgcn"]), compiled.metadata.shared, constants)
        for name, compiled, constants in found.values()
    ]


def resource_usage(assembly: str) -> tuple[int, int]:
    """(registers a thread, registers spilled) from the metadata of a kernel's AMDGCN assembly."""
    return _number(assembly, "vgpr_count"), _number(assembly, "vgpr_spill_count")


def hip_table(builds: Sequence[HipBuild]) -> str:
    """One line a kernel and target, as aot.table."""
    lines = [
        f"{'kernel':22} {'target':8} {'builds':>6} {'registers':>9} {'spilled':>8} {'shared B':>9} {'limit B':>9}  verdict"
    ]
    for name, target in sorted({(build.kernel, build.target) for build in builds}):
        group = [build for build in builds if (build.kernel, build.target) == (name, target)]
        verdict = "broken" if any(build.problems() for build in group) else "kept, never run"
        lines.append(
            f"{name:22} {target:8} {len(group):>6} {max(b.num_registers for b in group):>9} "
            f"{max(b.num_spilled for b in group):>8} {max(b.shared_bytes for b in group):>9} {SHARED_LIMIT_BYTES:>9}  {verdict}"
        )
    return "\n".join(lines)


def _number(assembly: str, name: str) -> int:
    match = re.search(rf"^\s*\.{name}:\s*(\d+)", assembly, re.MULTILINE)
    if match is None:
        raise RuntimeError(f"the assembly says no {name}; this Triton writes another form than the one known here")
    return int(match[1])
