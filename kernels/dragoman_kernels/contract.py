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
