"""Both tiers as one: where a block lies, what is pinned, and which units come and go."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dragoman_agent.cache.disk_store import DiskStore, format_key
from dragoman_agent.cache.disk_tier import DiskTier
from dragoman_agent.cache.hashing import PageHash
from dragoman_agent.cache.host_tier import HostTier
from dragoman_agent.cache.lower_tiers import LowerTiers
from dragoman_agent.cache.tier_index import TierIndex

BYTES = 16


def page(number: int) -> PageHash:
    return PageHash(bytes([number]) * 32, (bytes([number, 1]) * 16,))


def put(index: TierIndex, number: int, parent: int = 0) -> None:
    entry = index.reserve(page(number), page(parent).digest if parent else b"")
    if entry is not None:
        index.commit(entry)


def host_tier(num_blocks: int = 8) -> HostTier:
    return HostTier(num_blocks, BYTES, lambda count: np.zeros((count, BYTES), np.uint8))


def test_the_host_comes_first_and_a_run_ends_where_nothing_lies(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, format_key(b"m", "f", "l", 64, BYTES), BYTES, 1)
    lower = LowerTiers(host_tier(), DiskTier(store, 8 * store.file_bytes), np.zeros((4, BYTES), np.uint8))
    assert lower.host is not None and lower.disk is not None
    for number in (1, 2, 3):
        put(lower.disk.index, number, number - 1)
    put(lower.host.index, 1)
    assert [found.tier for found in lower.run(map(page, (1, 2, 3, 4)))] == ["host", "disk", "disk"]
    assert lower.run([page(9), page(1)]) == []
    assert [one.digest for one in lower.chain_to_unit(page(3).units[0][:8])] == [page(n).digest for n in (1, 2, 3)]
    found = lower.run([page(1), page(2)])
    lower.pin(found)
    assert [entry.num_pins for _, entry in found] == [1, 1]
    lower.unpin(found)
    lower.forget(page(1).digest)
    assert lower.run([page(1)]) == [] and lower.run([page(2)]) == []
    lower.close()


@given(st.lists(st.tuples(st.sampled_from(["put", "drop"]), st.booleans(), st.integers(1, 6)), max_size=40))
def test_units_are_told_when_the_first_tier_has_them_and_the_last_lets_go(steps: list[tuple[str, bool, int]]) -> None:
    lower = LowerTiers(host_tier(4), None, np.zeros((0, BYTES), np.uint8))
    second = host_tier(3)
    lower.disk = second  # type: ignore[assignment]  # an index is all that is asked of it here
    assert lower.host is not None
    known: set[bytes] = set()
    for action, first, number in steps:
        index = lower.host.index if first else second.index
        if action == "put":
            put(index, number)
        else:
            index.discard(page(number).digest)
        came, went = lower.take_events()
        assert not known & set(came) and set(went) <= known
        known = (known | set(came)) - set(went)
        holding = {*lower.host.index._entries, *second.index._entries}
        if number == 6:
            lower.tell_all()
            assert set(lower.take_events()[0]) == known
        assert known == {unit for digest in holding for unit in page(digest[0]).units}


def test_after_a_failure_nothing_is_held_and_the_reason_is_kept() -> None:
    lower = LowerTiers(host_tier(), None, np.zeros((0, BYTES), np.uint8))
    assert lower.host is not None
    put(lower.host.index, 1)
    lower.turn_off("the link is down")
    lower.turn_off("another reason")
    assert lower.run([page(1)]) == [] and "the link is down" in lower.problem and "another" not in lower.problem
