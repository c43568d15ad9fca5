"""The CUDA driver calls that a micro-benchmark needs: memory, launches, graphs, and times taken on the device alone.

One `Session` is one context, one stream and the kernels of `csrc/probe`. Everything is queued on that stream; where it
belongs to a green context the kernels run on its multiprocessors only (functions come from a library, which has no context
of its own, so the stream's decides).
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from dragoman_kernels.probe.build import build

if TYPE_CHECKING:
    from collections.abc import Iterator

_HOLD_NANOSECONDS = 2_000_000_000
_PORTABLE_MAPPED = 0x01 | 0x02  # CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP


class DriverError(RuntimeError):
    """A driver call failed; the message has its name for the error."""


def pointer(address: int) -> ctypes.c_void_p:
    """A pointer argument of a kernel."""
    return ctypes.c_void_p(address)


def u32(value: int) -> ctypes.c_uint32:
    """A 32-bit argument of a kernel."""
    return ctypes.c_uint32(value)


def u64(value: int) -> ctypes.c_uint64:
    """A 64-bit argument of a kernel."""
    return ctypes.c_uint64(value)


class Launch:
    """A kernel with its grid and arguments, packed once, so that queueing it again costs the host little.

    `dependent` lets it start before its predecessor in the stream has ended (programmatic dependent launch, compute
    capability 9.0); `cooperative` promises that all its blocks run at once.
    """

    def __init__(
        self,
        session: Session,
        kernel: Any,
        grid: int,
        block: int,
        arguments: Sequence[Any] = (),
        *,
        dependent: bool = False,
        cooperative: bool = False,
    ) -> None:
        self._session, self._kernel, self._values = session, kernel, tuple(arguments)
        self._array = (ctypes.c_void_p * max(1, len(self._values)))(*map(ctypes.addressof, self._values))
        self._grid, self._block = grid, block
        self._config = (
            _config(session.driver, grid, block, dependent, cooperative) if dependent or cooperative else None
        )

    def __call__(self, stream: Any = None) -> None:
        """Queue it on the session's stream, or on another of the session."""
        session = self._session
        where = session.stream if stream is None else stream
        address = ctypes.addressof(self._array)
        if self._config is None:
            session.call(
                session.driver.cuLaunchKernel(self._kernel, self._grid, 1, 1, self._block, 1, 1, 0, where, address, 0)
            )
        else:
            self._config.hStream = where
            session.call(session.driver.cuLaunchKernelEx(self._config, self._kernel, address, 0))

    def times(self, count: int) -> None:
        """Queue it `count` times on the session's stream."""
        for _ in range(count):
            self()


def _config(driver: Any, grid: int, block: int, dependent: bool, cooperative: bool) -> Any:
    """A launch with attributes."""
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
    names = driver.CUlaunchAttributeID
    attributes = []
    if dependent:
        attribute = driver.CUlaunchAttribute()
        attribute.id = names.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        attributes.append(attribute)
    if cooperative:
        attribute = driver.CUlaunchAttribute()
        attribute.id = names.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        attribute.value.cooperative = 1
        attributes.append(attribute)
    config.attrs = attributes
    config.numAttrs = len(attributes)
    return config


class Session:
    """The primary context of one device, current in the thread that made it. Use as a context manager.

    `stream` is what everything is queued on; `num_multiprocessors` what that stream may use.
    """

    def __init__(self, index: int, *, cache_dir: Path | None = None, sources: Sequence[str] = ()) -> None:
        """`sources` of csrc/probe are compiled at once, beside the making of the context.

        Raises DriverError, KernelCompileError or RuntimeError (no driver library).
        """
        from cuda.bindings import driver

        self.driver: Any = driver
        self._cache_dir = cache_dir
        self.call(driver.cuInit(0))
        self.device = self.call(driver.cuDeviceGet(index))
        self.capability = self.attribute("COMPUTE_CAPABILITY_MAJOR") * 10 + self.attribute("COMPUTE_CAPABILITY_MINOR")
        self._builds = {name: Future[bytes]() for name in sources}
        for name, future in self._builds.items():
            threading.Thread(target=self._build, args=(name, future), name=f"build-{name}", daemon=True).start()
        self.context = self.call(driver.cuDevicePrimaryCtxRetain(self.device))
        self.call(driver.cuCtxSetCurrent(self.context))
        self.num_multiprocessors = self.attribute("MULTIPROCESSOR_COUNT")
        self._libraries: dict[str, Any] = {}
        self._kernels: dict[tuple[str, str], Any] = {}
        self._new_stream: Callable[[], Any] = lambda: self.call(driver.cuStreamCreate(1))  # non-blocking
        self._held: list[Any] = []
        self.stream = self._new_stream()
        self._begin, self._end = self.event(timed=True), self.event(timed=True)
        flag = self.call(driver.cuMemHostAlloc(64, _PORTABLE_MAPPED))
        self._flag = (ctypes.c_uint32 * 2).from_address(int(flag))
        device_flag = self.call(driver.cuMemHostGetDevicePointer(flag, 0))
        self._hold = self.launch("launch", "hold", 1, 1, [pointer(int(device_flag)), u64(_HOLD_NANOSECONDS)])

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.driver.cuDevicePrimaryCtxRelease(self.device)

    def use_streams(self, new_stream: Callable[[], Any], num_multiprocessors: int) -> None:
        """Take this and every later stream from `new_stream` (a green context's), which has that many multiprocessors."""
        self._new_stream, self.num_multiprocessors = new_stream, num_multiprocessors
        self.stream = new_stream()

    def call(self, answer: tuple[Any, ...]) -> Any:
        """The value of a driver call's answer. Raises DriverError."""
        if int(answer[0]):
            _, name = self.driver.cuGetErrorName(answer[0])
            raise DriverError(name.decode() if isinstance(name, bytes) else str(answer[0]))
        values = answer[1:]
        return values[0] if len(values) == 1 else values

    def attribute(self, name: str) -> int:
        """CU_DEVICE_ATTRIBUTE_<name>."""
        key = getattr(self.driver.CUdevice_attribute, "CU_DEVICE_ATTRIBUTE_" + name)
        return int(self.call(self.driver.cuDeviceGetAttribute(key, self.device)))

    def free_bytes(self) -> int:
        """Memory that the driver says is free now."""
        return int(self.call(self.driver.cuMemGetInfo())[0])

    def new_stream(self) -> Any:
        """Another stream of the same multiprocessors."""
        return self._new_stream()

    def event(self, *, timed: bool = False) -> Any:
        """A new event."""
        return self.call(self.driver.cuEventCreate(0 if timed else 2))  # CU_EVENT_DISABLE_TIMING

    def kernel(self, source: str, name: str) -> Any:
        """`name` of csrc/probe/<source>.cu, compiled for this device. Raises KernelCompileError, DriverError."""
        key = (source, name)
        if key not in self._kernels:
            driver = self.driver
            if source not in self._libraries:
                begun = self._builds.get(source)
                code = begun.result() if begun else build(source, self.capability, self._cache_dir)
                self._libraries[source] = self.call(driver.cuLibraryLoadData(code, [], [], 0, [], [], 0))
            kernel = self.call(driver.cuLibraryGetKernel(self._libraries[source], name.encode()))
            self._kernels[key] = driver.CUfunction(int(kernel))
        return self._kernels[key]

    def _build(self, source: str, future: Future[bytes]) -> None:
        try:
            future.set_result(build(source, self.capability, self._cache_dir))
        except Exception as error:  # raised where the kernel is asked for
            future.set_exception(error)

    def launch(
        self,
        source: str,
        name: str,
        grid: int,
        block: int,
        arguments: Sequence[Any] = (),
        *,
        dependent: bool = False,
        cooperative: bool = False,
    ) -> Launch:
        """A launch of a kernel of csrc/probe; see Launch."""
        kernel = self.kernel(source, name)
        return Launch(self, kernel, grid, block, arguments, dependent=dependent, cooperative=cooperative)

    def blocks_per_multiprocessor(self, source: str, name: str, block: int) -> int:
        """How many blocks of `block` threads of this kernel one multiprocessor holds at a time."""
        kernel = self.kernel(source, name)
        return int(self.call(self.driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(kernel, block, 0)))

    @contextmanager
    def memory(self, num_bytes: int) -> Iterator[int]:
        """Device memory for the length of a block of code; its address. Raises DriverError (out of memory)."""
        address = self.call(self.driver.cuMemAlloc(num_bytes))
        try:
            yield int(address)
        finally:
            self.driver.cuStreamSynchronize(self.stream)
            self.driver.cuMemFree(address)

    @contextmanager
    def pinned(self, num_bytes: int) -> Iterator[int]:
        """Pinned host memory for the length of a block of code; its address."""
        address = int(self.call(self.driver.cuMemHostAlloc(num_bytes, 0)))
        try:
            yield address
        finally:
            self.driver.cuStreamSynchronize(self.stream)
            self.driver.cuMemFreeHost(address)

    def set_words(self, address: int, value: int, count: int) -> None:
        """Queue setting `count` 32-bit words."""
        self.call(self.driver.cuMemsetD32Async(address, value, count, self.stream))

    def read_words(self, address: int, count: int) -> list[int]:
        """`count` 32-bit words of device memory, after what is queued."""
        self.synchronize()
        words = (ctypes.c_uint32 * count)()
        self.call(self.driver.cuMemcpyDtoH(ctypes.addressof(words), address, 4 * count))
        return list(words)

    def synchronize(self) -> None:
        """Wait for the stream. Raises DriverError with what a kernel did wrong."""
        self.call(self.driver.cuStreamSynchronize(self.stream))

    def capture(self, work: Callable[[], object]) -> Callable[[], None]:
        """What `work` queues, as a graph; calling the result queues one replay. The graph lives as long as the session."""
        driver = self.driver
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self.call(driver.cuStreamBeginCapture(self.stream, mode))
        try:
            work()
        finally:
            graph = self.call(driver.cuStreamEndCapture(self.stream))
        runnable = self.call(driver.cuGraphInstantiate(graph, 0))
        driver.cuGraphDestroy(graph)
        self.call(driver.cuGraphUpload(runnable, self.stream))
        self._held.append(runnable)
        return lambda: self.call(driver.cuGraphLaunch(runnable, self.stream))

    def drop_graphs(self) -> None:
        """Destroy every captured graph; none may be replayed after it."""
        self.synchronize()
        for runnable in self._held:
            self.driver.cuGraphExecDestroy(runnable)
        self._held.clear()

    def seconds(self, work: Callable[[], object], *, held: bool = True) -> float:
        """Device time of what `work` queues on the stream.

        `held` keeps the stream waiting until everything is queued, so that no gap of the host is measured; `work` must
        then not wait for the device. Raises DriverError, also where the host was too slow.
        """
        driver = self.driver
        if held:
            self._flag[0] = self._flag[1] = 0
            self._hold()
        try:
            self.call(driver.cuEventRecord(self._begin, self.stream))
            work()
            self.call(driver.cuEventRecord(self._end, self.stream))
        finally:
            self._flag[0] = 1
        self.call(driver.cuEventSynchronize(self._end))
        if held and self._flag[1]:
            raise DriverError("the host did not queue a measurement in time; is this machine overloaded?")
        return float(self.call(driver.cuEventElapsedTime(self._begin, self._end))) * 1e-3

    def samples(self, work: Callable[[], object], count: int, *, warm: int = 1, held: bool = True) -> list[float]:
        """`count` times of `work`, after `warm` runs that are not kept."""
        for _ in range(warm):
            work()
        self.synchronize()
        return [self.seconds(work, held=held) for _ in range(count)]
