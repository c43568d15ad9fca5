"""What a kernel promises about its cost, so that a planner can predict it before it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

Bound = Literal["latency", "bandwidth", "compute"]
Shape = Mapping[str, int]
BOUNDS: tuple[Bound, ...] = ("latency", "bandwidth", "compute")


class ContractError(ValueError):
    """A kernel has no contract, or one that cannot be used. The message says which and what is missing."""


# Shared memory one block may ask for by compute capability (CUDA C++ Programming Guide, technical specifications).
SHARED_LIMIT_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}


@dataclass(frozen=True, slots=True)
class ResourceBudget:
    """What one compiled GPU kernel may use, whatever the model: checked ahead of time for every architecture.

    Shared memory is bounded by the architecture (`SHARED_LIMIT_BYTES`) and, where it is less, by `max_shared_bytes`.
    """

    max_num_registers: int  # a thread
    max_spill_bytes: int = 0  # a thread, in local memory
    max_shared_bytes: int | None = None  # a block

    def shared_limit(self, capability: int) -> int:
        """Bytes a block may use on compute capability `capability` (80, 86, ...). Raises ContractError for another."""
        if capability not in SHARED_LIMIT_BYTES:
            known = ", ".join(map(str, SHARED_LIMIT_BYTES))
            raise ContractError(f"no shared memory limit is known for compute capability {capability}; known: {known}")
        limit = SHARED_LIMIT_BYTES[capability]
        return limit if self.max_shared_bytes is None else min(limit, self.max_shared_bytes)


@dataclass(frozen=True, slots=True)
class KernelContract:
    """The cost of one kernel as functions of its shapes.

    `dimensions` names the keys `bytes_moved` and `flops` read. `phases` is how many dependent steps a call has, each
    paying the device's latency once: t = max(bytes / bandwidth, flops / rate) + phases * latency.
    """

    bound: Bound
    dimensions: tuple[str, ...]
    bytes_moved: Callable[[Shape], int]
    flops: Callable[[Shape], int]
    phases: Callable[[Shape], int]
    max_num_threads: int | None = None  # None: as many as there are items to share
    resources: ResourceBudget | None = None  # a GPU kernel's; a CPU kernel has none

    def __post_init__(self) -> None:
        if self.bound not in BOUNDS:
            raise ContractError(f"bound is {self.bound!r}; use one of {', '.join(BOUNDS)}")
        if not self.dimensions:
            raise ContractError("dimensions is empty; name the shape keys that the cost depends on")

    def cost(self, shape: Shape) -> Cost:
        """Evaluate the contract. Raises ContractError naming the dimensions `shape` lacks."""
        missing = [name for name in self.dimensions if name not in shape]
        if missing:
            raise ContractError(f"shape lacks {', '.join(missing)}; it has {', '.join(sorted(shape)) or 'nothing'}")
        return Cost(self.bytes_moved(shape), self.flops(shape), self.phases(shape))


@dataclass(frozen=True, slots=True)
class Cost:
    """Bytes read and written, floating or integer operations (a multiply-add is two), dependent phases."""

    num_bytes: int
    num_flops: int
    num_phases: int

    def seconds(self, *, bytes_per_second: float, flops_per_second: float, phase_seconds: float) -> float:
        """Predicted time on a device with these measured rates (the step model of the design)."""
        return (
            max(self.num_bytes / bytes_per_second, self.num_flops / flops_per_second) + self.num_phases * phase_seconds
        )
