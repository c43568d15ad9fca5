"""The one owner of KV block ids: free queue, reference counts, and the hash map of the prefix cache.

Blocks are ids only; block 0 is the null block that pads block tables and is never handed out. Block tables belong to the
sequences and only ever grow until they are freed whole.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Iterable, Sequence

from dragoman_agent.cache.hashing import PageHash


class BlockPool:
    """Blocks 1 .. num_blocks - 1, each in exactly one state: referenced, cached and idle, free, or withheld.

    An idle cached block is evicted, least recently used and leaves first, when a new block is needed; so a cached block's
    parent is cached too, always.
    """

    def __init__(self, num_blocks: int) -> None:
        """Raises ValueError when no block is left beside the null block."""
        if num_blocks < 2:
            raise ValueError(f"a pool of {num_blocks} blocks holds nothing: block 0 is the null block, give at least 2")
        self.num_blocks = num_blocks
        self._free: deque[int] = deque(range(1, num_blocks))
        self._num_references = [0] * num_blocks
        self._page_of: list[PageHash | None] = [None] * num_blocks
        self._parent_of: list[bytes] = [b""] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._children: dict[bytes, set[bytes]] = {}
        self._block_of_unit: dict[bytes, int] = {}  # first 8 bytes of a unit's hash -> the block it ends in
        self._num_idle = 0  # cached, referenced by no sequence
        self._last_used = [0] * num_blocks
        self._clock = 0
        self._idle_leaves: list[tuple[int, int]] = []  # heap of (last used, block); stale entries are skipped
        self._stored: list[bytes] = []
        self._removed: list[bytes] = []
        self._withheld: list[int] = []
        self.eviction_seconds = 0.0  # spent on evictions that an allocation waited for
        self._follows = False
        self._idle: deque[tuple[int, int]] = deque()  # (last used, block), the coldest first; stale entries are skipped
        self._evicted: list[bytes] = []

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now: free, or cached and idle."""
        return len(self._free) + self._num_idle

    @property
    def num_unused(self) -> int:
        """Blocks neither referenced, cached nor withheld."""
        return len(self._free)

    @property
    def num_withheld(self) -> int:
        """Blocks that are set aside, see `withhold`."""
        return len(self._withheld)

    @property
    def num_cached(self) -> int:
        """Blocks found by `lookup_prefix`, referenced or idle."""
        return len(self._block_of)

    def follow(self) -> None:
        """Keep account of what `next_idle` and `take_evicted` hand out. Call it while nothing is cached."""
        self._follows = True

    def next_idle(self) -> int | None:
        """The cached block that has been idle for longest, each time it became idle once; None when all were handed out."""
        while self._idle:
            used, block = self._idle.popleft()
            if self._is_idle_since(used, block):
                return block
        return None

    def take_evicted(self) -> list[bytes]:
        """Digests of the cached blocks that went since the last call."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def block_of(self, digest: bytes) -> int | None:
        """The block cached under `digest`."""
        return self._block_of.get(digest)

    def can_allocate(self, num_blocks: int) -> bool:
        """Whether `allocate(num_blocks)` would succeed."""
        return num_blocks <= len(self._free) + self._num_idle

    def allocate(self, num_blocks: int) -> list[int] | None:
        """New blocks with one reference each, evicting idle cached ones as needed; None when there are too few."""
        if not self.can_allocate(num_blocks):
            return None
        if num_blocks > len(self._free):
            begun = time.perf_counter()
            self.evict(num_blocks - len(self._free))
            self.eviction_seconds += time.perf_counter() - begun
        blocks = [self._free.popleft() for _ in range(num_blocks)]
        for block in blocks:
            self._num_references[block] = 1
        return blocks

    def withhold(self, num_blocks: int) -> int:
        """Set `num_blocks` aside so that nobody gets them, or give back what is over; how many are set aside now.

        Those that were never used go first: on a device that commits memory when it is touched, they take none. Idle
        cached blocks are evicted for it; what is referenced stays, so call again when it is fewer than asked for.
        """
        while len(self._withheld) > num_blocks:
            self._free.append(self._withheld.pop())
        missing = num_blocks - len(self._withheld)
        if missing > len(self._free):
            self.evict(missing - len(self._free))
        for _ in range(min(missing, len(self._free))):
            self._withheld.append(self._free.popleft())
        return len(self._withheld)

    def append(self, table: list[int]) -> int | None:
        """Add one new block to the end of `table`; None, changing nothing, when there is none."""
        blocks = self.allocate(1)
        if blocks is None:
            return None
        table.append(blocks[0])
        return blocks[0]

    def lookup_prefix(self, pages: Iterable[PageHash]) -> list[int]:
        """Blocks of the longest cached run of `pages` from the first on. Takes no reference."""
        blocks = []
        for page in pages:
            block = self._block_of.get(page.digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def chain_to_unit(self, unit: bytes) -> list[int]:
        """Blocks from the start of a prefix to the one in which `unit` (first 8 bytes of its hash) ends; [] when not cached."""
        block = self._block_of_unit.get(unit)
        chain: list[int] = []
        while block is not None:
            chain.append(block)
            parent = self._parent_of[block]
            if not parent:
                chain.reverse()
                return chain
            block = self._block_of.get(parent)
        return []

    def name_of(self, block: int) -> tuple[PageHash, bytes]:
        """Hash of a cached block, and that of the one before it, empty for the first. Raises ValueError."""
        page = self._page_of[block]
        if page is None:
            raise ValueError(f"block {block} is not cached")
        return page, self._parent_of[block]

    def is_cached_as(self, block: int, digest: bytes) -> bool:
        """Whether `block` is the one found under `digest`."""
        return self._block_of.get(digest) == block

    def acquire(self, blocks: Sequence[int]) -> None:
        """Take one reference of each of `blocks`, which `lookup_prefix` found."""
        for block in blocks:
            if self._num_references[block] == 0:
                if self._page_of[block] is None:
                    raise ValueError(f"block {block} is free; only cached or referenced blocks can be shared")
                self._num_idle -= 1
            self._num_references[block] += 1

    def pin(self, blocks: Sequence[int]) -> None:
        """Keep cached blocks as they are until `unpin`, without their counting as used."""
        self.acquire(blocks)

    def unpin(self, blocks: Sequence[int]) -> None:
        """Let go of pinned blocks: those that nobody else references are idle since when they were before."""
        for block in blocks:
            self._num_references[block] -= 1
            if self._num_references[block]:
                continue
            if self._page_of[block] is None:
                self._free.append(block)
                continue
            self._num_idle += 1
            if self._is_leaf(block):
                heapq.heappush(self._idle_leaves, (self._last_used[block], block))

    def num_idle_of(self, blocks: Sequence[int]) -> int:
        """How many of `blocks` no sequence references: acquiring them uses up that many of `num_free`."""
        return sum(1 for block in blocks if self._num_references[block] == 0)

    def free(self, table: list[int]) -> None:
        """Give back every reference of `table` and clear it. Its last block becomes the first to be evicted."""
        for block in reversed(table):
            count = self._num_references[block]
            if count <= 0:
                raise ValueError(f"block {block} is freed more often than it was taken")
            self._num_references[block] = count - 1
            if count == 1:
                self._release(block)
        table.clear()

    def cache_full_block(self, block: int, page: PageHash, parent: PageHash | None) -> bool:
        """Make `block`, whose page is full and computed, findable under `page`. `parent` is the page before it.

        False, changing nothing, when the page is cached already (in this or another block) or its parent is not.
        """
        if page.digest in self._block_of or self._page_of[block] is not None:
            return False
        if self._num_references[block] == 0:
            raise ValueError(f"block {block} is free; only a referenced block can be cached")
        if parent is not None:
            if parent.digest not in self._block_of:
                return False
            self._children.setdefault(parent.digest, set()).add(page.digest)
            self._parent_of[block] = parent.digest
        self._page_of[block] = page
        self._block_of[page.digest] = block
        self._stored.extend(page.units)
        for unit in page.units:
            self._block_of_unit[unit[:8]] = block
        return True

    def evict(self, num_blocks: int) -> int:
        """Move up to `num_blocks` idle cached blocks to the free queue, least recently used leaf first; how many it did."""
        done = 0
        while done < num_blocks and self._num_idle:
            block = self._oldest_leaf()
            if block is None:
                # Every idle block has a child in use through a duplicate of this block: drop the oldest with its children.
                block = min(self._idle_blocks(), key=self._last_used.__getitem__)
            before = len(self._free)
            self._uncache(block)
            done += len(self._free) - before
        return done

    def uncache(self, blocks: Iterable[int]) -> None:
        """Make `blocks`, and all cached blocks that continue them, unfindable. References stay."""
        for block in blocks:
            if self._page_of[block] is not None:
                self._uncache(block)

    def take_events(self) -> tuple[list[bytes], list[bytes]]:
        """(units that became cached, units no longer cached) since the last call, 32 bytes each.

        A unit that came and went in between is in neither list.
        """
        stored, removed = self._stored, self._removed
        if not stored and not removed:
            return [], []
        self._stored, self._removed = [], []
        held: dict[bytes, int] = {}
        for unit in stored:
            held[unit] = held.get(unit, 0) + 1
        for unit in removed:
            held[unit] = held.get(unit, 0) - 1
        return [u for u, n in held.items() if n > 0], [u for u, n in held.items() if n < 0]

    def _release(self, block: int) -> None:
        page = self._page_of[block]
        if page is None:
            self._free.append(block)
            return
        self._clock += 1
        self._last_used[block] = self._clock
        self._num_idle += 1
        if self._follows:
            self._idle.append((self._clock, block))
            if len(self._idle) > 4 * self.num_blocks:
                self._idle = deque(entry for entry in self._idle if self._is_idle_since(*entry))
        if page.digest not in self._children:
            heapq.heappush(self._idle_leaves, (self._clock, block))
        if len(self._idle_leaves) > 4 * self.num_blocks:
            self._rebuild_heap()

    def _is_idle_since(self, used: int, block: int) -> bool:
        return self._last_used[block] == used and self._num_references[block] == 0 and self._page_of[block] is not None

    def _rebuild_heap(self) -> None:
        """Stale entries pile up when the same blocks are shared and freed again and again."""
        self._idle_leaves = [(self._last_used[b], b) for b in self._idle_blocks() if self._is_leaf(b)]
        heapq.heapify(self._idle_leaves)

    def _idle_blocks(self) -> list[int]:
        return [block for block in self._block_of.values() if self._num_references[block] == 0]

    def _is_leaf(self, block: int) -> bool:
        page = self._page_of[block]
        return page is not None and page.digest not in self._children

    def _oldest_leaf(self) -> int | None:
        while self._idle_leaves:
            used, block = heapq.heappop(self._idle_leaves)
            if used == self._last_used[block] and self._num_references[block] == 0 and self._is_leaf(block):
                return block
        return None

    def _uncache(self, block: int) -> None:
        """Take `block` and its cached descendants out of the hash map; idle ones become free."""
        pending = [block]
        while pending:
            block = pending.pop()
            page = self._page_of[block]
            if page is None:
                continue
            pending.extend(self._block_of[child] for child in self._children.pop(page.digest, ()))
            self._unlink(block, page)
            if self._num_references[block] == 0:
                self._num_idle -= 1
                self._free.append(block)

    def _unlink(self, block: int, page: PageHash) -> None:
        parent = self._parent_of[block]
        siblings = self._children.get(parent)
        if siblings is not None:
            siblings.discard(page.digest)
            if not siblings:
                del self._children[parent]
                self._became_leaf(self._block_of[parent])
        self._parent_of[block] = b""
        self._page_of[block] = None
        del self._block_of[page.digest]
        if self._follows:
            self._evicted.append(page.digest)
        self._removed.extend(page.units)
        for unit in page.units:
            if self._block_of_unit.get(unit[:8]) == block:
                del self._block_of_unit[unit[:8]]

    def _became_leaf(self, block: int) -> None:
        if self._num_references[block] == 0:
            heapq.heappush(self._idle_leaves, (self._last_used[block], block))
