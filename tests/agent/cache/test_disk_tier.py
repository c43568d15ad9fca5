"""The disk tier: what its thread has done is taken in by `poll`, and a disk that fails turns it off."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from dragoman_agent.cache.disk_store import SUFFIX, DiskStore, format_key
from dragoman_agent.cache.disk_tier import DiskTier
from dragoman_agent.cache.hashing import PageHash

BYTES = 256
KEY = format_key(b"model", "float16", "layout", 64, BYTES)


def page(number: int) -> PageHash:
    return PageHash(bytes([number]) * 32, (bytes([number, 1]) * 16,))


def contents(number: int) -> np.ndarray:
    return np.full(BYTES, number, np.uint8)


def tier_in(folder: Path, num_blocks: int = 8) -> DiskTier:
    store = DiskStore(folder, KEY, BYTES, 1)
    return DiskTier(store, num_blocks * store.file_bytes)


def settle(tier: DiskTier) -> None:
    deadline = time.monotonic() + 5
    while tier.is_busy:
        assert time.monotonic() < deadline
        tier.poll()
        time.sleep(0.001)


def put(tier: DiskTier, *numbers: int) -> None:
    """A chain."""
    for depth, number in enumerate(numbers):
        entry = tier.index.reserve(page(number), page(numbers[depth - 1]).digest if depth else b"")
        assert entry is not None
        ended: list[int] = []
        tier.write(entry, contents(number), lambda ended=ended: ended.append(1))  # type: ignore[misc]
        settle(tier)
        assert ended == [1]


def read(tier: DiskTier, *numbers: int) -> tuple[int, list[int]]:
    entries = [entry for number in numbers if (entry := tier.index.held(page(number).digest)) is not None]
    rows = [np.zeros(BYTES, np.uint8) for _ in entries]
    counts: list[int] = []
    for entry in entries:
        tier.index.pin(entry)
    tier.read(entries, rows, lambda count, seconds: counts.append(count))
    settle(tier)
    return counts[0], [int(row[0]) for row in rows]


def test_written_read_and_there_after_a_restart(tmp_path: Path) -> None:
    tier = tier_in(tmp_path)
    put(tier, 1, 2, 3)
    assert read(tier, 1, 2, 3) == (3, [1, 2, 3]) and tier.bytes_written == tier.bytes_read == 3 * BYTES
    tier.close()
    again = tier_in(tmp_path)
    assert again.index.num_held == 3 and read(again, 2, 3) == (2, [2, 3])
    assert all(entry.num_pins == 0 for entry in again.index._entries.values())
    again.close()


def test_what_goes_for_room_is_removed_from_the_disk(tmp_path: Path) -> None:
    tier = tier_in(tmp_path, 2)
    for number in range(1, 6):
        put(tier, number)
        assert len(list(tmp_path.glob("*" + SUFFIX))) <= 2
    assert {entry.page for entry in tier.index._entries.values()} == {page(4), page(5)}
    tier.close()


def test_a_block_that_is_gone_takes_those_behind_it_along(tmp_path: Path) -> None:
    tier = tier_in(tmp_path)
    put(tier, 1, 2, 3, 4)
    (tmp_path / (page(2).digest.hex() + SUFFIX)).unlink()
    count, _ = read(tier, 1, 2, 3)
    assert count == 1 and tier.index.num_held == 1 and not tier.problem
    settle(tier)
    assert len(list(tmp_path.glob("*" + SUFFIX))) == 1
    tier.close()


@pytest.mark.parametrize("name", ["write", "read", "remove"])
def test_a_disk_that_fails_turns_the_tier_off_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    tier = tier_in(tmp_path)
    put(tier, 1, 2)

    def broken(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(tier._store, name, broken)
    if name == "write":
        put(tier, 3)
    elif name == "read":
        assert read(tier, 1, 2)[0] == 0
    else:
        tier.discard(page(1).digest)
        settle(tier)
    assert "Input/output error" in tier.problem and not tier.can_write and tier.index.num_held == 0
    assert len(caplog.records) == 1
    assert all(entry.num_pins == 0 for entry in tier.index._entries.values())
    tier.close()
