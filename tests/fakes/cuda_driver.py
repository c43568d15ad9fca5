"""A stand-in for the module `cuda.bindings.driver` that plays a machine's cards; statuses and attributes carry CUDA's own names."""

from __future__ import annotations

import enum
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

GIB = 1 << 30


class CUresult(enum.IntEnum):
    """The statuses that the tests play, with CUDA's numbers."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_STUB_LIBRARY = 34
    CUDA_ERROR_DEVICE_UNAVAILABLE = 46
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_INVALID_DEVICE = 101
    CUDA_ERROR_ECC_UNCORRECTABLE = 214
    CUDA_ERROR_OPERATING_SYSTEM = 304
    CUDA_ERROR_SYSTEM_NOT_READY = 802
    CUDA_ERROR_SYSTEM_DRIVER_MISMATCH = 803
    CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE = 804
    CUDA_ERROR_MPS_CONNECTION_FAILED = 805
    CUDA_ERROR_UNKNOWN = 999


# What an H200 answers (cuDeviceGetAttribute, driver 580); a card of another kind replaces what differs.
H200_ATTRIBUTES: Mapping[str, int] = {
    "COMPUTE_CAPABILITY_MAJOR": 9,
    "COMPUTE_CAPABILITY_MINOR": 0,
    "MULTIPROCESSOR_COUNT": 132,
    "CLOCK_RATE": 1_980_000,
    "WARP_SIZE": 32,
    "MAX_THREADS_PER_BLOCK": 1024,
    "MAX_THREADS_PER_MULTIPROCESSOR": 2048,
    "MAX_BLOCKS_PER_MULTIPROCESSOR": 32,
    "MAX_REGISTERS_PER_MULTIPROCESSOR": 65536,
    "MAX_REGISTERS_PER_BLOCK": 65536,
    "ASYNC_ENGINE_COUNT": 3,
    "COOPERATIVE_LAUNCH": 1,
    "CLUSTER_LAUNCH": 1,
    "TENSOR_MAP_ACCESS_SUPPORTED": 1,
    "CONCURRENT_KERNELS": 1,
    "COMPUTE_PREEMPTION_SUPPORTED": 1,
    "STREAM_PRIORITIES_SUPPORTED": 1,
    "KERNEL_EXEC_TIMEOUT": 0,
    "MULTICAST_SUPPORTED": 0,
    "L2_CACHE_SIZE": 62_914_560,
    "MAX_PERSISTING_L2_CACHE_SIZE": 39_321_600,
    "MAX_ACCESS_POLICY_WINDOW_SIZE": 134_217_728,
    "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 232_448,
    "MAX_SHARED_MEMORY_PER_BLOCK": 49_152,
    "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": 233_472,
    "RESERVED_SHARED_MEMORY_PER_BLOCK": 1_024,
    "TOTAL_CONSTANT_MEMORY": 65_536,
    "GLOBAL_MEMORY_BUS_WIDTH": 6016,
    "MEMORY_CLOCK_RATE": 3_201_000,
    "MEMORY_POOLS_SUPPORTED": 1,
    "VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED": 1,
    "ECC_ENABLED": 1,
    "MANAGED_MEMORY": 1,
    "PAGEABLE_MEMORY_ACCESS": 0,
    "HOST_REGISTER_SUPPORTED": 1,
    "CAN_MAP_HOST_MEMORY": 1,
    "GPU_DIRECT_RDMA_SUPPORTED": 1,
    "INTEGRATED": 0,
    "COMPUTE_MODE": 0,
    "MPS_ENABLED": 0,
    "PCI_DOMAIN_ID": 0,
    "PCI_BUS_ID": 1,
    "PCI_DEVICE_ID": 0,
}
CUdevice_attribute = enum.IntEnum(  # type: ignore[misc]
    "CUdevice_attribute", {f"CU_DEVICE_ATTRIBUTE_{name}": number for number, name in enumerate(H200_ATTRIBUTES, 1)}
)


@dataclass(frozen=True)
class Card:
    """One card, to the driver and to NVML."""

    name: str = "NVIDIA H200"
    uuid: str = "00112233-4455-6677-8899-aabbccddeeff"
    total: int = 150_109_880_320
    free: int = 149_000_000_000
    attributes: Mapping[str, int] = field(default_factory=lambda: H200_ATTRIBUTES)
    link: tuple[int, int, int, int] = (5, 5, 16, 16)  # generation and its maximum, width and its maximum
    holders: tuple[tuple[int, int | None], ...] = ()  # pid, bytes
    failing: Mapping[str, CUresult] = field(default_factory=dict)  # driver call or attribute -> its answer
    refused: Mapping[str, int] = field(default_factory=dict)  # NVML function -> NVML error code
    slice_of: str = ""  # UUID of the card, where this is a MIG instance

    def but(self, **changes: Any) -> Card:
        """Another card: attributes in capitals, fields in small letters."""
        attributes = {name: value for name, value in changes.items() if name.isupper()}
        fields = {name: value for name, value in changes.items() if not name.isupper()}
        return replace(self, attributes={**self.attributes, **attributes}, **fields)

    @property
    def address(self) -> tuple[int, int, int]:
        """Domain, bus and device."""
        bus, device = (self.attributes[f"PCI_{part}_ID"] for part in ("BUS", "DEVICE"))
        return self.attributes["PCI_DOMAIN_ID"], bus, device


H200 = Card()
RTX_4060_LAPTOP = Card(
    "NVIDIA GeForce RTX 4060 Laptop GPU",
    "4060aaaa-0000-4000-8000-000000000001",
    8 * GIB,
    7 * GIB,
    link=(1, 4, 8, 8),
).but(
    COMPUTE_CAPABILITY_MAJOR=8,
    COMPUTE_CAPABILITY_MINOR=9,
    MULTIPROCESSOR_COUNT=24,
    CLOCK_RATE=2_370_000,
    MAX_THREADS_PER_MULTIPROCESSOR=1536,
    MAX_BLOCKS_PER_MULTIPROCESSOR=24,
    CLUSTER_LAUNCH=0,
    TENSOR_MAP_ACCESS_SUPPORTED=0,
    L2_CACHE_SIZE=32 << 20,
    MAX_SHARED_MEMORY_PER_BLOCK_OPTIN=101_376,
    MAX_SHARED_MEMORY_PER_MULTIPROCESSOR=102_400,
    GLOBAL_MEMORY_BUS_WIDTH=128,
    MEMORY_CLOCK_RATE=8_001_000,
    ECC_ENABLED=0,
)
# An older card of another generation: less memory bandwidth, more memory.
TESLA_T4 = Card("Tesla T4", "74740000-0000-4000-8000-000000000002", 15 * GIB, 15 * GIB, link=(3, 3, 16, 16)).but(
    COMPUTE_CAPABILITY_MAJOR=7,
    COMPUTE_CAPABILITY_MINOR=5,
    MULTIPROCESSOR_COUNT=40,
    CLUSTER_LAUNCH=0,
    GLOBAL_MEMORY_BUS_WIDTH=256,
    MEMORY_CLOCK_RATE=5_001_000,
    PCI_BUS_ID=3,
)


class FakeDriver:
    """The module's functions that our code calls; each returns (status, results...) as the binding does."""

    CUresult = CUresult
    CUdevice_attribute = CUdevice_attribute

    def __init__(
        self,
        *cards: Card,
        version: int = 13000,
        init: CUresult = CUresult.CUDA_SUCCESS,
        has_library: bool = True,
        lacks: tuple[str, ...] = (),
    ) -> None:
        self._cards = cards
        self._version = version
        self._init = init
        self._has_library = has_library
        self._lacks = lacks
        self.calls: list[str] = []

    def _answer(self, call: str, index: int | None, *results: Any) -> tuple[Any, ...]:
        self.calls.append(call)
        if call in self._lacks:
            raise RuntimeError(f'Function "{call}" not found')
        status = CUresult.CUDA_SUCCESS if index is None else self._cards[index].failing.get(call, CUresult.CUDA_SUCCESS)
        return (status, *results) if status == CUresult.CUDA_SUCCESS else (status, *(None for _ in results))

    def cuInit(self, flags: int) -> tuple[Any, ...]:
        if not self._has_library:
            raise RuntimeError('"cuda" is an NVIDIA driver library and can only be found via system search.')
        self.calls.append("cuInit")
        return (self._init,)

    def cuGetErrorName(self, status: CUresult) -> tuple[Any, ...]:
        return CUresult.CUDA_SUCCESS, CUresult(status).name.encode()

    def cuDeviceGetCount(self) -> tuple[Any, ...]:
        return self._answer("cuDeviceGetCount", None, len(self._cards))

    def cuDeviceGet(self, index: int) -> tuple[Any, ...]:
        return self._answer("cuDeviceGet", index, index)

    def cuDeviceGetName(self, length: int, device: int) -> tuple[Any, ...]:
        return self._answer("cuDeviceGetName", device, self._cards[device].name.encode().ljust(length, b"\0"))

    def cuDeviceTotalMem(self, device: int) -> tuple[Any, ...]:
        return self._answer("cuDeviceTotalMem", device, self._cards[device].total)

    def cuDeviceGetUuid(self, device: int) -> tuple[Any, ...]:
        return self._answer("cuDeviceGetUuid", device, SimpleNamespace(bytes=uuid.UUID(self._cards[device].uuid).bytes))

    def cuDriverGetVersion(self) -> tuple[Any, ...]:
        return self._answer("cuDriverGetVersion", None, self._version)

    def cuDeviceGetAttribute(self, attribute: Any, device: int) -> tuple[Any, ...]:
        name = CUdevice_attribute(attribute).name.removeprefix("CU_DEVICE_ATTRIBUTE_")
        card = self._cards[device]
        if name in card.failing:
            return card.failing[name], 0
        return self._answer("cuDeviceGetAttribute", device, card.attributes[name])
