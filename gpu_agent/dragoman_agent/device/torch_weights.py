"""Weights into a GPU's memory, through pinned buffers that several threads fill while others are copied."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dragoman_agent.device.base import LoadProgress, ProgressFn
from dragoman_agent.device.torch_runtime import Runtime
from dragoman_agent.model.llama import LlamaWeights, assemble
from dragoman_agent.model.loader import Bytes, Sink, scatter
from dragoman_agent.model.quant import dequantise
from dragoman_agent.model.source import ModelSource

_TORCH_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Threads and their two pinned buffers each. All buffers together should stay in the last-level cache: then the
    bytes pass memory once on their way from the page cache to the device.
    """

    num_threads: int = min(10, os.cpu_count() or 1)
    buffer_bytes: int = 8 << 20


class WeightSink(Sink, Protocol):
    """A sink with an end."""

    def finish(self) -> None:
        """Wait for the copies under way."""


# The sinks of a plan, which fill the tensors of bytes by name.
MakeSinks = Callable[[dict[str, Tensor], CopyPlan], Sequence[WeightSink]]


def load_through(
    model: ModelSource,
    device: torch.device,
    progress: ProgressFn,
    make_sinks: MakeSinks,
    *,
    plan: CopyPlan | None = None,
    dtype: torch.dtype = torch.bfloat16,
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

    loaded = _copy_plain(model, plain, device, report, make_sinks, plan or CopyPlan(), dtype)
    for name in names:
        if name not in loaded:  # block-quantised: spread out on the host
            loaded[name] = torch.from_numpy(dequantise(model.tensor(name))).to(device).to(dtype)
            report(layouts[name].num_bytes)

    def take(name: str) -> Tensor | None:
        value = loaded.pop(name, None)
        if value is None:
            return None
        return value.reshape(-1) if name.endswith(("norm", ".bias")) else value

    return assemble(model.config, take)


def _copy_plain(
    model: ModelSource,
    names: list[str],
    device: torch.device,
    report: Callable[[int], None],
    make_sinks: MakeSinks,
    plan: CopyPlan,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Tensors stored as plain numbers, copied as they are and then cast on the device."""
    layouts = {name: model.layout(name) for name in names}
    raw = {name: torch.empty(layouts[name].num_bytes, dtype=torch.uint8, device=device) for name in names}
    sinks = make_sinks(raw, plan)
    scatter(model, names, sinks, progress=report)
    for sink in sinks:
        sink.finish()
    return {
        name: value.view(_TORCH_DTYPES[layouts[name].dtype]).view(layouts[name].shape).to(dtype)
        for name, value in raw.items()
    }


def torch_sinks(runtime: Runtime) -> MakeSinks:
    """Sinks that know nothing but torch."""

    def make(raw: dict[str, Tensor], plan: CopyPlan) -> Sequence[WeightSink]:
        runtime.synchronize()  # the tensors may be memory that another stream still uses
        return [_TorchSink(runtime, raw, plan.buffer_bytes) for _ in range(plan.num_threads)]

    return make


class _TorchSink:
    """Two pinned buffers and a stream of one thread."""

    def __init__(self, runtime: Runtime, raw: dict[str, Tensor], buffer_bytes: int) -> None:
        self._runtime, self._raw = runtime, raw
        self._stream = runtime.new_stream()
        self._pinned = [runtime.pinned((buffer_bytes,), torch.uint8) for _ in range(2)]
        self._copied = [runtime.new_event() for _ in range(2)]
        self._is_current = False  # the device, in the thread that uses this sink
        self._at = 0

    def buffer(self) -> Bytes:
        """See Sink."""
        if not self._is_current:
            self._runtime.activate()
            self._is_current = True
        self._at ^= 1
        self._copied[self._at].synchronize()
        view: Bytes = self._pinned[self._at].numpy()
        return view

    def send(self, name: str, offset: int, data: Bytes) -> None:
        """See Sink."""
        with torch.inference_mode(), self._runtime.on(self._stream):
            target = self._raw[name][offset : offset + len(data)]
            target.copy_(self._pinned[self._at][: len(data)], non_blocking=True)
            self._copied[self._at].record()

    def finish(self) -> None:
        """See WeightSink."""
        self._stream.synchronize()
