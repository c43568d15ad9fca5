"""What every step of the GPU probe works with: the session, its memory, the clocks, how long it may take."""

from __future__ import annotations

import dataclasses
import importlib
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from dragoman_agent.device.cuda_blas import load_library
from dragoman_agent.device.partition import PartitionLimits, open_partition
from dragoman_agent.pal.profile import Value
from dragoman_kernels.probe.driver import Session, pointer, u32, u64

MIB = 1 << 20
_FULL_POOL, _QUICK_POOL = 8 << 30, 4 << 30
_SEED = 12345
_SOURCES = ("launch", "stream", "random")  # of csrc/probe, that every probe needs
_FACTOR = 2654435761  # of csrc/probe/stream.cu


class StepError(Exception):
    """A step cannot be done on this device, or its result cannot be trusted. The message says why."""


class Bench:
    """One device under measurement. Owns the session, the pool that the streams read, and what is loaded beside them."""

    def __init__(self, index: int, *, full: bool, limits: PartitionLimits, cache_dir: Path | None) -> None:
        self.full = full
        self.limits = limits
        self.index = index
        self._blas = _Background("cuBLASLt", load_library)
        self._stack = ExitStack()
        self.session = self._stack.enter_context(Session(index, cache_dir=cache_dir, sources=_SOURCES))
        if limits.num_multiprocessors is not None:
            partition = open_partition(index, limits.num_multiprocessors)
            self.session.use_streams(partition.new_stream, partition.num_multiprocessors)
        self.repeats = 9 if full else 7
        self._pool: tuple[int, int] | None = None
        self._pool_stack = ExitStack()
        self.clocks = Clocks(self.session)

    def __enter__(self) -> Bench:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.drop_pool()
            self._stack.close()

    def memory_budget(self) -> int:
        """Bytes a step may take: what is free now, and what the limit leaves."""
        return self.limits.cap(self.session.free_bytes())

    def warm_up(self, seconds: float) -> None:
        """Keep every multiprocessor busy until the clocks have risen."""
        grid = self.session.num_multiprocessors
        self.session.launch("launch", "spin", grid, 256, [u64(int(seconds * 1e9))])()
        self.session.synchronize()

    def pool(self) -> tuple[int, int]:
        """Address and size (a power of two) of a large buffer of known words; made once."""
        if self._pool is None:
            most = min(_FULL_POOL if self.full else _QUICK_POOL, int(self.memory_budget() * 0.4))
            size = 1 << (most.bit_length() - 1)
            if size < 64 * MIB:
                raise StepError(f"{most // MIB} MiB of memory are too few to measure with; stop what else uses the GPU")
            address = self._pool_stack.enter_context(self.session.memory(size))
            grid = self.session.num_multiprocessors * 8
            self.session.launch("stream", "fill", grid, 256, [pointer(address), u64(size // 16), u32(_SEED)])()
            self.session.synchronize()
            self._pool = address, size
        return self._pool

    def drop_pool(self) -> None:
        """Free the pool and the graphs that read it."""
        self.session.drop_graphs()
        self._pool_stack.close()
        self._pool = None

    def blas_library(self) -> Any:
        """cuBLASLt, loaded in the background since the start. Raises BlasError."""
        return self._blas.get()

    def torch(self) -> Any:
        """torch, imported now: it takes seconds, so only what finds no library asks for it. Raises StepError."""
        try:
            return importlib.import_module("torch")
        except (ImportError, OSError, RuntimeError) as error:
            raise StepError(f"torch cannot be imported ({error})") from error


def expected_sum(num_bytes: int) -> int:
    """The sum modulo 2^32 of the 4-byte words of the pool's first `num_bytes`."""
    count = num_bytes // 4
    return (_FACTOR * (count * (count - 1) // 2) + _SEED * count) % (1 << 32)


class _Background:
    """Calls something slow beside the first steps, whose times are taken on the device and do not mind."""

    def __init__(self, name: str, work: Callable[[], Any]) -> None:
        self._work = work
        self._result: Any = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=f"load-{name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._work()
        except Exception as error:  # raised again where the result is asked for
            self._error = error

    def get(self) -> Any:
        """The result, or its exception."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._result


class Clocks:
    """Clocks as NVML reports them while a step runs; says nothing where NVML does not."""

    def __init__(self, session: Session) -> None:
        self._read: Callable[[], tuple[int, int, int]] | None = None
        try:
            import pynvml

            bus = "{:08x}:{:02x}:{:02x}.0".format(
                *(session.attribute(name) for name in ("PCI_DOMAIN_ID", "PCI_BUS_ID", "PCI_DEVICE_ID"))
            )
            pynvml.nvmlInit()
            handle = pynvml.nvmlDeviceGetHandleByPciBusId(bus.encode())

            def read() -> tuple[int, int, int]:
                return (
                    pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
                    pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM),
                    pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
                )

            read()
            self._read = read
        except Exception:  # NVML is an extra here: a card or a driver without it is measured all the same
            self._read = None

    def note(self) -> str:
        """For example "SM 1980 MHz, memory 3201 MHz"; empty where unknown."""
        if self._read is None:
            return ""
        multiprocessor, memory, reasons = self._read()
        slowed = f", slowed (reasons 0x{reasons:x})" if reasons & ~0x1 else ""  # 0x1: idle
        return f"SM {multiprocessor} MHz, memory {memory} MHz{slowed}"

    def noted(self, values: dict[str, Value]) -> dict[str, Value]:
        """The values with the clocks of now in their notes."""
        clocks = self.note()
        if not clocks:
            return values
        return {
            name: dataclasses.replace(value, note=f"{value.note}; {clocks}" if value.note else clocks)
            for name, value in values.items()
        }
