"""Cached KV blocks to and from other agents: read out by the hash of a prefix, or written in and entered into the cache.

Between two steps only. A block that comes in has the hash its tokens would give, so whoever sends that prefix next finds it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from dragoman_agent.cache.block_pool import BlockPool
from dragoman_agent.cache.hashing import PageHash
from dragoman_agent.cache.tier_index import TierEntry
from dragoman_agent.device.base import BlockDevice, BlockFormat, DeviceMemoryError, UInt8Array
from dragoman_agent.engine.messages import (
    BlocksExported,
    BlocksImported,
    BlocksUsed,
    CachedBlock,
    ExportBlocks,
    ImportBlocks,
)

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from dragoman_agent.engine.tiers import KvTiers

Answer = BlocksExported | BlocksImported | BlocksUsed


class BlockExchange:
    """Owns which blocks came from elsewhere and were not used yet. `answers` are taken by who sends them."""

    def __init__(self, device: BlockDevice, pool: BlockPool, num_reserved: int) -> None:
        """`num_reserved`: blocks that are left to the sequences, whatever is offered."""
        self._device = device
        self._pool = pool
        self._num_reserved = num_reserved
        self._imported: dict[int, tuple[bytes, str]] = {}  # block -> its hash, and the exchange that brought it
        self.answers: list[Answer] = []
        self.tiers: KvTiers | None = None

    @property
    def format(self) -> BlockFormat:
        """Of the device's blocks."""
        return self._device.block_format

    def receive(self, command: ExportBlocks | ImportBlocks) -> None:
        """Do it now; what the device has no memory to copy is not sent, or not taken. Raises DeviceError."""
        if isinstance(command, ExportBlocks):
            self.answers.append(self._export(command))
        else:
            self.answers.append(self._import(command))

    def _export(self, command: ExportBlocks) -> BlocksExported:
        chain = self._chain(command)
        below = self._below(command, chain)
        last = command.first + command.max_num_blocks
        wanted = chain[command.first : last]
        blocks = []
        if wanted:
            try:
                data = self._device.read_blocks(np.array(wanted, dtype=np.int32))
            except DeviceMemoryError as error:
                logger.warning("%d KV blocks are not sent: %s", len(wanted), error)
                return BlocksExported(command.exchange_id, [], 0)
            blocks = [self._described(block, data[row].tobytes()) for row, block in enumerate(wanted)]
        for entry, row in below[max(command.first - len(chain), 0) : max(last - len(chain), 0)]:
            blocks.append(CachedBlock(entry.page.digest, entry.parent, list(entry.page.units), row.tobytes()))
        return BlocksExported(command.exchange_id, blocks, len(chain) + len(below))

    def _chain(self, command: ExportBlocks) -> list[int]:
        """Blocks to send in order, as many of them as are cached from the first on."""
        if command.digests:
            return self._pool.lookup_prefix(PageHash(digest, ()) for digest in command.digests)
        for unit in reversed(command.units):
            chain = self._pool.chain_to_unit(unit)
            if chain:
                return chain
        return []

    def _below(self, command: ExportBlocks, chain: list[int]) -> list[tuple[TierEntry, UInt8Array]]:
        """Blocks that continue the chain in the host tier."""
        if self.tiers is None:
            return []
        if command.digests:
            pages = [PageHash(digest, ()) for digest in command.digests]
        else:
            pages = next(filter(None, map(self.tiers.lower.chain_to_unit, reversed(command.units))), [])
            if len(chain) >= len(pages) or self._pool.lookup_prefix(pages[: len(chain)]) != chain:
                return []
        return self.tiers.lower.host_rows(pages[len(chain) :])

    def _described(self, block: int, data: bytes) -> CachedBlock:
        page, parent = self._pool.name_of(block)
        return CachedBlock(page.digest, parent, list(page.units), data)

    def _import(self, command: ImportBlocks) -> BlocksImported:
        """Take blocks in order until one does not continue what is cached, or there is no room."""
        table: list[int] = []
        new: list[tuple[int, CachedBlock]] = []
        pool = self._pool
        num_present, problem = 0, ""
        for offered in command.blocks:
            page = PageHash(offered.digest, tuple(offered.units))
            present = pool.lookup_prefix((page,))
            if present:
                pool.acquire(present)
                table += present
                num_present += 1
                continue
            parent = PageHash(offered.parent, ()) if offered.parent else None
            if not self._fits(offered, parent) or pool.append(table) is None:
                break
            pool.cache_full_block(table[-1], page, parent)
            new.append((table[-1], offered))
        if new:
            data = np.frombuffer(b"".join(block.data for _, block in new), dtype=np.uint8)
            ids = np.array([block for block, _ in new], dtype=np.int32)
            try:
                self._device.write_blocks(ids, data.reshape(len(new), -1))
            except DeviceMemoryError as error:
                logger.warning("%d KV blocks are not taken: %s", len(new), error)
                pool.uncache([block for block, _ in new])
                new, problem = [], str(error)
            self._imported.update({block: (offered.digest, command.exchange_id) for block, offered in new})
        # The last of them is the first to be evicted, as with a sequence that ends.
        pool.free(table)
        return BlocksImported(command.exchange_id, len(new), num_present, problem)

    def _fits(self, offered: CachedBlock, parent: PageHash | None) -> bool:
        if len(offered.data) != self.format.block_bytes or not self._pool.can_allocate(1 + self._num_reserved):
            return False
        return parent is None or bool(self._pool.lookup_prefix((parent,)))

    def note_brought(self, blocks: list[tuple[int, bytes]], exchange_id: str) -> None:
        """Blocks that came up from a lower tier for a request to come: (block, its hash)."""
        self._imported.update({block: (digest, exchange_id) for block, digest in blocks})

    def note_use(self, blocks: list[int]) -> None:
        """A sequence starts from these cached blocks: whoever brought some of them hears of it, once."""
        if not self._imported:
            return
        used = set()
        for block in blocks:
            brought = self._imported.pop(block, None)
            if brought is not None and self._pool.is_cached_as(block, brought[0]):
                used.add(brought[1])
        for exchange_id in used:
            self._imported = {b: entry for b, entry in self._imported.items() if entry[1] != exchange_id}
            self.answers.append(BlocksUsed(exchange_id))
