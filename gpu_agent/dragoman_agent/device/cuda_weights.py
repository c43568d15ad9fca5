"""Weights into a GPU's memory in bfloat16, through pinned buffers that several threads fill while others are copied."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from dragoman_agent.device.base import LoadProgress, ProgressFn
from dragoman_agent.model.llama import LlamaWeights, assemble
from dragoman_agent.model.loader import read_ahead
from dragoman_agent.model.quant import dequantise
from dragoman_agent.model.source import ModelSource

_BUFFER_BYTES = 16 << 20
_NUM_BUFFERS = 12
_MAX_NUM_THREADS = 8
_TORCH_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def load_weights(model: ModelSource, device: torch.device, progress: ProgressFn) -> LlamaWeights:
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

    loaded = _copy_plain(model, plain, device, report)
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
    model: ModelSource, names: list[str], device: torch.device, report: Callable[[int], None]
) -> dict[str, Tensor]:
    """Tensors stored as plain numbers, copied as they are and then cast to bfloat16 on the device."""
    layouts = {name: model.layout(name) for name in names}
    raw: dict[str, Tensor] = {}
    pinned = [torch.empty(_BUFFER_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(_NUM_BUFFERS)]
    by_address = {buffer.data_ptr(): buffer for buffer in pinned}
    under_way: deque[tuple[torch.cuda.Event, Callable[[], None]]] = deque()
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    threads = min(_MAX_NUM_THREADS, os.cpu_count() or 1)
    chunks = read_ahead(model, names, [buffer.numpy() for buffer in pinned], num_threads=threads)
    with torch.cuda.stream(stream):
        for chunk in chunks:
            if chunk.offset == 0:
                raw[chunk.name] = torch.empty(layouts[chunk.name].num_bytes, dtype=torch.uint8, device=device)
            size = len(chunk.data)
            buffer = by_address[chunk.data.ctypes.data]
            raw[chunk.name][chunk.offset : chunk.offset + size].copy_(buffer[:size], non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
            under_way.append((event, chunk.release))
            while under_way and (_is_done(under_way[0][0]) or len(under_way) > _NUM_BUFFERS - threads - 1):
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
