"""What lies below the device: the host tier, the disk tier, and the rows through which blocks cross. Torch-free."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dragoman_agent.cache.disk_tier import DiskTier
from dragoman_agent.cache.hashing import PageHash
from dragoman_agent.cache.host_tier import HostTier
from dragoman_agent.cache.tier_choice import TierName, TierRate
from dragoman_agent.cache.tier_index import TierEntry, TierIndex

logger = logging.getLogger(__name__)

UInt8Array = npt.NDArray[np.uint8]


class Found(NamedTuple):
    """A block in a lower tier."""

    tier: TierName
    entry: TierEntry


class LowerTiers:
    """Owns both tiers and the staging rows. Used from one thread."""

    def __init__(
        self, host: HostTier | None, disk: DiskTier | None, staging: UInt8Array, link_rate: float = 0.0
    ) -> None:
        """`staging`: rows for blocks that pass between device and disk. `link_rate`: host to device in bytes/s, 0 unknown."""
        self.host = host
        self.disk = disk
        self.problem = ""  # why nothing moves any more
        self.staging: list[UInt8Array] = list(staging)
        self.num_staging = len(self.staging)
        self.rates: dict[TierName, TierRate] = {"host": TierRate(link_rate), "disk": TierRate()}
        self._num_holding: dict[bytes, int] = {}  # tiers that hold a unit
        self._tells_all = False
        self.num_dropped = 0  # blocks that left the lowest tier, or the device without having been copied

    @property
    def indices(self) -> list[tuple[TierName, TierIndex]]:
        """Those there are, the quicker first."""
        found: list[tuple[TierName, TierIndex]] = []
        if self.host is not None:
            found.append(("host", self.host.index))
        if self.disk is not None:
            found.append(("disk", self.disk.index))
        return found

    def poll(self) -> None:
        """Take in what was done beside this thread, and what went."""
        if self.host is not None:
            self.host.poll()
            for page in self.host.index.take_evicted():
                self.num_dropped += not self.holds(page.digest)
        if self.disk is not None:
            self.disk.poll()

    def holds(self, digest: bytes) -> bool:
        """Whether a lower tier has the block."""
        return any(index.held(digest) is not None for _, index in self.indices)

    def run(self, pages: Iterable[PageHash]) -> list[Found]:
        """Where the blocks of `pages` lie, from the first on until one is nowhere."""
        found: list[Found] = []
        indices = self.indices
        for page in pages:
            for name, index in indices:
                entry = index.held(page.digest)
                if entry is not None:
                    found.append(Found(name, entry))
                    break
            else:
                return found
        return found

    def host_rows(self, pages: Iterable[PageHash]) -> list[tuple[TierEntry, UInt8Array]]:
        """The blocks of `pages` in host memory, from the first on until one is not there. Read them at once."""
        rows: list[tuple[TierEntry, UInt8Array]] = []
        for page in pages if self.host is not None else ():
            assert self.host is not None
            entry = self.host.index.held(page.digest)
            if entry is None:
                break
            rows.append((entry, self.host.row(entry.slot)))
        return rows

    def chain_to_unit(self, unit: bytes) -> list[PageHash]:
        """Pages from the start of a prefix to the one in which `unit` (first 8 bytes of its hash) ends; [] when not here."""
        for _, index in self.indices:
            chain = index.chain_to_unit(unit)
            if chain:
                return [entry.page for entry in chain]
        return []

    def pin(self, found: Sequence[Found]) -> None:
        """Keep them as they are until `unpin`."""
        for tier, entry in found:
            self._index(tier).pin(entry)

    def unpin(self, found: Sequence[Found]) -> None:
        """They were used, or are not wanted any more."""
        for tier, entry in found:
            self._index(tier).unpin(entry)

    def forget(self, digest: bytes) -> None:
        """Drop a block and all that continue it: their contents are not to be trusted."""
        if self.host is not None:
            self.host.index.discard(digest)
        if self.disk is not None:
            self.disk.discard(digest)

    def take_events(self) -> tuple[list[bytes], list[bytes]]:
        """(units that came to the lower tiers, units that left them) since the last call, 32 bytes each."""
        if self._tells_all:
            self._tells_all = False
            self._count_changes({})
            return list(self._num_holding), []
        before: dict[bytes, int] = {}
        self._count_changes(before)
        came: list[bytes] = []
        went: list[bytes] = []
        for unit, count in before.items():
            now = self._num_holding.get(unit, 0)
            if bool(now) is not bool(count):
                (came if now else went).append(unit)
        return came, went

    def tell_all(self) -> None:
        """Somebody else listens from now on: the next `take_events` tells all that is held."""
        self._tells_all = True

    def _count_changes(self, before: dict[bytes, int]) -> None:
        """Take the changes into the count of tiers that hold a unit; `before` gets the counts of those that changed."""
        holding = self._num_holding
        for _, index in self.indices:
            stored, removed = index.take_events()
            for units, change in ((stored, 1), (removed, -1)):
                for unit in units:
                    count = holding.get(unit, 0)
                    before.setdefault(unit, count)
                    holding[unit] = count + change
        for unit in before:
            if not holding[unit]:
                del holding[unit]

    def turn_off(self, reason: str) -> None:
        """Nothing is moved from now on; what is on disk stays for the next run."""
        if not self.problem:
            self.problem = f"KV tiers are off until the agent starts again: {reason}"
            logger.warning("%s; blocks that are evicted are computed again", self.problem)
            if self.host is not None:
                self.host.index.clear()

    def close(self) -> None:
        """Let go of the disk."""
        if self.disk is not None:
            self.disk.close()

    def _index(self, tier: TierName) -> TierIndex:
        owner = self.host if tier == "host" else self.disk
        assert owner is not None, "a tier that found something exists"
        return owner.index
