"""Copies of KV blocks on devices whose blocks lie in host memory: done at once, or by the thread that runs the steps."""

from __future__ import annotations

from concurrent.futures import CancelledError, Future
from dataclasses import dataclass

import numpy as np

from dragoman_agent.device.base import DeviceError, UInt8Array


@dataclass(frozen=True, slots=True)
class DoneCopy:
    """Implements BlockCopy: it was done before it was handed out."""

    seconds: float

    def is_done(self) -> bool:
        """See BlockCopy."""
        return True


class FutureCopy:
    """Implements BlockCopy over the seconds that another thread will tell."""

    def __init__(self, future: Future[float]) -> None:
        self._future = future

    @property
    def seconds(self) -> float:
        """See BlockCopy."""
        return self._future.result() if self.is_done() else 0.0

    def is_done(self) -> bool:
        """See BlockCopy."""
        if not self._future.done():
            return False
        try:
            self._future.result()
        except (ValueError, MemoryError, RuntimeError, CancelledError) as error:
            raise DeviceError(f"KV blocks could not be copied: {error}") from error
        return True


def new_rows(num_blocks: int, block_bytes: int) -> UInt8Array:
    """Ordinary host memory, [num_blocks, block_bytes]. Raises DeviceError when there is not so much."""
    try:
        return np.empty((num_blocks, block_bytes), dtype=np.uint8)
    except MemoryError as error:
        raise DeviceError(f"{num_blocks * block_bytes} bytes of host memory for KV blocks cannot be had") from error
