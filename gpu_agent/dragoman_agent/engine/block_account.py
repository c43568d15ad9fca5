"""Where the KV blocks of a pool are, from the sequences' side: what nobody accounts for is lost. Pure."""

from __future__ import annotations

from typing import NamedTuple

from dragoman_agent.engine.scheduler import Scheduler


class BlockAccount(NamedTuple):
    """`num_lost` blocks are neither free, nor idle in the cache, nor owned by a live sequence, nor being filled from a lower
    tier; 0 is right. `num_waste_tokens` is the room behind the last tokens of the live sequences, in their last pages."""

    num_lost: int
    num_waste_tokens: int


def account(scheduler: Scheduler) -> BlockAccount:
    """Count anew, from the block tables: some tens of microseconds a thousand blocks."""
    pool = scheduler.pool
    owned: set[int] = set()
    waste = 0
    for sequence in scheduler.running:
        owned.update(sequence.block_table)
        waste += len(sequence.block_table) * scheduler.page_size - len(sequence.token_ids)
    if scheduler.tier_waits is not None:
        owned |= scheduler.tier_waits.tiers.held_blocks
    usable = pool.num_blocks - 1 - pool.num_withheld  # block 0 is nobody's
    return BlockAccount(usable - pool.num_free - len(owned), max(waste, 0))
