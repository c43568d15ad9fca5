"""KV blocks between a GPU and pinned host memory, beside the steps: two streams and two buffers on the device each way.

A block is spread over the cache, layer by layer: it is gathered into a buffer and crosses the link in one piece, or the other way
round. While one buffer crosses, the other is gathered or scattered, so that the link does not rest. Both begin behind the steps
submitted so far, and no later step waits for them: who asks keeps the blocks as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided

from dragoman_agent.device import torch_blocks
from dragoman_agent.device.base import DeviceError, Int32Array, UInt8Array
from dragoman_agent.device.error_text import first_line
from dragoman_agent.device.torch_runtime import Event, Runtime, Stream
from dragoman_agent.model.layers import PagedCache

BUFFER_BYTES = 16 << 20  # two each way: a third of a millisecond of a quick link
MAX_COPY_BYTES = 512 << 20  # at once, through the buffers part by part
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
            raise DeviceError(f"the GPU failed while it copied KV blocks: {first_line(error)}") from error


class Buffer:
    """Rows on the device that one stream fills and another empties."""

    def __init__(self, runtime: Runtime, num_rows: int, block_bytes: int) -> None:
        self.rows = torch.empty((num_rows, block_bytes), dtype=torch.uint8, device=runtime.device)
        self.filled, self.emptied = runtime.new_event(), runtime.new_event()


Piece = Callable[[Buffer, slice], None]  # fills or empties a buffer with some of the blocks


class BlockCopier:
    """Owns the copy streams and the buffers. One thread calls it; `new_rows` alone may be called from another."""

    def __init__(self, runtime: Runtime, cache: PagedCache, steps: Stream) -> None:
        """`steps`: the stream of the steps. Takes four times `BUFFER_BYTES` on the device, or four blocks where one is larger."""
        self._runtime, self._cache, self._steps = runtime, cache, steps
        self._block_bytes = torch_blocks.block_format(cache).block_bytes
        self.max_num_blocks = max(MAX_COPY_BYTES // self._block_bytes, 1)
        self._num_rows = min(max(BUFFER_BYTES // self._block_bytes, 1), self.max_num_blocks)
        self._out, self._in = (
            [Buffer(runtime, self._num_rows, self._block_bytes) for _ in range(2)] for _ in ("out", "in")
        )
        self._gathering, self._leaving_link = runtime.new_stream(), runtime.new_stream()
        self._coming_link, self._scattering = runtime.new_stream(), runtime.new_stream()
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
        """See BlockDevice."""
        if self._leaving is not None and not self._leaving.is_done():
            raise DeviceError("blocks are still leaving the GPU; wait until that copy is done")
        copy = self._leaving = EventCopy(self._runtime)
        ids = self._begin(blocks, copy, self._gathering, self._leaving_link)
        copy.begin.record(self._gathering)
        self._pipe(
            len(blocks), self._out,
            self._gathering, lambda buffer, part: self._gather(ids[part], buffer),
            self._leaving_link, lambda buffer, part: self._leave(buffer, rows[part]),
        )  # fmt: skip
        copy.end.record(self._leaving_link)
        return copy

    def copy_in(self, rows: Sequence[UInt8Array], blocks: Int32Array) -> EventCopy:
        """See BlockDevice. A step under way may still write to the blocks, so it is waited for on the device."""
        copy = EventCopy(self._runtime)
        ids = self._begin(blocks, copy, self._scattering, self._coming_link)
        copy.begin.record(self._coming_link)
        self._pipe(
            len(blocks), self._in,
            self._coming_link, lambda buffer, part: self._come(rows[part], buffer),
            self._scattering, lambda buffer, part: self._scatter(buffer, ids[part]),
        )  # fmt: skip
        copy.end.record(self._scattering)
        return copy

    def _pipe(
        self, num_blocks: int, buffers: Sequence[Buffer], filling: Stream, fill: Piece, emptying: Stream, empty: Piece
    ) -> None:
        """Piece by piece through the buffers in turn: one is filled in one stream while another is emptied in the other."""
        for nth, start in enumerate(range(0, num_blocks, self._num_rows)):
            buffer, part = buffers[nth % len(buffers)], slice(start, start + self._num_rows)
            with self._runtime.on(filling):
                buffer.emptied.wait(filling)
                fill(buffer, part)
                buffer.filled.record(filling)
            with self._runtime.on(emptying):
                buffer.filled.wait(emptying)
                empty(buffer, part)
                buffer.emptied.record(emptying)

    def _gather(self, ids: torch.Tensor, buffer: Buffer) -> None:
        pages = self._pages(buffer.rows[: len(ids)])
        pages[:, :, 0].copy_(self._cache.keys.index_select(1, ids).transpose(0, 1))
        pages[:, :, 1].copy_(self._cache.values.index_select(1, ids).transpose(0, 1))

    def _scatter(self, buffer: Buffer, ids: torch.Tensor) -> None:
        pages = self._pages(buffer.rows[: len(ids)])
        self._cache.keys.index_copy_(1, ids, pages[:, :, 0].transpose(0, 1))
        self._cache.values.index_copy_(1, ids, pages[:, :, 1].transpose(0, 1))

    def _leave(self, buffer: Buffer, rows: Sequence[UInt8Array]) -> None:
        for first, host in _joined(rows):
            host.copy_(buffer.rows[first : first + len(host)], non_blocking=True)

    def _come(self, rows: Sequence[UInt8Array], buffer: Buffer) -> None:
        for first, host in _joined(rows):
            buffer.rows[first : first + len(host)].copy_(host, non_blocking=True)

    def _begin(self, blocks: Int32Array, copy: EventCopy, at_cache: Stream, at_link: Stream) -> torch.Tensor:
        """Ids of the blocks on the device, for the stream `at_cache`; kept until `copy` has ended.

        Both streams wait for the steps so far: the link's has no need to, but a copy's seconds would tell of the steps.
        """
        ready = self._runtime.new_event()
        ready.record(self._steps)
        ready.wait(at_link)
        with self._runtime.on(at_cache):
            ready.wait(at_cache)
            return self._take_ids(blocks, copy.end)

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


def _joined(rows: Sequence[UInt8Array]) -> list[tuple[int, torch.Tensor]]:
    """Rows that follow each other in memory as one, [count, block_bytes] with the index of the first: fewer, larger copies."""
    found: list[tuple[int, torch.Tensor]] = []
    first = 0
    for index in range(1, len(rows) + 1):
        if index < len(rows) and _follows(rows[index], rows[index - 1]):
            continue
        shape, strides = (index - first, rows[first].nbytes), (rows[first].nbytes, 1)
        found.append((first, torch.from_numpy(as_strided(rows[first], shape, strides))))
        first = index
    return found


def _follows(row: UInt8Array, before: UInt8Array) -> bool:
    """In the same allocation: two that happen to be neighbours are pinned each by itself."""
    return row.base is not None and row.base is before.base and row.ctypes.data == before.ctypes.data + before.nbytes
