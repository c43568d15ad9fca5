"""A GPU's KV blocks on their way out and in, and memory given back: what a device has beside its steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import NoReturn

import torch

from dragoman_agent.device import torch_blocks
from dragoman_agent.device.base import BlockFormat, DeviceError, DeviceMemoryError, Int32Array, UInt8Array
from dragoman_agent.device.error_text import first_line
from dragoman_agent.device.torch_copies import BlockCopier, EventCopy
from dragoman_agent.device.torch_runtime import Runtime, Stream, is_no_memory
from dragoman_agent.model.layers import PagedCache


class CudaBlocks:
    """Implements BlockDevice over the cache of a loaded device, which sets what is declared here."""

    errors: tuple[type[Exception], ...]
    _runtime: Runtime
    _wrong: tuple[type[Exception], ...]  # what is wrong with the data, and with the device
    _loaded: bool
    _stream: Stream  # of the steps
    _cache: PagedCache
    _copier: BlockCopier

    @property
    def block_format(self) -> BlockFormat:
        """See BlockDevice."""
        self._check_loaded()
        return torch_blocks.block_format(self._cache)

    def read_blocks(self, blocks: Int32Array) -> UInt8Array:
        """See BlockDevice: on the stream of the steps."""
        self._check_loaded()
        with self._moving_blocks():
            return torch_blocks.read_blocks(self._cache.raw, blocks)

    def write_blocks(self, blocks: Int32Array, data: UInt8Array) -> None:
        """See BlockDevice: on the stream of the steps."""
        self._check_loaded()
        with self._moving_blocks():
            torch_blocks.write_blocks(self._cache.raw, blocks, data)

    @property
    def max_num_copied_blocks(self) -> int:
        """See BlockDevice."""
        return self._block_copier.max_num_blocks

    def new_rows(self, num_blocks: int) -> UInt8Array:
        """See BlockDevice: pinned."""
        wrong: tuple[type[Exception], ...] = (RuntimeError, *self._wrong)
        try:
            self._runtime.activate()  # in a thread of its own another device is current
            return self._block_copier.new_rows(num_blocks)
        except wrong as error:
            raise DeviceError(
                f"host memory for {num_blocks} KV blocks could not be pinned: {first_line(error)}"
            ) from error

    def copy_out(self, blocks: Int32Array, rows: Sequence[UInt8Array]) -> EventCopy:
        """See BlockDevice."""
        copier = self._block_copier
        with self._moving_blocks():
            return copier.copy_out(blocks, rows)

    def copy_in(self, rows: Sequence[UInt8Array], blocks: Int32Array) -> EventCopy:
        """See BlockDevice."""
        copier = self._block_copier
        with self._moving_blocks():
            return copier.copy_in(rows, blocks)

    @property
    def _block_copier(self) -> BlockCopier:
        """Made when first asked for: its buffers are of use to an engine with tiers alone."""
        self._check_loaded()
        if not hasattr(self, "_copier"):
            with self._moving_blocks():
                self._copier = BlockCopier(self._runtime, self._cache.raw, self._stream)
        return self._copier

    def _moving_blocks(self) -> AbstractContextManager[None]:
        return self._on_stream("KV blocks could not be moved on the GPU", "there is no room to move KV blocks")

    @contextmanager
    def _on_stream(self, failed: str, no_room: str) -> Iterator[None]:
        """On the stream of the steps, where the thread stays; what goes wrong inside is as `_fail` has it."""
        try:
            self._runtime.stay_on(self._stream)
            with torch.inference_mode():
                yield
        except self._wrong as error:
            self._fail(error, failed, no_room)

    def _fail(self, error: Exception, failed: str, no_room: str) -> NoReturn:
        """Raise a DeviceError that begins with one of these words."""
        what = first_line(error)
        if not is_no_memory(what):
            raise DeviceError(f"{failed}: {what}") from error
        self._release_unused()
        raise DeviceMemoryError(f"{no_room}: {what}") from None

    def _release_unused(self) -> None:
        """Give back what no tensor holds, so that another try finds it whole."""
        with suppress(*self.errors):
            self._stream.synchronize()
            self._runtime.release()

    def _check_loaded(self) -> None:
        if not self._loaded:
            raise DeviceError("No model is loaded on this device; load one first.")
