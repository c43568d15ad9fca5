"""The one owner of the slots of a tier below the device: which KV block lies where, and which goes when room is needed.

Entries are named as in the prefix cache. A block's parent is in the same tier for as long as the block is: what is brought
back is a whole prefix or nothing. Torch-free, no effects.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from dragoman_agent.cache.hashing import PageHash


@dataclass(slots=True, eq=False)
class TierEntry:
    """One block. A slot is another's only when nothing reads or writes it any more."""

    slot: int
    page: PageHash
    parent: bytes  # digest of the block before it, empty for the first
    num_pins: int = 1  # copies from or to the slot under way
    is_held: bool = False  # its contents are there
    is_gone: bool = False  # no longer in the tier; the slot is free once no copy uses it
    last_used: int = 0


class TierIndex:
    """Slots 0 .. capacity - 1, each in exactly one state: free, being written, held, or gone and still in use by a copy."""

    def __init__(self, capacity: int = 0) -> None:
        self._entries: dict[bytes, TierEntry] = {}
        self._children: dict[bytes, set[bytes]] = {}
        self._last_of_unit: dict[bytes, bytes] = {}  # first 8 bytes of a unit's hash -> the block it ends in
        self._free: list[int] = []  # slots that were used and are free again
        self._num_used = 0  # slots below it have been handed out; those from it on never were, and take no memory
        self._leaves: list[tuple[int, int, TierEntry]] = []  # heap of (last used, order, entry); stale ones are skipped
        self._clock = 0
        self._stored: list[bytes] = []
        self._removed: list[bytes] = []
        self._evicted: list[PageHash] = []
        self.capacity = 0
        self.num_held = 0
        self.grow(capacity)

    def grow(self, num_slots: int) -> None:
        """More slots. A directory may be given far more than it ever holds: slots are numbered when they are taken."""
        self.capacity += num_slots

    @property
    def num_free(self) -> int:
        """Slots that hold nothing."""
        return len(self._free) + self.capacity - self._num_used

    @property
    def num_entries(self) -> int:
        """Blocks held or being written."""
        return len(self._entries)

    def get(self, digest: bytes) -> TierEntry | None:
        """The block of that name, held or being written."""
        return self._entries.get(digest)

    def held(self, digest: bytes) -> TierEntry | None:
        """The block of that name when its contents are there."""
        entry = self._entries.get(digest)
        return entry if entry is not None and entry.is_held else None

    def reserve(self, page: PageHash, parent: bytes) -> TierEntry | None:
        """A slot to write a block into, pinned; the least recently used leaf goes for it where none is free.

        None, changing nothing, when the block is here already, its parent is not, or no slot can be had.
        """
        if page.digest in self._entries or (parent and parent not in self._entries):
            return None
        slot = self._take_free() if self.num_free else self._evict(parent)
        if slot is None:
            return None
        entry = TierEntry(slot, page, parent)
        self._entries[page.digest] = entry
        if parent:
            self._children.setdefault(parent, set()).add(page.digest)
        return entry

    def commit(self, entry: TierEntry) -> None:
        """The contents of a reserved slot are there: it can be read. One that is gone meanwhile is only unpinned."""
        if not entry.is_gone:
            entry.is_held = True
            self.num_held += 1
            self._stored.extend(entry.page.units)
            for unit in entry.page.units:
                self._last_of_unit[unit[:8]] = entry.page.digest
        self.unpin(entry)

    def abandon(self, entry: TierEntry) -> None:
        """A reserved slot was not written: the block, and what continues it, is not here."""
        if not entry.is_gone:
            self.discard(entry.page.digest)
        self.unpin(entry)

    def pin(self, entry: TierEntry) -> None:
        """A copy reads the slot: it stays as it is until `unpin`."""
        entry.num_pins += 1

    def unpin(self, entry: TierEntry, *, is_used: bool = True) -> None:
        """A copy is done with the slot; it counts as used now, unless the copy was for a tier further down."""
        if entry.num_pins <= 0:
            raise ValueError(f"slot {entry.slot} is unpinned more often than it was pinned")
        entry.num_pins -= 1
        if entry.is_gone:
            if not entry.num_pins:
                self._free.append(entry.slot)
            return
        if is_used:
            self.touch(entry)
        else:
            self._offer(entry)

    def touch(self, entry: TierEntry) -> None:
        """The block was used."""
        self._clock += 1
        entry.last_used = self._clock
        self._offer(entry)

    def discard(self, digest: bytes) -> list[PageHash]:
        """Forget a block and all that continue it; the blocks that were here. Copies under way keep their slots."""
        gone: list[PageHash] = []
        pending = [digest]
        while pending:
            entry = self._entries.get(pending.pop())
            if entry is not None:
                pending.extend(self._children.get(entry.page.digest, ()))
                self._drop(entry)
                gone.append(entry.page)
        return gone

    def clear(self) -> None:
        """Forget everything."""
        for digest in [digest for digest, entry in self._entries.items() if not entry.parent]:
            self.discard(digest)

    def missing_chain(self, chain: Iterable[tuple[PageHash, bytes]]) -> list[tuple[PageHash, bytes]]:
        """Of a block and those before it, (name, parent's digest) the last first: what is not here, the first first."""
        missing: list[tuple[PageHash, bytes]] = []
        for page, parent in chain:
            if page.digest in self._entries:
                break
            missing.append((page, parent))
        missing.reverse()
        return missing

    def chain(self, digest: bytes) -> list[TierEntry]:
        """The blocks from the start of a prefix to this one; [] when it is not held."""
        found: list[TierEntry] = []
        while digest:
            entry = self.held(digest)
            if entry is None:
                return []
            found.append(entry)
            digest = entry.parent
        found.reverse()
        return found

    def chain_to_unit(self, unit: bytes) -> list[TierEntry]:
        """The same for the block in which a unit (first 8 bytes of its hash) ends."""
        digest = self._last_of_unit.get(unit)
        return [] if digest is None else self.chain(digest)

    def take_events(self) -> tuple[list[bytes], list[bytes]]:
        """Units that came and that went since the last call, 32 bytes each, in order within each list."""
        stored, self._stored = self._stored, []
        removed, self._removed = self._removed, []
        return stored, removed

    def take_evicted(self) -> list[PageHash]:
        """Blocks that went to make room since the last call."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def _take_free(self) -> int:
        if self._free:
            return self._free.pop()
        self._num_used += 1
        return self._num_used - 1

    def _evict(self, parent: bytes) -> int | None:
        """Drop the least recently used leaf that no copy uses and that is not `parent`; its slot."""
        kept: list[tuple[int, int, TierEntry]] = []
        slot = None
        while self._leaves:
            item = heapq.heappop(self._leaves)
            entry = item[2]
            if item[0] != entry.last_used or not self._may_go(entry):
                continue
            if entry.page.digest == parent:
                kept.append(item)
                continue
            self._evicted.append(entry.page)
            self._drop(entry)
            slot = self._free.pop()
            break
        for item in kept:
            heapq.heappush(self._leaves, item)
        return slot

    def _may_go(self, entry: TierEntry) -> bool:
        return entry.is_held and not entry.is_gone and not entry.num_pins and entry.page.digest not in self._children

    def _offer(self, entry: TierEntry) -> None:
        if self._may_go(entry):
            self._clock += 1
            heapq.heappush(self._leaves, (entry.last_used, self._clock, entry))
            if len(self._leaves) > 4 * self.capacity + 16:
                # Stale entries pile up when the same blocks are used again and again.
                live = (one for one in self._entries.values() if self._may_go(one))
                self._leaves = [(one.last_used, index, one) for index, one in enumerate(live)]
                heapq.heapify(self._leaves)

    def _drop(self, entry: TierEntry) -> None:
        page = entry.page
        del self._entries[page.digest]
        siblings = self._children.get(entry.parent)
        if siblings is not None:
            siblings.discard(page.digest)
            if not siblings:
                del self._children[entry.parent]
                parent = self._entries.get(entry.parent)
                if parent is not None:
                    self._offer(parent)
        if entry.is_held:
            self.num_held -= 1
            self._removed.extend(page.units)
            for unit in page.units:
                if self._last_of_unit.get(unit[:8]) == page.digest:
                    del self._last_of_unit[unit[:8]]
        entry.is_gone = True
        if not entry.num_pins:
            self._free.append(entry.slot)
