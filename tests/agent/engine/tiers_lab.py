"""Engines that hold two prompts, and prompts for them."""

from __future__ import annotations

import random
import time
from typing import Any

from dragoman.prefix_hash import root_hash
from dragoman.step_model import StepModel
from dragoman_agent.cache.hashing import PageHasher
from dragoman_agent.device.null_model import NullModel
from dragoman_agent.engine.tiers import TierSizes

BLOCK_BYTES = 64 * 12
SLOW_PREFILL = StepModel((1,), (0,), (0.001,), 1000.0, 0.001)
HOST = TierSizes(host_bytes=256 * BLOCK_BYTES)


def prompt(seed: int, num_tokens: int = 300) -> list[int]:
    return random.Random(seed).choices(range(32, 127), k=num_tokens)


def small(lab: Any, **options: Any) -> Any:
    """An engine that holds two of the prompts at once."""
    return lab(**{"num_blocks": 16, "max_num_seqs": 4, "step_model": SLOW_PREFILL, **options})


def ids(answers: Any, events: Any, name: str) -> list[int]:
    tokens: list[int] = answers(events)[(name, 0)].token_ids
    return tokens


def fill(here: Any, start: Any, num_prompts: int = 8) -> None:
    """Run prompts 0, 1, ... one after the other: the first of them are then below the device alone."""
    for seed in range(num_prompts):
        here.run(start(f"r{seed}", prompt(seed), 20))
        settle(here)


def settle(here: Any) -> None:
    """Let what moves come to rest."""
    deadline = time.monotonic() + 10
    for _ in range(3):
        here.turn()
    while here.core.is_moving:
        assert time.monotonic() < deadline, "the tiers do not come to rest"
        time.sleep(0.001)
        here.turn()


def held(here: Any) -> dict[str, int]:
    return {one.name: one.held_blocks for one in here.core.tiers.report().tiers}


def read_blocks(here: Any) -> dict[str, int]:
    return {one.name: one.read_blocks for one in here.core.tiers.report().tiers}


def assert_at_rest(here: Any) -> None:
    """Nothing is held by anyone, nor kept from being evicted."""
    settle(here)
    here.assert_idle()
    lower = here.core.tiers.lower
    assert len(lower.staging) == lower.num_staging
    for _, index in lower.indices:
        assert all(entry.num_pins == 0 for entry in index._entries.values())
        assert index.num_free + index.num_entries == index.capacity


def units(seed: int) -> list[bytes]:
    """The wire hashes of a prompt's units."""
    hasher = PageHasher(root_hash(bytes.fromhex(NullModel().digest)), 64)
    return [page.units[-1][:8] for page in hasher.extend(prompt(seed), 4)]
