from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dragoman_agent.cache.block_pool import BlockPool
from dragoman_agent.cache.hashing import PageHash, PageHasher


def chain(*names: str) -> list[PageHash]:
    """Pages of a path, each named by everything up to it."""
    return [
        PageHash("/".join(names[: i + 1]).encode(), (b"u" + "/".join(names[: i + 1]).encode(),))
        for i in range(len(names))
    ]


def fill(pool: BlockPool, pages: list[PageHash]) -> list[int]:
    """A table for `pages`, shared as far as cached, computed and cached to the end."""
    table = pool.lookup_prefix(pages)
    pool.acquire(table)
    rest = pool.allocate(len(pages) - len(table))
    assert rest is not None
    table = table + rest
    for i, page in enumerate(pages):
        pool.cache_full_block(table[i], page, pages[i - 1] if i else None)
    return table


def test_allocation_is_all_or_nothing_and_never_hands_out_the_null_block() -> None:
    pool = BlockPool(5)
    assert pool.can_allocate(4) and not pool.can_allocate(5)
    assert pool.allocate(5) is None
    table = pool.allocate(4)
    assert table is not None and sorted(table) == [1, 2, 3, 4]
    assert pool.append(table) is None and len(table) == 4
    pool.free(table)
    assert table == [] and pool.num_free == 4


def test_freed_twice_is_an_error() -> None:
    pool = BlockPool(3)
    table = pool.allocate(1)
    assert table is not None
    stale = list(table)
    pool.free(table)
    with pytest.raises(ValueError, match="more often"):
        pool.free(stale)


def test_a_freed_prefix_is_found_again_and_shared() -> None:
    pool = BlockPool(10)
    pages = chain("a", "b", "c")
    table = fill(pool, pages)
    kept = list(table)
    pool.free(table)
    assert pool.num_free == 9 and pool.num_cached == 3
    assert pool.lookup_prefix(chain("a", "b", "x")) == kept[:2]
    again = fill(pool, pages)
    assert again == kept
    assert pool.num_free == 6


def test_eviction_takes_the_least_recently_used_leaf_first() -> None:
    pool = BlockPool(7)
    old, new = fill(pool, chain("old", "o2", "o3")), fill(pool, chain("new", "n2", "n3"))
    old_ids, new_ids = list(old), list(new)
    pool.free(old)
    pool.free(new)
    pool.allocate(2)
    assert pool.lookup_prefix(chain("old", "o2", "o3")) == old_ids[:1]
    assert pool.lookup_prefix(chain("new", "n2", "n3")) == new_ids
    pool.allocate(2)
    assert pool.lookup_prefix(chain("old")) == []
    assert pool.lookup_prefix(chain("new", "n2", "n3")) == new_ids[:2]


def test_a_duplicate_of_a_cached_page_is_not_cached_but_its_children_are() -> None:
    pool = BlockPool(10)
    pages = chain("a", "b")
    first = fill(pool, pages[:1])
    second = pool.allocate(2)
    assert second is not None
    assert not pool.cache_full_block(second[0], pages[0], None)
    assert pool.cache_full_block(second[1], pages[1], pages[0])
    expected = [first[0], second[1]]
    assert pool.lookup_prefix(pages) == expected


def test_everything_idle_can_be_allocated_even_below_a_child_in_use() -> None:
    pool = BlockPool(4)
    pages = chain("a", "b")
    first = fill(pool, pages[:1])
    second = pool.allocate(2)
    assert second is not None
    pool.cache_full_block(second[1], pages[1], pages[0])
    pool.free(first)  # "a" is idle, "b" is in use through a table that holds its own copy of "a"
    assert pool.can_allocate(1)
    assert pool.allocate(1) is not None
    assert pool.num_cached == 0


def test_uncache_takes_everything_that_continues_the_block() -> None:
    pool = BlockPool(10)
    left, right = fill(pool, chain("a", "b", "c")), fill(pool, chain("a", "x"))
    pool.uncache([left[1]])
    assert len(pool.lookup_prefix(chain("a", "b", "c"))) == 1
    assert len(pool.lookup_prefix(chain("a", "x"))) == 2
    pool.free(left)
    pool.free(right)
    assert pool.num_free == 9


def cached_units(pool: BlockPool) -> list[bytes]:
    """The units of every page that the pool finds by its digest."""
    pages = [pool._page_of[block] for block in pool._block_of.values()]
    return [unit for page in pages if page is not None for unit in page.units]


def test_events_tell_units_that_came_and_went() -> None:
    pool = BlockPool(3)
    table = fill(pool, chain("a", "b"))
    assert pool.take_events() == ([b"ua", b"ua/b"], [])
    assert pool.take_events() == ([], [])
    pool.free(table)
    pool.evict(1)
    assert pool.take_events() == ([], [b"ua/b"])
    assert cached_units(pool) == [b"ua"]
    pool.evict(1)
    fill(pool, chain("a"))
    assert pool.take_events() == ([], []), "went and came again within one step"


def test_a_page_whose_parent_is_gone_is_not_cached() -> None:
    pool = BlockPool(5)
    pages = chain("a", "b")
    table = fill(pool, pages[:1])
    pool.uncache(table)
    block = pool.append(table)
    assert block is not None and not pool.cache_full_block(block, pages[1], pages[0])


def tokens_of(path: list[int]) -> list[int]:
    """One page of 64 equal tokens for each step of a path, so that a page is one unit."""
    return [token for step in path for token in [step] * 64]


class PoolMachine(RuleBasedStateMachine):
    """Sequences come, grow, share, are cached and leave at random; the pool's books must balance after every act."""

    NUM_BLOCKS = 12

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(self.NUM_BLOCKS)
        self.tables: list[tuple[list[int], list[int], PageHasher]] = []
        self.known: set[bytes] = set()

    @rule(path=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def start(self, path: list[int]) -> None:
        hasher = PageHasher(b"root", 64)
        pages = hasher.extend(tokens_of(path), len(path))
        cached = self.pool.lookup_prefix(pages)
        needed = len(path) - len(cached)
        can = self.pool.can_allocate(needed + self.pool.num_idle_of(cached))
        before = self.pool.num_free
        self.pool.acquire(cached)
        blocks = self.pool.allocate(needed)
        assert (blocks is not None) == can
        if blocks is None:
            self.pool.free(cached)
            assert self.pool.num_free == before
            return
        self.tables.append((path, cached + blocks, hasher))

    @rule(data=st.data(), count=st.integers(1, 6))
    def cache(self, data: st.DataObject, count: int) -> None:
        if self.tables:
            _, table, hasher = data.draw(st.sampled_from(self.tables))
            for i in range(min(count, len(table))):
                self.pool.cache_full_block(table[i], hasher.pages[i], hasher.pages[i - 1] if i else None)

    @rule(data=st.data(), token=st.integers(0, 1))
    def grow(self, data: st.DataObject, token: int) -> None:
        if self.tables:
            path, table, hasher = data.draw(st.sampled_from(self.tables))
            before = list(table)
            block = self.pool.append(table)
            assert table[: len(before)] == before, "tables only grow"
            if block is not None:
                path.append(token)
                hasher.extend(tokens_of(path), len(path))

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if self.tables:
            entry = data.draw(st.sampled_from(self.tables))
            self.tables = [t for t in self.tables if t is not entry]
            self.pool.free(entry[1])

    @rule(data=st.data())
    def spoil(self, data: st.DataObject) -> None:
        if self.tables:
            _, table, hasher = data.draw(st.sampled_from(self.tables))
            self.pool.uncache(table)
            found = self.pool.lookup_prefix(hasher.pages)
            assert not set(found) & set(table)

    @rule(count=st.integers(1, 3))
    def evict(self, count: int) -> None:
        cached_before = self.pool.num_cached
        free_before = self.pool.num_free
        done = self.pool.evict(count)
        assert self.pool.num_free == free_before, "evicting changes the state of blocks, not how many can be had"
        assert cached_before - self.pool.num_cached >= done

    @invariant()
    def books_balance(self) -> None:
        pool = self.pool
        references = Counter(b for _, table, _ in self.tables for b in table)
        for block in range(1, self.NUM_BLOCKS):
            assert pool._num_references[block] == references[block]
        assert 0 not in references
        assert pool.num_free == self.NUM_BLOCKS - 1 - len(references), "no block is lost and none is had twice"

    @invariant()
    def parents_of_cached_pages_are_cached(self) -> None:
        for digest in self.pool._block_of:
            block = self.pool._block_of[digest]
            parent = self.pool._parent_of[block]
            assert parent == b"" or parent in self.pool._block_of

    @invariant()
    def events_add_up_to_what_is_held(self) -> None:
        stored, removed = self.pool.take_events()
        assert not self.known & set(stored)
        assert set(removed) <= self.known
        self.known = (self.known | set(stored)) - set(removed)
        assert self.known == set(cached_units(self.pool))


PoolMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestPoolMachine = PoolMachine.TestCase


def test_withheld_blocks_are_the_never_used_ones_and_come_back() -> None:
    pool = BlockPool(9)
    table = pool.allocate(2)
    assert table is not None
    assert pool.withhold(4) == 4 and pool.num_free == 2
    assert pool.allocate(3) is None
    rest = pool.allocate(2)
    assert rest is not None and not set(rest) & {3, 4, 5, 6}
    pool.free(rest)
    assert pool.withhold(0) == 0 and pool.num_free == 6
    pool.free(table)
    assert pool.num_free == pool.num_unused == 8


def test_withholding_evicts_idle_blocks_and_leaves_those_in_use() -> None:
    pool = BlockPool(5)
    table = fill(pool, chain("a", "b", "c", "d"))
    assert pool.withhold(3) == 0, "all are referenced"
    pool.free(table)
    assert pool.num_unused == 0, "all are cached"
    assert pool.withhold(3) == 3 and pool.num_withheld == 3 and pool.num_free == 1


def test_only_evictions_that_an_allocation_waited_for_are_timed() -> None:
    pool = BlockPool(5)
    table = fill(pool, chain("a", "b", "c", "d"))
    pool.free(table)
    pool.evict(1)
    assert pool.eviction_seconds == 0.0
    assert pool.allocate(4) is not None and pool.eviction_seconds > 0.0


def test_idle_blocks_are_handed_out_coldest_first_and_once() -> None:
    pool = BlockPool(8)
    pool.follow()
    first, second = pool.allocate(1), pool.allocate(1)
    assert first is not None and second is not None
    blocks = [first[0], second[0]]
    for table, name in ((first, b"a"), (second, b"b")):
        assert pool.cache_full_block(table[0], PageHash(name, ()), None)
    pool.free(second)
    pool.free(first)
    pool.acquire([blocks[1]])  # in use again: not idle
    assert pool.next_idle() == blocks[0] and pool.next_idle() is None
    pool.free([blocks[1]])
    assert pool.next_idle() == blocks[1] and pool.next_idle() is None
    assert pool.block_of(b"a") == blocks[0] and pool.block_of(b"c") is None
    assert pool.take_evicted() == []
    pool.evict(2)
    assert sorted(pool.take_evicted()) == [b"a", b"b"] and pool.take_evicted() == []


def test_the_list_of_idle_blocks_stays_short() -> None:
    pool = BlockPool(4)
    pool.follow()
    table = pool.allocate(1)
    assert table is not None
    block = table[0]
    pool.cache_full_block(block, PageHash(b"a", ()), None)
    pool.free(table)
    for _ in range(100):
        pool.acquire([block])
        pool.free([block])
    assert len(pool._idle) <= 17 and pool.next_idle() == block


def test_pinned_blocks_stay_and_do_not_count_as_used() -> None:
    pool = BlockPool(6)
    pool.follow()
    blocks = []
    for name in (b"a", b"b", b"c"):
        table = pool.allocate(1)
        assert table is not None
        pool.cache_full_block(table[0], PageHash(name, ()), None)
        blocks.append(table[0])
        pool.free(table)
    while pool.next_idle() is not None:
        pass
    pool.pin(blocks[:2])
    assert pool.num_free == 3 and pool.allocate(4) is None
    assert pool.evict(2) == 1 and pool.block_of(b"c") is None, "only what is not pinned goes"
    pool.unpin(blocks[:2])
    assert pool.next_idle() is None and pool.num_free == 5
    assert pool.evict(1) == 1 and pool.block_of(b"a") is None, "the oldest, as before"


def test_a_block_that_is_forgotten_while_pinned_is_free_afterwards() -> None:
    pool = BlockPool(3)
    table = pool.allocate(1)
    assert table is not None
    block = table[0]
    pool.cache_full_block(block, PageHash(b"a", ()), None)
    pool.free(table)
    pool.pin([block])
    pool.uncache([block])
    assert pool.num_free == 1
    pool.unpin([block])
    assert pool.num_free == pool.num_unused == 2
