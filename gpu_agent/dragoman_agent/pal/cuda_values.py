"""Which driver attributes become which profile values, and what follows from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from dragoman_agent.pal.profile import Value

_TRANSFERS_A_CLOCK = 2  # the driver gives the clock of a bus that transfers at both edges
# First compute capability whose tensor cores multiply the type (CUDA C++ Programming Guide, "Tensor Cores").
_DTYPES = (("bfloat16", (8, 0)), ("float16", (7, 0)), ("float8", (8, 9)), ("int8", (7, 2)))
_DEPENDENT_LAUNCH = (9, 0)


@dataclass(frozen=True, slots=True)
class Attribute:
    """One driver attribute. `zero` says what 0 means: a number, or that the driver does not know."""

    name: str
    attribute: str
    unit: str = ""
    factor: int = 1
    kind: Literal["number", "flag"] = "number"
    zero: Literal["number", "unknown"] = "number"

    def value(self, raw: int | None) -> Value | None:
        """The profile value; None where there is none."""
        if raw is None or (raw == 0 and self.zero == "unknown"):
            return None
        if self.kind == "flag":
            return Value(raw != 0, "", "reported")
        return Value(raw * self.factor, self.unit, "reported")


def _flag(name: str, attribute: str) -> Attribute:
    return Attribute(name, attribute, kind="flag")


def _size(name: str, attribute: str, zero: Literal["number", "unknown"] = "unknown") -> Attribute:
    return Attribute(name, attribute, "bytes", zero=zero)


def _count(name: str, attribute: str) -> Attribute:
    return Attribute(name, attribute, zero="unknown")


ATTRIBUTES = (
    _count("compute.multiprocessors", "MULTIPROCESSOR_COUNT"),
    Attribute("compute.max_clock", "CLOCK_RATE", "Hz", 1000, zero="unknown"),
    _count("compute.warp_size", "WARP_SIZE"),
    _count("compute.max_threads_per_block", "MAX_THREADS_PER_BLOCK"),
    _count("compute.max_threads_per_multiprocessor", "MAX_THREADS_PER_MULTIPROCESSOR"),
    _count("compute.max_blocks_per_multiprocessor", "MAX_BLOCKS_PER_MULTIPROCESSOR"),
    _count("compute.registers_per_multiprocessor", "MAX_REGISTERS_PER_MULTIPROCESSOR"),
    _count("compute.registers_per_block", "MAX_REGISTERS_PER_BLOCK"),
    Attribute("compute.async_engines", "ASYNC_ENGINE_COUNT"),
    _flag("compute.cooperative_launch", "COOPERATIVE_LAUNCH"),
    _flag("compute.cluster_launch", "CLUSTER_LAUNCH"),
    _flag("compute.tensor_map", "TENSOR_MAP_ACCESS_SUPPORTED"),
    _flag("compute.concurrent_kernels", "CONCURRENT_KERNELS"),
    _flag("compute.preemption", "COMPUTE_PREEMPTION_SUPPORTED"),
    _flag("compute.stream_priorities", "STREAM_PRIORITIES_SUPPORTED"),
    _flag("compute.kernel_timeout", "KERNEL_EXEC_TIMEOUT"),
    _flag("compute.multicast", "MULTICAST_SUPPORTED"),
    _size("memory.l2_size", "L2_CACHE_SIZE"),
    _size("memory.l2_persisting_max", "MAX_PERSISTING_L2_CACHE_SIZE", "number"),
    _size("memory.access_window_max", "MAX_ACCESS_POLICY_WINDOW_SIZE", "number"),
    _size("memory.shared_per_block", "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
    _size("memory.shared_per_block_default", "MAX_SHARED_MEMORY_PER_BLOCK"),
    _size("memory.shared_per_multiprocessor", "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR"),
    _size("memory.shared_reserved_per_block", "RESERVED_SHARED_MEMORY_PER_BLOCK", "number"),
    _size("memory.constant_size", "TOTAL_CONSTANT_MEMORY"),
    Attribute("memory.bus_width", "GLOBAL_MEMORY_BUS_WIDTH", "bits", zero="unknown"),
    Attribute("memory.max_clock", "MEMORY_CLOCK_RATE", "Hz", 1000, zero="unknown"),
    _flag("memory.pools", "MEMORY_POOLS_SUPPORTED"),
    _flag("memory.virtual_memory", "VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED"),
    _flag("memory.error_correction", "ECC_ENABLED"),
    _flag("memory.managed", "MANAGED_MEMORY"),
    _flag("memory.pageable_access", "PAGEABLE_MEMORY_ACCESS"),
    _flag("link.host_registration", "HOST_REGISTER_SUPPORTED"),
    _flag("link.mapped_host_memory", "CAN_MAP_HOST_MEMORY"),
    _flag("link.direct_remote_access", "GPU_DIRECT_RDMA_SUPPORTED"),
)


def derived_values(values: Mapping[str, Value]) -> dict[str, Value]:
    """What follows from the reported values: tensor dtypes, dependent launch, the memory bus' own bandwidth."""
    derived = {}
    capability = capability_of(values)
    if capability is not None:
        dtypes = " ".join(name for name, first in _DTYPES if capability >= first)
        derived["compute.dtypes"] = Value(dtypes, "", "derived", note="on tensor cores, by compute capability")
        derived["compute.dependent_launch"] = Value(
            capability >= _DEPENDENT_LAUNCH, "", "derived", note="compute capability 9.0 and newer"
        )
    clock, width = values.get("memory.max_clock"), values.get("memory.bus_width")
    if clock is not None and width is not None:
        rate = float(str(clock.value)) * float(str(width.value)) / 8 * _TRANSFERS_A_CLOCK
        derived["memory.bus_bandwidth"] = Value(rate, "bytes/s", "derived", note="2 x clock x width, never reached")
    return derived


def capability_of(values: Mapping[str, Value]) -> tuple[int, int] | None:
    """The compute capability as two numbers; None where it is not among the values."""
    value = values.get("compute.capability")
    if value is None:
        return None
    major, _, minor = str(value.value).partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None
