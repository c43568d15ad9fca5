"""What a GPU backend needs of torch, whoever made the card: streams, events, graphs, pinned memory.

CUDA and ROCm builds of torch share one namespace, the build for Intel's cards has another of the same form.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

import torch

from dragoman_agent.device.base import DeviceError
from dragoman_agent.device.partition import PartitionError, limits_from_environ, open_partition

T = TypeVar("T")

_NO_MEMORY = ("out of memory", "ALLOC_FAILED")  # in the words of torch, Triton and cuBLAS
_TORCH_FOR = {"cuda": "CUDA", "hip": "ROCm", "xpu": "Intel GPUs (XPU)"}


def is_no_memory(what: str) -> bool:
    """Whether an error's words say that memory was short, and nothing else."""
    return any(words in what for words in _NO_MEMORY)


class Stream(Protocol):
    """Work in order."""

    def synchronize(self) -> None:
        """Wait for the work queued so far."""


class Event(Protocol):
    """A moment of a stream. One that was never recorded counts as passed."""

    def record(self, stream: Any = None) -> None:
        """In `stream`, which takes the host less than to find the current one."""

    def synchronize(self) -> None:
        """Wait until it has passed."""

    def query(self) -> bool:
        """Whether it has passed."""

    def wait(self, stream: Any) -> None:
        """What is queued in `stream` from now on waits for it."""

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds to a later event; both have passed."""


class Graph(Protocol):
    """Work that is queued by one call."""

    def replay(self) -> None:
        """Queue it in the current stream."""

    def pool(self) -> Any:
        """Its memory, which another graph may share."""


class Runtime(Protocol):
    """One device through torch."""

    @property
    def kind(self) -> str:
        """cuda, hip or xpu."""

    @property
    def device(self) -> torch.device:
        """Where tensors lie."""

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """What torch raises when the device itself fails."""

    def activate(self) -> None:
        """Make it this thread's device."""

    def name(self) -> str:
        """Of the card, for display."""

    def new_stream(self) -> Stream:
        """A stream of its own, on the part of the card that DRAGOMAN_SM_LIMIT leaves. Raises DeviceError."""

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        """What is queued inside goes to `stream`."""

    def stay_on(self, stream: Stream) -> None:
        """What this thread queues from now on goes to `stream`: less for the host than `on`, which looks for what was before. A copy
        that is waited for comes behind all that is there.
        """

    def new_event(self) -> Event:
        """An event that takes the time."""

    def capture(self, stream: Stream, work: Callable[[], T], pool: Any) -> tuple[Graph, T]:
        """What `work` queues as a graph, and what it returned: tensors that a replay writes anew."""

    def pinned(self, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Zeros on the host that the device copies from and to beside other work."""

    def synchronize(self) -> None:
        """Wait for all work on the device."""

    def release(self) -> None:
        """Give memory that nothing uses back to the device."""


@dataclass(frozen=True, slots=True)
class TorchRuntime:
    """Implements Runtime over a namespace of torch."""

    kind: str
    device: torch.device
    namespace: Any
    graph_type: Any
    errors: tuple[type[Exception], ...]

    def activate(self) -> None:
        """See Runtime."""
        self.namespace.set_device(self.device)

    def name(self) -> str:
        """See Runtime."""
        return str(self.namespace.get_device_name(self.device))

    def new_stream(self) -> Stream:
        """See Runtime."""
        try:
            limits = limits_from_environ()
            if self.kind == "cuda" and limits.num_multiprocessors is not None:
                partition = open_partition(self.device.index, limits.num_multiprocessors)
                return cast(Stream, self.namespace.ExternalStream(partition.new_stream(), device=self.device))
        except PartitionError as error:
            raise DeviceError(str(error)) from error
        stream: Stream = self.namespace.Stream(self.device)
        return stream

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        """See Runtime."""
        context: AbstractContextManager[Any] = self.namespace.stream(stream)
        return context

    def stay_on(self, stream: Stream) -> None:
        """See Runtime."""
        self.namespace.set_stream(stream)

    def new_event(self) -> Event:
        """See Runtime."""
        event: Event = self.namespace.Event(enable_timing=True)
        return event

    def capture(self, stream: Stream, work: Callable[[], T], pool: Any) -> tuple[Graph, T]:
        """See Runtime. Nothing may be under way.

        torch's own context gives back all memory before each graph, which is then taken anew for the next.
        """
        graph: Any = self.graph_type()
        options: dict[str, Any] = {} if pool is None else {"pool": pool}
        if self.kind != "xpu":  # whose graphs know no modes
            # While the engine serves, a thread of the KV tiers may pin memory, which would end a capture of every thread.
            options["capture_error_mode"] = "thread_local"
        collects = gc.isenabled()
        gc.disable()  # freeing a pinned buffer records an event, which would become part of the graph
        try:
            with self.on(stream):
                graph.capture_begin(**options)
                try:
                    made = work()
                except BaseException:
                    with suppress(Exception):  # that it was broken off: what broke it off is told
                        graph.capture_end()
                    raise
                graph.capture_end()
        finally:
            if collects:
                gc.enable()
        return graph, made

    def pinned(self, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """See Runtime."""
        return torch.zeros(size, dtype=dtype, pin_memory=True)

    def synchronize(self) -> None:
        """See Runtime."""
        self.namespace.synchronize(self.device)

    def release(self) -> None:
        """See Runtime."""
        self.namespace.empty_cache()


def open_runtime(kind: str, index: int) -> TorchRuntime:
    """Device `index` of a kind. Raises DeviceError when the installed torch was not built for the kind, or sees no such device."""
    if kind != built_for():
        raise DeviceError(
            f"the installed torch {torch.__version__} was built for {_TORCH_FOR.get(built_for(), 'no GPU')}; "
            f"--device {kind} needs one for {_TORCH_FOR[kind]}"
        )
    namespace: Any = torch.xpu if kind == "xpu" else torch.cuda
    graph_type: Any = torch.xpu.XPUGraph if kind == "xpu" else torch.cuda.CUDAGraph
    # torch wraps the failures of CUDA and ROCm in a type of their own; those of SYCL come as RuntimeError.
    errors: tuple[type[Exception], ...] = (RuntimeError,) if kind == "xpu" else (torch.AcceleratorError,)
    if not namespace.is_available():
        raise DeviceError(f"PyTorch sees no {kind.upper()} device; run `dragoman doctor` for the reason")
    count = namespace.device_count()
    if index >= count:
        raise DeviceError(f"there is no {kind} device {index}: PyTorch sees {count}; see `dragoman probe`")
    device = torch.device("xpu" if kind == "xpu" else "cuda", index)  # ROCm's devices are called cuda too
    return TorchRuntime(kind, device, namespace, graph_type, errors)


def built_for() -> str:
    """The kind of device the installed torch was built for; empty for none."""
    if torch.version.hip is not None:
        return "hip"
    if torch.version.cuda is not None:
        return "cuda"
    return "xpu" if torch.version.xpu is not None else ""
