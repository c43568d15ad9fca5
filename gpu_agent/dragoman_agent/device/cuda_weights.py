"""Weights into an NVIDIA GPU's memory, through the driver's own copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from cuda.bindings import driver
from torch import Tensor

from dragoman_agent.device.base import DeviceError, ProgressFn
from dragoman_agent.device.torch_weights import CopyPlan, WeightSink, load_through
from dragoman_agent.model.llama import LlamaWeights
from dragoman_agent.model.loader import Bytes
from dragoman_agent.model.source import ModelSource

__all__ = ["CopyPlan", "load_weights"]

_DISABLE_TIMING = int(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)


def load_weights(
    model: ModelSource, device: torch.device, progress: ProgressFn, plan: CopyPlan | None = None
) -> LlamaWeights:
    """The model's weights on `device` in bfloat16. Raises ValueError naming a missing tensor, ModelFileError for a broken file."""

    def sinks(raw: dict[str, Tensor], chosen: CopyPlan) -> Sequence[WeightSink]:
        torch.cuda.synchronize(device)  # the tensors may be memory that another stream still uses
        return [_PinnedSink(raw, device, chosen.buffer_bytes) for _ in range(chosen.num_threads)]

    return load_through(model, device, progress, sinks, plan=plan)


class _PinnedSink:
    """Two pinned buffers and a stream of one thread.

    Through the driver API: a copy of a few MiB takes the device 0.1 ms, and torch's own calls, with several threads at
    the interpreter lock, took longer than that.
    """

    def __init__(self, raw: dict[str, Tensor], device: torch.device, buffer_bytes: int) -> None:
        self._targets = {name: tensor.data_ptr() for name, tensor in raw.items()}
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pinned = [torch.empty(buffer_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._views = [pinned.numpy() for pinned in self._pinned]
        self._sources = [pinned.data_ptr() for pinned in self._pinned]
        self._copied = [_checked(driver.cuEventCreate(_DISABLE_TIMING)) for _ in range(2)]
        self._context = _checked(driver.cuCtxGetCurrent())
        self._is_current = False  # the context, in the thread that uses this sink
        self._at = 0

    def buffer(self) -> Bytes:
        """See Sink."""
        if not self._is_current:
            _checked(driver.cuCtxSetCurrent(self._context))
            self._is_current = True
        self._at ^= 1
        _checked(driver.cuEventSynchronize(self._copied[self._at]))
        return self._views[self._at]

    def send(self, name: str, offset: int, data: Bytes) -> None:
        """See Sink."""
        stream = self._stream.cuda_stream
        source = self._sources[self._at]
        _checked(driver.cuMemcpyHtoDAsync(self._targets[name] + offset, source, len(data), stream))
        _checked(driver.cuEventRecord(self._copied[self._at], stream))

    def finish(self) -> None:
        """Wait for the copies under way."""
        self._stream.synchronize()
        for event in self._copied:
            _checked(driver.cuEventDestroy(event))


def _checked(answer: tuple[Any, ...]) -> Any:
    """The value of a driver call. Raises DeviceError with the driver's name for what went wrong."""
    status, *values = answer
    if status != driver.CUresult.CUDA_SUCCESS:
        raise DeviceError(f"copying weights to the GPU failed: the driver answered {status.name} ({int(status)})")
    return values[0] if values else None
