"""Weights into a GPU's memory in bfloat16, through pinned buffers that several threads fill while others are copied."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dragoman_agent.device.base import LoadProgress, ProgressFn
from dragoman_agent.model.llama import LlamaWeights, assemble
from dragoman_agent.model.loader import read_ahead
from dragoman_agent.model.quant import dequantise
from dragoman_agent.model.source import ModelSource


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Pinned buffers between files and device: enough for every thread to fill one while others are copied."""

    num_threads: int = min(12, os.cpu_count() or 1)
    num_buffers: int = 24
    buffer_bytes: int = 8 << 20


_TORCH_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


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
    pinned = [torch.empty(plan.buffer_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(plan.num_buffers)]
    by_address = {buffer.data_ptr(): (buffer, torch.cuda.Event()) for buffer in pinned}  # type: ignore[no-untyped-call]
    under_way: deque[tuple[torch.cuda.Event, Callable[[], None]]] = deque()
    max_under_way = max(plan.num_buffers - plan.num_threads - 1, 1)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    chunks = read_ahead(model, names, [buffer.numpy() for buffer in pinned], num_threads=plan.num_threads)
    with torch.cuda.stream(stream):
        for chunk in chunks:
            size = len(chunk.data)
            buffer, event = by_address[chunk.data.ctypes.data]
            raw[chunk.name].narrow(0, chunk.offset, size).copy_(buffer.narrow(0, 0, size), non_blocking=True)
            event.record(stream)
            under_way.append((event, chunk.release))
            while under_way and (len(under_way) > max_under_way or _is_done(under_way[0][0])):
                oldest, release = under_way.popleft()
                oldest.synchronize()
                release()
            report(size)
    stream.synchronize()
    return {
        name: value.view(_TORCH_DTYPES[layouts[name].dtype]).view(layouts[name].shape).to(torch.bfloat16)
        for name, value in raw.items()
    }


def _is_done(event: torch.cuda.Event) -> bool:
    return bool(event.query())  # type: ignore[no-untyped-call]
