"""The tier in host memory: slots of an arena that is taken in pieces beside the first requests. Torch-free."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from dragoman_agent.cache.tier_index import TierIndex

logger = logging.getLogger(__name__)

UInt8Array = npt.NDArray[np.uint8]

PIECE_BYTES = 128 << 20  # a power of two: memory is pinned in such sizes


class HostTier:
    """Owns the arena and its index; `poll` lets in the pieces that have been taken since."""

    def __init__(
        self,
        num_blocks: int,
        block_bytes: int,
        new_rows: Callable[[int], UInt8Array],
        shortage: Callable[[], str] = lambda: "",
    ) -> None:
        """`new_rows(n)` gives [n, block_bytes] or raises RuntimeError; pinning takes a second for a few GiB.

        `shortage` says before each further piece why no more should be taken, such as other processes' need; empty for none.
        """
        self.index = TierIndex()
        self.num_planned = num_blocks
        self.problem = ""
        self._new_rows = new_rows
        self._shortage = shortage
        self._rows_a_piece = max(PIECE_BYTES // block_bytes, 1)
        self._pieces: list[UInt8Array] = []
        self._taken: deque[UInt8Array | str] = deque()
        if num_blocks <= self._rows_a_piece:
            self._take(num_blocks)
            self.poll()
        else:
            threading.Thread(target=self._take, args=(num_blocks,), name="kv-host-arena", daemon=True).start()

    def row(self, slot: int) -> UInt8Array:
        """Memory of a slot, [block_bytes]."""
        row: UInt8Array = self._pieces[slot // self._rows_a_piece][slot % self._rows_a_piece]
        return row

    def poll(self) -> None:
        """Let in what has been taken; say so once when there was not as much as planned."""
        while self._taken:
            piece = self._taken.popleft()
            if isinstance(piece, str):
                self.problem = (
                    f"the host tier of KV blocks has {self.index.capacity} of {self.num_planned} blocks: {piece}; "
                    "lower --kv-host-bytes"
                )
                logger.warning("%s", self.problem)
                continue
            self._pieces.append(piece)
            self.index.grow(len(piece))

    def _take(self, num_blocks: int) -> None:
        while num_blocks:
            count = min(num_blocks, self._rows_a_piece)
            begun = time.monotonic()
            try:
                self._taken.append(self._new_rows(count))
            except (RuntimeError, MemoryError) as error:
                self._taken.append(str(error))
                return
            num_blocks -= count
            if num_blocks:
                # While memory is pinned a driver launches nothing: the steps get their turn in between.
                time.sleep(time.monotonic() - begun)
                if why := self._shortage():
                    self._taken.append(why)
                    return
