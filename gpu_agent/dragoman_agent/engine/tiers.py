"""The engine's KV tiers below the device: opened from the plan, turned once a turn of the engine, and what they report."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import psutil

from dragoman_agent.cache.block_pool import BlockPool
from dragoman_agent.cache.disk_store import DiskStore, format_key
from dragoman_agent.cache.disk_tier import DiskTier
from dragoman_agent.cache.hashing import PageHash, Pages
from dragoman_agent.cache.host_tier import HostTier
from dragoman_agent.cache.lower_tiers import LowerTiers
from dragoman_agent.cache.tier_choice import TierSizes
from dragoman_agent.device.base import BlockDevice
from dragoman_agent.engine.bringing import Bringer, Run, Waiter
from dragoman_agent.engine.demotion import Demoter
from dragoman_agent.engine.messages import BlocksImported, BringBlocks, TierCounts, TierReport
from dragoman_agent.pal.plan import Plan

REPORT_SECONDS = 0.25
NUM_STAGING_ROWS = 8  # for blocks that pass between device and disk
MIN_HOST_SHARE = 0.1  # of the host's memory that the tier leaves, whatever was planned
_UNIT_TOKENS = 64


class KvTiers:
    """What the engine's core and scheduler see of the tiers. One thread calls it."""

    def __init__(
        self,
        device: BlockDevice,
        pool: BlockPool,
        tiers: LowerTiers,
        plan: Plan,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.lower = tiers
        self.demoter = Demoter(device, pool, tiers)
        self.bringer = Bringer(device, pool, tiers, plan.page_size, plan.step_model.prefill_seconds, clock)
        self.answers: list[BlocksImported] = []
        self.note_brought: Callable[[list[tuple[int, bytes]], str], None] = lambda blocks, exchange_id: None
        """Hears which blocks a hint brought."""
        self._pool = pool
        self._clock = clock
        self._num_reserved = plan.max_num_seqs
        self._block_bytes = device.block_format.block_bytes
        self._worked = False
        self._reported = 0.0
        self._last: TierReport | None = None

    @property
    def is_busy(self) -> bool:
        """Whether something moves, so that the next turn should come soon."""
        disk = self.lower.disk
        return self._worked or self.bringer.is_busy or (disk is not None and disk.is_busy)

    @property
    def held_blocks(self) -> set[int]:
        """Blocks of the pool that are being copied or filled, and those they continue."""
        return self.bringer.held_blocks.union(self.demoter.held_blocks)

    def turn(self, now: float, *, is_idle: bool) -> None:
        """Move on what is under way. `is_idle`: the device has nothing to do, so that all that is idle may be copied."""
        self.lower.poll()
        if self.bringer.is_busy:
            self.bringer.turn(now)
        self._worked = self.demoter.turn(now, is_idle=is_idle)

    def bring(self, pages: Pages, cached: Sequence[int], num_tail_tokens: int, waiter: Waiter) -> bool:
        """See Bringer."""
        return self.bringer.bring(pages, cached, num_tail_tokens, waiter)

    def forget(self, digest: bytes) -> None:
        """Drop a block and all that continue it."""
        self.lower.forget(digest)

    def receive(self, command: BringBlocks) -> None:
        """Bring a prefix up for a request to come; answered by BlocksImported in `answers`."""
        pages = self._pages_of(command.units)
        cached = self._pool.lookup_prefix(pages)
        found = self.lower.run(pages[len(cached) :])
        problem = self._refusal(pages, found)
        room = self._pool.num_free - self._pool.num_idle_of(cached) - self._num_reserved
        count = 0 if problem else self.bringer.num_worth(found, _UNIT_TOKENS)
        if found and not problem and not count:
            problem = "computing it is quicker than bringing it up"
        if count and room < count:
            count, problem = max(room, 0), "there is no room for more"
        run = self.bringer.start(pages, cached, found[:count]) if count else None
        if count and run is None:
            problem = "too many prefixes are being brought up already"
        if run is None:
            self.answers.append(BlocksImported(command.exchange_id, 0, len(cached), problem))
            return

        def ended(run: Run) -> None:
            why = problem or (
                "" if len(run.came) == run.num_blocks else "a block could not be read, or was computed meanwhile"
            )
            self.note_brought(run.came, command.exchange_id)
            self.answers.append(BlocksImported(command.exchange_id, len(run.came), len(cached), why))

        run.ended = ended

    def _pages_of(self, units: Sequence[bytes]) -> list[PageHash]:
        """The longest run of pages towards the units that the lower tiers know."""
        for unit in reversed(units):
            if pages := self.lower.chain_to_unit(unit):
                return pages
        return []

    def _refusal(self, pages: Sequence[PageHash], found: Sequence[object]) -> str:
        if self.lower.problem:
            return self.lower.problem
        if not pages:
            return "none of it is held in the lower tiers"
        return "" if found else "all that the lower tiers hold of it is on the device already"

    def take_answers(self) -> list[BlocksImported]:
        """Answers since the last call."""
        answers, self.answers = self.answers, []
        return answers

    def take_report(self, now: float) -> TierReport | None:
        """What the tiers hold and have moved, when that changed, at most four times a second."""
        if now - self._reported < REPORT_SECONDS:
            return None
        report = self.report()
        self._reported = now
        if report == self._last:
            return None
        self._last = report
        return report

    def report(self) -> TierReport:
        """What the tiers hold and have moved since the start."""
        lower, brought = self.lower, self.bringer.from_tier
        tiers = []
        if lower.host is not None:
            out, index = self.demoter.to_host, lower.host.index
            tiers.append(
                TierCounts(
                    "host", 0 if lower.problem else index.capacity, index.num_held, out.num_bytes, out.seconds,
                    brought["host"].num_bytes, brought["host"].seconds, brought["host"].num_blocks,
                    lower.problem or lower.host.problem,
                )
            )  # fmt: skip
        if lower.disk is not None:
            disk = lower.disk
            problem = lower.problem or disk.problem
            tiers.append(
                TierCounts(
                    "disk", 0 if problem else disk.index.capacity, disk.index.num_held, disk.bytes_written, disk.seconds_written,
                    brought["disk"].num_bytes, brought["disk"].seconds, brought["disk"].num_blocks,
                    problem,
                )
            )  # fmt: skip
        rate = 0.0
        if lower.indices and not lower.problem:
            name, _ = max(lower.indices, key=lambda one: one[1].num_held)
            rate = lower.rates[name].at(self._clock())
        return TierReport(tiers, lower.num_dropped, self.bringer.num_declined, rate)

    def close(self) -> None:
        """Let go of the disk."""
        self.lower.close()


def host_shortage() -> str:
    """Why no more host memory should be pinned: other agents that started at the same time may have planned for the same."""
    memory = psutil.virtual_memory()
    if memory.available >= MIN_HOST_SHARE * memory.total:
        return ""
    return f"only {memory.available / memory.total:.0%} of the host's memory is left"


def open_tiers(
    device: BlockDevice,
    pool: BlockPool,
    plan: Plan,
    model_digest: bytes,
    sizes: TierSizes,
    clock: Callable[[], float] = time.monotonic,
) -> KvTiers | None:
    """The tiers below a loaded device; None where there are none. Raises DiskTierError when the directory cannot be used."""
    if not sizes.has_any:
        return None
    kept = device.block_format
    _ = device.max_num_copied_blocks  # what the device needs for copies is made here, before a thread asks for rows
    num_host = sizes.host_bytes // kept.block_bytes
    disk = None
    staging = np.empty((0, kept.block_bytes), dtype=np.uint8)
    if sizes.disk_bytes and sizes.disk_dir:
        key = format_key(model_digest, kept.kv_type, kept.layout, plan.page_size, kept.block_bytes)
        store = DiskStore(Path(sizes.disk_dir), key, kept.block_bytes, max(plan.page_size // _UNIT_TOKENS, 1))
        disk = DiskTier(store, sizes.disk_bytes)
        staging = device.new_rows(NUM_STAGING_ROWS)
    host = HostTier(num_host, kept.block_bytes, device.new_rows, host_shortage) if num_host else None
    return KvTiers(device, pool, LowerTiers(host, disk, staging, sizes.link_rate), plan, clock)


__all__ = ["KvTiers", "TierSizes", "open_tiers"]
