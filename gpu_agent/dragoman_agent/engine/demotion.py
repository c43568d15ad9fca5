"""Copies of idle cached blocks to the tiers below, made before the blocks are evicted: an eviction then costs nothing.

Where room is short or the engine has nothing else to do, the block that has been idle for longest goes next, after those before it
in its prefix. A block that is evicted before its turn is dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from dragoman_agent.cache.block_pool import BlockPool
from dragoman_agent.cache.disk_tier import DiskTier
from dragoman_agent.cache.hashing import PageHash
from dragoman_agent.cache.host_tier import HostTier
from dragoman_agent.cache.lower_tiers import LowerTiers
from dragoman_agent.cache.tier_choice import TierName
from dragoman_agent.cache.tier_index import TierEntry, TierIndex
from dragoman_agent.device.base import BlockCopy, BlockDevice, DeviceError, UInt8Array

# Blocks that leave the device in a turn: some a second, so that the host's work for them stays near a hundredth of its time.
MIN_NUM_BLOCKS, BLOCKS_A_SECOND, MAX_NUM_BLOCKS = 4, 2000, 64
_MAX_NUM_LOOKS = 32  # at idle blocks in a turn


@dataclass(slots=True)
class Moved:
    """What has crossed in one direction of one tier since the start."""

    num_blocks: int = 0
    num_bytes: int = 0
    seconds: float = 0.0

    def add(self, num_blocks: int, num_bytes: int, seconds: float) -> None:
        """Some more."""
        self.num_blocks += num_blocks
        self.num_bytes += num_bytes
        self.seconds += seconds


@dataclass(slots=True)
class _Leaving:
    copy: BlockCopy
    tier: TierName
    blocks: list[tuple[TierEntry, UInt8Array]] = field(default_factory=list)
    pinned: list[int] = field(default_factory=list)


class Demoter:
    """Owns the copy that leaves the device, and the order in which blocks go down."""

    def __init__(self, device: BlockDevice, pool: BlockPool, tiers: LowerTiers) -> None:
        self._device = device
        self._pool = pool
        self._tiers = tiers
        self._block_bytes = device.block_format.block_bytes
        self._max_num_blocks = min(device.max_num_copied_blocks, MAX_NUM_BLOCKS)
        self._begun = 0.0  # when the last copy was
        self._leaving: _Leaving | None = None
        self._chain: deque[tuple[PageHash, bytes]] = deque()  # next to leave the device
        self._unsaved: deque[bytes] = deque()  # came to the host, the oldest first, and may not be on disk
        self._host_chain: deque[tuple[PageHash, bytes]] = deque()  # next from host to disk
        self.to_host = Moved()
        pool.follow()

    @property
    def held_blocks(self) -> list[int]:
        """Blocks of the pool that are being copied."""
        return [] if self._leaving is None else self._leaving.pinned

    def turn(self, now: float, *, is_idle: bool) -> bool:
        """Take in what was copied, and begin the next copies; whether there was anything to do. Beside the device's work."""
        self._finish()
        pool = self._pool
        for digest in pool.take_evicted():
            self._tiers.num_dropped += not self._tiers.holds(digest)
        if self._tiers.problem:
            return self._leaving is not None
        worked = self._leaving is not None
        if not worked and (is_idle or 4 * pool.num_unused < pool.num_blocks):
            worked = self._begin(now)
        return self._save(is_idle=is_idle) or worked

    # Device to host, or to disk where there is no host tier.

    def _begin(self, now: float) -> bool:
        target = self._target(now)
        if target is None:
            return False
        tier, index, limit = target
        chosen: list[tuple[TierEntry, int]] = []
        for entry, block in self._next_blocks(index):
            chosen.append((entry, block))
            if len(chosen) == limit:
                break
        if not chosen:
            return False
        self._begun = now
        rows = [self._row(tier, entry) for entry, _ in chosen]
        self._pool.pin([block for _, block in chosen])
        try:
            copy = self._device.copy_out(np.array([block for _, block in chosen], dtype=np.int32), rows)
        except DeviceError as error:
            self._pool.unpin([block for _, block in chosen])
            self._give_up(tier, [(entry, row) for (entry, _), row in zip(chosen, rows, strict=True)], str(error))
            return True
        moving = [(entry, row) for (entry, _), row in zip(chosen, rows, strict=True)]
        self._leaving = _Leaving(copy, tier, moving, [block for _, block in chosen])
        self._finish()
        return True

    def _target(self, now: float) -> tuple[TierName, TierIndex, int] | None:
        """Where blocks go from the device, and how many may now."""
        host, disk = self._tiers.host, self._tiers.disk
        if host is not None:
            allowed = max(MIN_NUM_BLOCKS, int(BLOCKS_A_SECOND * (now - self._begun)))
            # What leaves cannot be had meanwhile.
            most = min(self._max_num_blocks, max(self._pool.num_free // 8, 1))
            return "host", host.index, min(allowed, most)
        # Half of the staging rows are left to what comes back.
        limit = min(len(self._tiers.staging) - self._tiers.num_staging // 2, 1)
        if disk is None or not disk.can_write or limit < 1:
            return None
        return "disk", disk.index, limit

    def _next_blocks(self, index: TierIndex) -> Iterator[tuple[TierEntry, int]]:
        """Blocks to copy with their reserved entries, parents first."""
        pool = self._pool
        for _ in range(_MAX_NUM_LOOKS):
            while self._chain:
                page, parent = self._chain.popleft()
                block = pool.block_of(page.digest)
                entry = None if block is None else index.reserve(page, parent)
                if block is None or entry is None:
                    self._chain.clear()  # evicted meanwhile, or no room below: what continues it cannot go either
                    break
                yield entry, block
            block = pool.next_idle()
            if block is None:
                return
            self._chain.extend(index.missing_chain(self._ancestry(block)))

    def _ancestry(self, block: int | None) -> Iterator[tuple[PageHash, bytes]]:
        while block is not None:
            page, parent = self._pool.name_of(block)
            yield page, parent
            block = self._pool.block_of(parent) if parent else None

    def _row(self, tier: TierName, entry: TierEntry) -> UInt8Array:
        if tier == "disk":
            return self._tiers.staging.pop()
        assert self._tiers.host is not None
        return self._tiers.host.row(entry.slot)

    def _finish(self) -> None:
        leaving = self._leaving
        if leaving is None:
            return
        try:
            if not leaving.copy.is_done():
                return
        except DeviceError as error:
            self._leaving = None
            self._pool.unpin(leaving.pinned)
            self._give_up(leaving.tier, leaving.blocks, str(error))
            return
        self._leaving = None
        self._pool.unpin(leaving.pinned)
        host, disk = self._tiers.host, self._tiers.disk
        if leaving.tier == "host":
            assert host is not None
            self.to_host.add(len(leaving.blocks), len(leaving.blocks) * self._block_bytes, leaving.copy.seconds)
            for entry, _ in leaving.blocks:
                host.index.commit(entry)
                if disk is not None and not disk.problem:
                    self._unsaved.append(entry.page.digest)
            return
        assert disk is not None
        for entry, row in leaving.blocks:
            disk.write(entry, row, partial(self._tiers.staging.append, row))

    def _give_up(self, tier: TierName, blocks: list[tuple[TierEntry, UInt8Array]], problem: str) -> None:
        host, disk = self._tiers.host, self._tiers.disk
        for entry, row in blocks:
            if tier == "host" and host is not None:
                host.index.abandon(entry)
            elif disk is not None:
                disk.index.abandon(entry)
                self._tiers.staging.append(row)
        self._tiers.turn_off(problem)

    # Host to disk.

    def _save(self, *, is_idle: bool) -> bool:
        """Write what the host tier may have to let go; whether anything was begun."""
        host, disk = self._tiers.host, self._tiers.disk
        if host is None or disk is None or not (self._unsaved or self._host_chain):
            return False
        if disk.problem:
            self._unsaved.clear()
            self._host_chain.clear()
            return False
        if not is_idle and 4 * host.index.num_free >= host.index.capacity:
            return False
        return self._write_next(host, disk)

    def _write_next(self, host: HostTier, disk: DiskTier) -> bool:
        worked = False
        looks = 0
        while disk.can_write and looks < _MAX_NUM_LOOKS:
            if not self._host_chain:
                if not self._unsaved:
                    return worked
                looks += 1
                digest = self._unsaved.popleft()
                self._host_chain.extend(
                    disk.index.missing_chain((e.page, e.parent) for e in _upwards(host.index, digest))
                )
                continue
            page, parent = self._host_chain.popleft()
            source = host.index.held(page.digest)
            entry = None if source is None else disk.index.reserve(page, parent)
            if source is None or entry is None:
                self._host_chain.clear()
                continue
            host.index.pin(source)
            ended: Callable[[], None] = partial(host.index.unpin, source, is_used=False)
            disk.write(entry, host.row(source.slot), ended)
            worked = True
        return worked


def _upwards(index: TierIndex, digest: bytes) -> Iterator[TierEntry]:
    """A block and those before it."""
    while digest:
        entry = index.held(digest)
        if entry is None:
            return
        yield entry
        digest = entry.parent
