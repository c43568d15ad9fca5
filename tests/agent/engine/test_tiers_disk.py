"""The disk tier in a whole engine: restarts, damaged files, a full disk, its limit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.agent.engine.tiers_lab import (
    BLOCK_BYTES,
    assert_at_rest,
    held,
    ids,
    prompt,
    settle,
    small,
    units,
)

from dragoman_agent.cache.disk_store import SUFFIX, DiskTierError
from dragoman_agent.engine.tiers import TierSizes


def filled(lab: Any, start: Any, folder: Path) -> tuple[TierSizes, Any]:
    """An engine whose disk tier in `folder` holds what a request left, and the sizes of its tiers."""
    sizes = TierSizes(disk_bytes=256 * (BLOCK_BYTES + 200), disk_dir=str(folder))
    engine = small(lab, tiers=sizes)
    engine.run(start("r1", prompt(1), 20))
    settle(engine)
    return sizes, engine


def test_the_disk_tier_survives_a_restart(
    lab: Any, start: Any, answers: Any, never_evicted: Any, tmp_path: Path
) -> None:
    sizes, first = filled(lab, start, tmp_path)
    assert held(first) == {"disk": 4}
    first.core.tiers.close()
    second = small(lab, tiers=sizes)
    events = second.run(start("r1", prompt(1), 20))
    assert events[-1].cached_tokens == 256 and ids(answers, events, "r1") == never_evicted(1)[1]
    second.core.tiers.close()


def test_a_damaged_file_is_computed_and_removed(
    lab: Any, start: Any, answers: Any, never_evicted: Any, tmp_path: Path
) -> None:
    sizes, first = filled(lab, start, tmp_path)
    digests = [page.digest for page in first.core.tiers.lower.chain_to_unit(units(1)[-1])]
    first.core.tiers.close()
    damaged = tmp_path / (digests[2].hex() + SUFFIX)
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(bytes(data))
    second = small(lab, tiers=sizes)
    events = second.run(start("r1", prompt(1), 20))
    assert ids(answers, events, "r1") == never_evicted(1)[1]
    assert events[-1].cached_tokens == 128, "the blocks before the damaged one are good"
    settle(second)
    assert_at_rest(second)
    assert held(second) == {"disk": 4}, "what was computed is written again"
    second.core.tiers.close()


def test_a_full_disk_turns_the_tier_off_and_nothing_else(
    lab: Any, start: Any, answers: Any, never_evicted: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    wanted = never_evicted(*range(4))
    here = small(lab, tiers=TierSizes(disk_bytes=1 << 20, disk_dir=str(tmp_path)))
    store = here.core.tiers.lower.disk._store
    real, count = store.write, 0

    def full(*arguments: Any) -> None:
        nonlocal count
        count += 1
        if count > 5:
            raise OSError(28, "No space left on device")
        real(*arguments)

    monkeypatch.setattr(store, "write", full)
    for seed in (*range(4), *range(4)):
        events = here.run(start(f"r{seed}", prompt(seed), 20))
        assert ids(answers, events, f"r{seed}") == wanted[seed]
        settle(here)
    counts = here.core.tiers.report().tiers[0]
    assert "No space left on device" in counts.problem and counts.held_blocks == counts.capacity_blocks == 0
    assert_at_rest(here)
    here.core.tiers.close()


def test_a_directory_that_cannot_be_used_is_refused(lab: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskTierError, match="--kv-disk-dir"):
        small(lab, tiers=TierSizes(disk_bytes=1 << 20, disk_dir=str(tmp_path / "file")))


def test_the_disk_stays_within_its_limit(lab: Any, start: Any, tmp_path: Path) -> None:
    limit = 7 * (BLOCK_BYTES + 200)
    here = small(lab, tiers=TierSizes(disk_bytes=limit, disk_dir=str(tmp_path)))
    for seed in range(8):
        here.run(start(f"r{seed}", prompt(seed), 20))
        settle(here)
        assert sum(file.stat().st_size for file in tmp_path.glob("*" + SUFFIX)) <= limit
    assert held(here)["disk"] >= 5 and here.core.tiers.report().tiers[0].written_bytes > 7 * BLOCK_BYTES
    assert_at_rest(here)
    here.core.tiers.close()
