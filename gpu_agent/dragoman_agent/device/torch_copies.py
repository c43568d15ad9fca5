"""KV blocks between a GPU and pinned host memory, beside the steps: on a stream of their own, through a buffer on the device.

A block leaves in the order of the steps: it is gathered into the buffer on their stream, which takes microseconds, and crosses
the link from there while later steps may overwrite it. A block comes in behind the steps submitted so far.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from dragoman_agent.device import torch_blocks
from dragoman_agent.device.base import DeviceError, Int32Array, UInt8Array
from dragoman_agent.device.torch_runtime import Event, Runtime, Stream
from dragoman_agent.model.layers import PagedCache

BUFFER_BYTES = 32 << 20  # each way: a millisecond or less of the link
_RING = 16  # lists of block ids that copies under way may still read


class EventCopy:
    """Implements BlockCopy by two events of the copy stream."""

    def __init__(self, runtime: Runtime) -> None:
        self.begin, self.end = runtime.new_event(), runtime.new_event()
        self._errors = runtime.errors

    @property
    def seconds(self) -> float:
        """See BlockCopy."""
        return self.begin.elapsed_time(self.end) * 1e-3 if self.is_done() else 0.0

    def is_done(self) -> bool:
        """See BlockCopy."""
        try:
            return self.end.query()
        except self._errors as error:
            raise DeviceError(f"the GPU failed while it copied KV blocks: {error}") from error


class BlockCopier:
    """Owns the copy stream and the buffers. One thread calls it; `new_rows` alone may be called from another."""

    def __init__(self, runtime: Runtime, cache: PagedCache, steps: Stream) -> None:
        """`steps`: the stream of the steps. Takes twice `BUFFER_BYTES` on the device, or two blocks where one is larger."""
        self._runtime, self._cache, self._steps = runtime, cache, steps
        self._block_bytes = torch_blocks.block_format(cache).block_bytes
        self.max_num_blocks = max(BUFFER_BYTES // self._block_bytes, 1)
        size = (self.max_num_blocks, self._block_bytes)
        self._out = torch.empty(size, dtype=torch.uint8, device=runtime.device)
        self._in = torch.empty(size, dtype=torch.uint8, device=runtime.device)
        self._stream = runtime.new_stream()
        self._ids = runtime.pinned((_RING, self.max_num_blocks), torch.int64)
        self._device_ids = torch.zeros((_RING, self.max_num_blocks), dtype=torch.int64, device=runtime.device)
        self._users: list[Event | None] = [None] * _RING
        self._serial = 0
        self._leaving: EventCopy | None = None

    def new_rows(self, num_blocks: int) -> UInt8Array:
        """See BlockDevice. Raises RuntimeError when memory cannot be pinned."""
        rows: UInt8Array = self._runtime.pinned((num_blocks, self._block_bytes), torch.uint8).numpy()
        return rows

    def copy_out(self, blocks: Int32Array, rows: Sequence[UInt8Array]) -> EventCopy:
        """See BlockDevice. The blocks may be overwritten by what is queued in the stream of the steps from now on."""
        if self._leaving is not None and not self._leaving.is_done():
            raise DeviceError("blocks are still leaving the GPU; wait until that copy is done")
        copy = self._leaving = EventCopy(self._runtime)
        buffer = self._pages(self._out[: len(blocks)])
        with self._runtime.on(self._steps):
            ids = self._take_ids(blocks, copy.end)
            buffer[:, :, 0].copy_(self._cache.keys.index_select(1, ids).transpose(0, 1))
            buffer[:, :, 1].copy_(self._cache.values.index_select(1, ids).transpose(0, 1))
            gathered = self._runtime.new_event()
            gathered.record()
        with self._runtime.on(self._stream):
            gathered.wait(self._stream)
            copy.begin.record()
            for index, row in enumerate(rows):
                torch.from_numpy(row).copy_(self._out[index], non_blocking=True)
            copy.end.record()
        return copy

    def copy_in(self, rows: Sequence[UInt8Array], blocks: Int32Array) -> EventCopy:
        """See BlockDevice. A step under way may still write to the blocks, so it is waited for on the device."""
        copy = EventCopy(self._runtime)
        pages = self._pages(self._in[: len(blocks)])
        with self._runtime.on(self._steps):
            ready = self._runtime.new_event()
            ready.record()
        with self._runtime.on(self._stream):
            ready.wait(self._stream)
            ids = self._take_ids(blocks, copy.end)
            copy.begin.record()
            for index, row in enumerate(rows):
                self._in[index].copy_(torch.from_numpy(row), non_blocking=True)
            self._cache.keys.index_copy_(1, ids, pages[:, :, 0].transpose(0, 1))
            self._cache.values.index_copy_(1, ids, pages[:, :, 1].transpose(0, 1))
            copy.end.record()
        return copy

    def _pages(self, buffer: torch.Tensor) -> torch.Tensor:
        """[num_blocks, num_layers, 2, heads, tokens, dim] of a buffer's rows."""
        num_layers, _, num_heads, page_size, head_dim = self._cache.keys.shape
        return buffer.view(self._cache.keys.dtype).view(-1, num_layers, 2, num_heads, page_size, head_dim)

    def _take_ids(self, blocks: Int32Array, end: Event) -> torch.Tensor:
        """Block ids on the device, by the current stream; kept until `end` has passed."""
        slot = self._serial % _RING
        self._serial += 1
        user = self._users[slot]
        if user is not None:
            user.synchronize()
        self._users[slot] = end
        self._ids[slot, : len(blocks)].copy_(torch.from_numpy(blocks.astype(np.int64)))
        ids = self._device_ids[slot, : len(blocks)]
        ids.copy_(self._ids[slot, : len(blocks)], non_blocking=True)
        return ids
