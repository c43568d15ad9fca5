"""The arena in host memory comes in pieces; what cannot be had is said and lived with."""

from __future__ import annotations

import time

import numpy as np
import pytest

from dragoman_agent.cache import host_tier
from dragoman_agent.cache.host_tier import HostTier


def wait_for_blocks(tier: HostTier, num_blocks: int) -> None:
    deadline = time.monotonic() + 5
    while tier.index.capacity < num_blocks:
        assert time.monotonic() < deadline
        tier.poll()
        time.sleep(0.001)


def test_a_small_arena_is_there_at_once() -> None:
    tier = HostTier(3, 16, lambda count: np.zeros((count, 16), np.uint8))
    assert tier.index.capacity == 3 and not tier.problem
    tier.row(2)[:] = 7
    assert not tier.row(1).any() and tier.row(2).all()


def test_a_large_one_comes_in_pieces_and_each_slot_has_its_own_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_tier, "PIECE_BYTES", 70)
    taken: list[int] = []

    def new_rows(count: int) -> np.ndarray:
        taken.append(count)
        return np.zeros((count, 16), np.uint8)

    tier = HostTier(10, 16, new_rows)
    wait_for_blocks(tier, 10)
    assert taken == [4, 4, 2]
    for slot in range(10):
        tier.row(slot)[:] = slot
    assert [int(tier.row(slot)[3]) for slot in range(10)] == list(range(10))


def test_a_shortage_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_tier, "PIECE_BYTES", 32)
    said = iter(["", "", "only 3% of the host's memory is left"])
    tier = HostTier(100, 16, lambda count: np.zeros((count, 16), np.uint8), lambda: next(said))
    deadline = time.monotonic() + 5
    while not tier.problem:
        assert time.monotonic() < deadline
        tier.poll()
    assert tier.index.capacity == 6 and "only 3%" in tier.problem


def test_memory_that_cannot_be_had_leaves_a_smaller_tier(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host_tier, "PIECE_BYTES", 32)
    left = [2]

    def new_rows(count: int) -> np.ndarray:
        if not left[0]:
            raise RuntimeError("cannot pin more")
        left[0] -= 1
        return np.zeros((count, 16), np.uint8)

    tier = HostTier(10, 16, new_rows)
    wait_for_blocks(tier, 4)
    deadline = time.monotonic() + 5
    while not tier.problem:
        assert time.monotonic() < deadline
        tier.poll()
    assert "4 of 10 blocks: cannot pin more" in tier.problem and "--kv-host-bytes" in caplog.text
