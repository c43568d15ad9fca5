"""A CUDA driver that runs no kernel and keeps time: what each kernel of the probe costs is a few constants.

Replaces `cuda.bindings.driver` for one session, so that the probe's steps run as on a card and must find the constants again.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

POINTER, U32, U64 = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "fill": (POINTER, U64, U32),
    **{f"read_{depth}": (POINTER, U64, U32, POINTER) for depth in (1, 2, 4, 8)},
    **{f"copy_{depth}": (POINTER, POINTER, U64, U32) for depth in (1, 2, 4, 8)},
    "reread": (POINTER, U64, U32, POINTER),
    "make_ring": (POINTER, U64, U64),
    "chase": (POINTER, U32, POINTER),
    "empty": (),
    "empty_dependent": (),
    "hold": (POINTER, U64),
    "spin": (U64,),
    "barrier_counter": (POINTER, U32, POINTER, POINTER),
    "barrier_flag": (POINTER, U32, POINTER, POINTER),
    **{f"exchange_{width}": (POINTER, U32, U32, POINTER) for width in (32, 64, 128)},
    **{f"random_{name}": (POINTER, U64, U32) for name in ("bfloat16", "float16", "float8", "int8")},
}


@dataclass
class Card:
    """The constants of a simulated card: seconds, bytes, bytes/s."""

    capability: tuple[int, int] = (9, 0)
    multiprocessors: int = 132
    memory: int = 24 << 30
    l2: int = 48 << 20
    l2_knee: int = 30 << 20
    read: float = 4.6e12
    copy: float = 4.3e12
    driver_copy: float = 4.2e12
    l2_rate: float = 7e12
    phase: float = 2.1e-6
    node: float = 0.55e-6
    dependent_node: float = 0.475e-6
    launch: float = 1.2e-6
    barrier: float = 0.94e-6
    flag_barrier: float = 1.1e-6
    record: float = 0.3e-6
    wait: float = 1.5e-6
    latency: float = 650e-9
    l2_latency: float = 260e-9
    far_latency: float = 650e-9  # of addresses in the upper half of what is allocated
    link: float = 55e9
    exchanges: float = 2e12
    bad_sum: bool = False
    early_barrier: bool = False
    fail: str = ""  # a kernel that breaks the context


class Status(IntEnum):
    SUCCESS = 0
    OUT_OF_MEMORY = 2
    ILLEGAL_ADDRESS = 700


@dataclass
class Stream:
    number: int
    clock: float = 0.0
    capturing: list[Callable[[Stream, bool], None]] | None = None

    def __int__(self) -> int:
        return self.number


@dataclass
class Event:
    time: float = 0.0


@dataclass
class Kernel:
    name: str

    def __int__(self) -> int:
        return id(self)


@dataclass
class SimulatedGpu:
    """Stands in for the module `cuda.bindings.driver`. `launched` names every kernel that ran."""

    card: Card = field(default_factory=Card)
    launched: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._kernels: dict[int, Kernel] = {}
        self._host: list[Any] = []
        self._words: dict[int, list[int]] = {}
        self._allocations: dict[int, int] = {}
        self._rings: dict[int, tuple[int, int]] = {}
        self._next = 1 << 40
        self._num_streams = 0
        self.streams: dict[int, Stream] = {}  # by number, which is a stream's address
        self._filled = 0
        self._broken = False
        self.CUlaunchConfig = SimpleNamespace
        self.CUlaunchAttribute = lambda: SimpleNamespace(id=None, value=SimpleNamespace())
        self.CUlaunchAttributeID = SimpleNamespace(
            CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION="dependent",
            CU_LAUNCH_ATTRIBUTE_COOPERATIVE="cooperative",
        )
        self.CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL=1)
        self.CUfunction = lambda number: self._kernels[number]
        self.CUdevice_attribute = SimpleNamespace(
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR=self.card.capability[0],
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR=self.card.capability[1],
            CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT=self.card.multiprocessors,
            CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE=self.card.l2,
            CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH=1,
            CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR=2048,
            CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID=0,
            CU_DEVICE_ATTRIBUTE_PCI_BUS_ID=6,
            CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID=0,
        )

    # Device, context, memory.

    def cuInit(self, flags: int) -> Any:
        return (Status.SUCCESS,)

    def cuDeviceGet(self, index: int) -> Any:
        return Status.SUCCESS, index

    def cuDevicePrimaryCtxRetain(self, device: Any) -> Any:
        return Status.SUCCESS, 1

    def cuDevicePrimaryCtxRelease(self, device: Any) -> Any:
        return (Status.SUCCESS,)

    def cuCtxSetCurrent(self, context: Any) -> Any:
        return (Status.SUCCESS,)

    def cuDeviceGetAttribute(self, key: Any, device: Any) -> Any:
        return Status.SUCCESS, key

    def cuGetErrorName(self, status: Any) -> Any:
        return Status.SUCCESS, f"CUDA_ERROR_{Status(status).name}".encode()

    def cuMemGetInfo(self) -> Any:
        return Status.SUCCESS, self.card.memory - sum(self._allocations.values()), self.card.memory

    def cuMemAlloc(self, size: int) -> Any:
        if size > self.card.memory - sum(self._allocations.values()):
            return Status.OUT_OF_MEMORY, 0
        address, self._next = self._next, self._next + size + 256
        self._allocations[address] = size
        return Status.SUCCESS, address

    def cuMemFree(self, address: int) -> Any:
        del self._allocations[address]
        return (Status.SUCCESS,)

    def cuMemHostAlloc(self, size: int, flags: int) -> Any:
        buffer = (ctypes.c_char * size)() if size <= 4096 else None
        self._host.append(buffer)
        return Status.SUCCESS, ctypes.addressof(buffer) if buffer else 1 << 50

    def cuMemFreeHost(self, address: int) -> Any:
        return (Status.SUCCESS,)

    def cuMemHostGetDevicePointer(self, address: int, flags: int) -> Any:
        return Status.SUCCESS, address

    def cuMemsetD32Async(self, address: int, value: int, count: int, stream: Stream) -> Any:
        self._words[address] = [value]
        return (self._status(),)

    def cuMemcpyDtoH(self, host: int, address: int, size: int) -> Any:
        if size <= 1 << 22:
            words = (self._words.get(address, []) + [0] * (size // 4))[: size // 4]
            ctypes.memmove(host, (ctypes.c_uint32 * len(words))(*words), size)
        return (self._status(),)

    def cuMemcpyHtoD(self, address: int, host: int, size: int) -> Any:
        return (self._status(),)

    def cuMemcpyDtoDAsync(self, target: int, source: int, size: int, stream: Stream) -> Any:
        stream.clock += self.card.launch + 2 * size / self.card.driver_copy
        return (self._status(),)

    def cuMemcpyHtoDAsync(self, address: int, host: int, size: int, stream: Stream) -> Any:
        stream.clock += size / self.card.link
        return (self._status(),)

    def cuMemcpyDtoHAsync(self, host: int, address: int, size: int, stream: Stream) -> Any:
        stream.clock += size / self.card.link
        return (self._status(),)

    # Streams, events, graphs.

    def cuStreamCreate(self, flags: int) -> Any:
        self._num_streams += 1
        self.streams[self._num_streams] = Stream(self._num_streams)
        return Status.SUCCESS, self.streams[self._num_streams]

    def cuStreamSynchronize(self, stream: Stream) -> Any:
        return (self._status(),)

    def cuEventCreate(self, flags: int) -> Any:
        return Status.SUCCESS, Event()

    def cuEventRecord(self, event: Event, stream: Stream) -> Any:
        stream.clock += self.card.record
        event.time = stream.clock
        return (self._status(),)

    def cuStreamWaitEvent(self, stream: Stream, event: Event, flags: int) -> Any:
        stream.clock = max(stream.clock, event.time + self.card.wait - self.card.record)
        return (self._status(),)

    def cuEventSynchronize(self, event: Event) -> Any:
        return (self._status(),)

    def cuEventElapsedTime(self, begin: Event, end: Event) -> Any:
        return Status.SUCCESS, (end.time - begin.time) * 1e3

    def cuStreamBeginCapture(self, stream: Stream, mode: Any) -> Any:
        stream.capturing = []
        return (Status.SUCCESS,)

    def cuStreamEndCapture(self, stream: Stream) -> Any:
        graph, stream.capturing = stream.capturing, None
        return Status.SUCCESS, graph

    def cuGraphInstantiate(self, graph: Any, flags: int) -> Any:
        return Status.SUCCESS, graph

    def cuGraphUpload(self, graph: Any, stream: Stream) -> Any:
        return (Status.SUCCESS,)

    def cuGraphDestroy(self, graph: Any) -> Any:
        return (Status.SUCCESS,)

    def cuGraphExecDestroy(self, graph: Any) -> Any:
        return (Status.SUCCESS,)

    def cuGraphLaunch(self, graph: Any, stream: Stream) -> Any:
        stream.clock += 6e-6
        for node in graph:
            node(stream, True)
        return (self._status(),)

    # Kernels.

    def cuLibraryLoadData(self, code: bytes, *options: Any) -> Any:
        return Status.SUCCESS, code

    def cuLibraryGetKernel(self, library: bytes, name: bytes) -> Any:
        assert name in library, name  # the binary really has it
        kernel = Kernel(name.decode())
        self._kernels[int(kernel)] = kernel
        return Status.SUCCESS, kernel

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(self, kernel: Kernel, block: int, shared: int) -> Any:
        return Status.SUCCESS, min(32, 2048 // block)

    def cuLaunchKernel(self, kernel: Kernel, *rest: Any) -> Any:
        grid, _, _, block, _, _, _, stream, parameters, _ = rest
        return self._launch(kernel, grid, block, stream, parameters, dependent=False)

    def cuLaunchKernelEx(self, config: Any, kernel: Kernel, parameters: int, extra: int) -> Any:
        kinds = [attribute.id for attribute in config.attrs]
        assert config.numAttrs == len(kinds)
        if "cooperative" in kinds:
            assert config.gridDimX <= self.card.multiprocessors * (2048 // config.blockDimX)
        return self._launch(
            kernel, config.gridDimX, config.blockDimX, config.hStream, parameters, dependent="dependent" in kinds
        )

    def _launch(
        self, kernel: Kernel, grid: int, block: int, stream: Stream, parameters: int, *, dependent: bool
    ) -> Any:
        kinds = SIGNATURES[kernel.name]
        addresses = (ctypes.c_void_p * max(1, len(kinds))).from_address(parameters)
        values = [kind.from_address(addresses[i]).value or 0 for i, kind in enumerate(kinds)]

        def run(where: Stream, in_graph: bool) -> None:
            self.launched.append(kernel.name)
            if kernel.name == self.card.fail:
                self._broken = True
            own = self._seconds(kernel.name, values, grid, block)
            start = self.card.dependent_node if dependent else self.card.node if in_graph else self.card.launch
            where.clock += own if in_graph and own >= self.card.phase else own + start

        if stream.capturing is not None:
            stream.capturing.append(run)
        else:
            run(stream, False)
        return (self._status(),)

    def _seconds(self, name: str, values: list[int], grid: int, block: int) -> float:
        """What the kernel takes, and what it leaves in memory."""
        card = self.card
        kind = name.rstrip("0123456789").rstrip("_")
        if kind == "read":
            self._words[values[3]] = [self._sum(16 * values[1])]
            return card.phase + 16 * values[1] / card.read
        if kind == "copy":
            return card.phase + 32 * values[2] / card.copy
        if kind == "reread":
            size = 16 * values[1]
            return card.phase + size * values[2] / (card.l2_rate if size <= card.l2_knee else card.read)
        if kind == "make_ring":
            self._rings[values[0]] = (values[1], values[2])
            return 1e-5
        if kind == "chase":
            return values[1] * self._chase(values[0], values[1], values[2])
        if kind == "barrier_counter":
            self._words[values[3]] = [int(card.early_barrier)]
            return values[1] * card.barrier
        if kind == "barrier_flag":
            self._words[values[3]] = [int(card.early_barrier)]
            return values[1] * card.flag_barrier
        if kind == "exchange":
            return grid * block * values[2] / card.exchanges
        if kind == "hold":
            assert ctypes.c_uint32.from_address(values[0]).value == 0
        return 0.0

    def _sum(self, size: int) -> int:
        from dragoman_agent.device.cuda_probe_bench import expected_sum

        return expected_sum(size) + self.card.bad_sum

    def _chase(self, start: int, steps: int, last: int) -> float:
        base = max(address for address in self._rings if address <= start)
        count, stride = self._rings[base]
        index = (start - base) // stride
        for _ in range(steps if steps < 100 else steps % 100):
            index = (index * 1664525 + 1013904223) & (count - 1)
        at = base + index * stride
        self._words[last] = [at & 0xFFFFFFFF, at >> 32]
        if count * stride <= self.card.l2:
            return self.card.l2_latency
        arena = max(address for address in self._allocations if address <= base)
        far = base - arena > self._allocations[arena] // 2
        return self.card.far_latency if far else self.card.latency

    def _status(self) -> Status:
        return Status.ILLEGAL_ADDRESS if self._broken else Status.SUCCESS
