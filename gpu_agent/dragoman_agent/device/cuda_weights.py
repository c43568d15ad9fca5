"""Weights into a GPU's memory in bfloat16, through pinned buffers that several threads fill while others are copied."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from cuda.bindings import driver
from torch import Tensor

from dragoman_agent.device.base import DeviceError, LoadProgress, ProgressFn
from dragoman_agent.model.llama import LlamaWeights, assemble
from dragoman_agent.model.loader import Bytes, scatter
from dragoman_agent.model.quant import dequantise
from dragoman_agent.model.source import ModelSource

_DISABLE_TIMING = int(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)
_TORCH_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Threads and their two pinned buffers each. All buffers together should stay in the last-level cache: then the
    bytes pass memory once on their way from the page cache to the device.
    """

    num_threads: int = min(10, os.cpu_count() or 1)
    buffer_bytes: int = 8 << 20


def load_weights(
    model: ModelSource, device: torch.device, progress: ProgressFn, plan: CopyPlan | None = None
) -> LlamaWeights:
    """The model's weights on `device`. Raises ValueError naming a missing tensor, ModelFileError for a broken file."""
    names = model.file_order()
    layouts = {name: model.layout(name) for name in names}
    plain = [name for name in names if layouts[name].dtype in _TORCH_DTYPES]
    total = max(sum(layout.num_bytes for layout in layouts.values()), 1)
    done = 0

    def report(size: int) -> None:
        nonlocal done
        done += size
        progress(LoadProgress("weights", done, total, "bytes"))

    loaded = _copy_plain(model, plain, device, report, plan or CopyPlan())
    for name in names:
        if name not in loaded:  # block-quantised: spread to bfloat16 on the host
            loaded[name] = torch.from_numpy(dequantise(model.tensor(name))).to(device).to(torch.bfloat16)
            report(layouts[name].num_bytes)

    def take(name: str) -> Tensor | None:
        value = loaded.pop(name, None)
        if value is None:
            return None
        return value.reshape(-1) if name.endswith(("norm", ".bias")) else value

    return assemble(model.config, take)


def _copy_plain(
    model: ModelSource, names: list[str], device: torch.device, report: Callable[[int], None], plan: CopyPlan
) -> dict[str, Tensor]:
    """Tensors stored as plain numbers, copied as they are and then cast to bfloat16 on the device."""
    layouts = {name: model.layout(name) for name in names}
    raw = {name: torch.empty(layouts[name].num_bytes, dtype=torch.uint8, device=device) for name in names}
    torch.cuda.synchronize(device)  # the tensors may be memory that another stream still uses
    sinks = [_PinnedSink(raw, device, plan.buffer_bytes) for _ in range(plan.num_threads)]
    scatter(model, names, sinks, progress=report)
    for sink in sinks:
        sink.finish()
    return {
        name: value.view(_TORCH_DTYPES[layouts[name].dtype]).view(layouts[name].shape).to(torch.bfloat16)
        for name, value in raw.items()
    }


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
