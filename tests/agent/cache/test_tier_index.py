"""The index of a lower tier: every slot in one state, parents outlive children, nothing lost or doubled."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dragoman_agent.cache.hashing import PageHash
from dragoman_agent.cache.tier_index import TierEntry, TierIndex


def page(name: str) -> PageHash:
    return PageHash(name.encode(), (f"u-{name}".encode().ljust(8),))


def put(index: TierIndex, *names: str) -> list[TierEntry]:
    """A chain, written to its end."""
    entries = []
    for depth, name in enumerate(names):
        entry = index.reserve(page(name), names[depth - 1].encode() if depth else b"")
        assert entry is not None
        index.commit(entry)
        entries.append(entry)
    return entries


def test_a_block_is_held_once_it_is_written() -> None:
    index = TierIndex(2)
    entry = index.reserve(page("a"), b"")
    assert entry is not None and index.held(b"a") is None and index.get(b"a") is entry
    assert index.reserve(page("a"), b"") is None, "it is being written already"
    index.commit(entry)
    assert index.held(b"a") is entry and index.take_events() == ([b"u-a".ljust(8)], [])
    assert index.chain_to_unit(b"u-a".ljust(8)) == [entry]


def test_a_block_without_its_parent_is_not_taken() -> None:
    index = TierIndex(4)
    assert index.reserve(page("b"), b"a") is None and index.num_free == 4


def test_a_directory_that_was_given_far_too_much_costs_no_memory() -> None:
    index = TierIndex(10**15)
    assert [entry.slot for entry in put(index, "a", "a1")] == [0, 1] and index.num_free == 10**15 - 2
    index.discard(b"a1")
    assert [entry.slot for entry in put(index, "b", "b1")] == [1, 2], "a slot that is free again goes first"


def test_the_least_recently_used_leaf_goes_first() -> None:
    index = TierIndex(4)
    put(index, "a", "a1")
    put(index, "b", "b1")
    entry = index.held(b"a1")
    assert entry is not None
    index.touch(entry)
    put(index, "c")
    assert [gone.digest for gone in index.take_evicted()] == [b"b1"]
    put(index, "d")
    assert [gone.digest for gone in index.take_evicted()] == [b"b"]
    assert index.held(b"a") and index.held(b"a1"), "a parent is no leaf, and the child was used last"


def test_room_is_not_made_by_what_the_new_block_continues() -> None:
    index = TierIndex(2)
    put(index, "a", "a1")
    assert index.reserve(page("a2"), b"a1") is None
    assert index.held(b"a1") and not index.take_evicted()
    put(index, "b")
    assert index.held(b"b") and not index.held(b"a1")


def test_what_a_copy_uses_stays_in_its_slot() -> None:
    index = TierIndex(1)
    (entry,) = put(index, "a")
    index.pin(entry)
    assert index.reserve(page("b"), b"") is None
    index.discard(b"a")
    assert index.held(b"a") is None and index.num_free == 0, "gone, but its slot is being read"
    index.unpin(entry)
    assert index.num_free == 1
    with pytest.raises(ValueError, match="more often"):
        index.unpin(entry)


def test_what_was_not_written_takes_along_what_continues_it() -> None:
    index = TierIndex(3)
    first, second = index.reserve(page("a"), b""), index.reserve(page("b"), b"a")
    assert first is not None and second is not None
    index.abandon(first)
    index.commit(second)
    assert index.num_entries == 0 and index.num_free == 3 and index.take_events() == ([], [])


def test_missing_chain_is_root_first_and_ends_at_what_is_here() -> None:
    index = TierIndex(3)
    put(index, "a")
    chain = [(page("c"), b"b"), (page("b"), b"a"), (page("a"), b"")]
    assert index.missing_chain(chain) == [(page("b"), b"a"), (page("c"), b"b")]


class IndexMachine(RuleBasedStateMachine):
    """Paths of two letters; a model by hand: which names are held, which written, and the units told."""

    CAPACITY = 4

    def __init__(self) -> None:
        super().__init__()
        self.index = TierIndex(self.CAPACITY)
        self.writing: list[TierEntry] = []
        self.reading: list[TierEntry] = []
        self.told: dict[bytes, int] = {}

    @rule(path=st.text("ab", min_size=1, max_size=5))
    def write(self, path: str) -> None:
        for end in range(1, len(path) + 1):
            entry = self.index.reserve(page(path[:end]), path[: end - 1].encode())
            if entry is not None:
                self.writing.append(entry)

    @rule(data=st.data(), succeeds=st.booleans())
    def finish_writing(self, data: st.DataObject, succeeds: bool) -> None:
        if self.writing:
            entry = self.writing.pop(data.draw(st.integers(0, len(self.writing) - 1)))
            (self.index.commit if succeeds else self.index.abandon)(entry)

    @rule(path=st.text("ab", min_size=1, max_size=5))
    def start_reading(self, path: str) -> None:
        entry = self.index.held(path.encode())
        if entry is not None:
            self.index.pin(entry)
            self.reading.append(entry)

    @rule(data=st.data())
    def finish_reading(self, data: st.DataObject) -> None:
        if self.reading:
            self.index.unpin(self.reading.pop(data.draw(st.integers(0, len(self.reading) - 1))))

    @rule(path=st.text("ab", min_size=1, max_size=3))
    def discard(self, path: str) -> None:
        self.index.discard(path.encode())

    @rule()
    def grow(self) -> None:
        if self.index.capacity < 8:
            self.index.grow(1)

    @invariant()
    def every_slot_has_one_state(self) -> None:
        index = self.index
        busy = {id(entry): entry for entry in (*index._entries.values(), *self.writing, *self.reading)}
        unused = range(index._num_used, index.capacity)
        slots = [*index._free, *unused, *(entry.slot for entry in busy.values())]
        assert sorted(slots) == list(range(index.capacity))
        assert index.num_held == sum(entry.is_held for entry in index._entries.values())

    @invariant()
    def parents_outlive_children(self) -> None:
        for entry in self.index._entries.values():
            assert not entry.parent or entry.parent in self.index._entries

    @invariant()
    def events_tell_what_is_held(self) -> None:
        stored, removed = self.index.take_events()
        for units, change in ((stored, 1), (removed, -1)):
            for unit in units:
                self.told[unit] = self.told.get(unit, 0) + change
        held = {unit for entry in self.index._entries.values() if entry.is_held for unit in entry.page.units}
        assert {unit for unit, count in self.told.items() if count} == held and max(self.told.values(), default=0) <= 1

    @invariant()
    def room_can_be_made_where_nothing_is_in_use(self) -> None:
        index = self.index
        if not self.writing and not self.reading:
            entry = index.reserve(page("fresh"), b"")
            assert entry is not None
            index.take_evicted()
            index.abandon(entry)


IndexMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)
test_index_machine = IndexMachine.TestCase
