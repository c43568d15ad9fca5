"""A GPU that is not there: the GPU backends' code on host tensors, its kernels under Triton's interpreter.

TRITON_INTERPRET=1 must be set before anything here is imported.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar, cast

import torch

from dragoman_agent.device.base import ProgressFn
from dragoman_agent.device.cuda import CudaDevice
from dragoman_agent.device.torch_runtime import Stream
from dragoman_agent.device.torch_weights import CopyPlan, load_through, torch_sinks
from dragoman_agent.model.llama import LlamaWeights
from dragoman_agent.model.source import ModelSource

T = TypeVar("T")


class HostStream:
    """Everything is done when it is queued."""

    def synchronize(self) -> None:
        """Nothing is under way."""


class HostEvent:
    """The time at which it was recorded."""

    def __init__(self) -> None:
        self._at = 0.0

    def record(self, stream: Any = None) -> None:
        self._at = time.perf_counter()

    def synchronize(self) -> None:
        """It has passed."""

    def query(self) -> bool:
        return True

    def wait(self, stream: Any) -> None:
        """It has passed."""

    def elapsed_time(self, end_event: HostEvent) -> float:
        return 1e3 * (end_event._at - self._at)


class HostGraph(Generic[T]):
    """Computes again into the tensor that the capture made, as a graph does."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self.made = work()

    def replay(self) -> None:
        with torch.inference_mode():  # no mode matters to a graph
            cast(torch.Tensor, self.made).copy_(cast(torch.Tensor, self._work()))

    def pool(self) -> None:
        """Nothing is shared."""


class HostRuntime:
    """Implements Runtime."""

    kind = "cuda"
    device = torch.device("cpu")
    errors: tuple[type[Exception], ...] = (torch.AcceleratorError,)

    def activate(self) -> None:
        """There is but one."""

    def name(self) -> str:
        return "the host"

    def new_stream(self) -> HostStream:
        return HostStream()

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        return nullcontext()

    def stay_on(self, stream: Stream) -> None:
        """There is but one order."""

    def new_event(self) -> HostEvent:
        return HostEvent()

    def capture(self, stream: Stream, work: Callable[[], T], pool: Any) -> tuple[HostGraph[T], T]:
        graph = HostGraph(work)
        return graph, graph.made

    def pinned(self, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype)

    def synchronize(self) -> None:
        """Nothing is under way."""

    def release(self) -> None:
        """Memory goes with its tensors."""


class InterpretedDevice(CudaDevice):
    """The GPU backend in float32: the interpreter computes bfloat16 wrongly."""

    dtype = torch.float32

    def __init__(self) -> None:
        super().__init__(0, HostRuntime())

    def _read_weights(self, model: ModelSource, progress: ProgressFn) -> LlamaWeights:
        plan = CopyPlan(num_threads=1, buffer_bytes=4096)
        return load_through(model, self._device, progress, torch_sinks(self._runtime), plan=plan, dtype=self.dtype)
