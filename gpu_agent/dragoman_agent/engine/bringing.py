"""Prefixes brought back from the tiers below: blocks are taken, filled beside the steps, and entered into the cache in order.

Whoever waits is told when the last block is there, when no more will come, or when computing would have been done by then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from dragoman_agent.cache.block_pool import BlockPool
from dragoman_agent.cache.hashing import PageHash, Pages
from dragoman_agent.cache.lower_tiers import Found, LowerTiers
from dragoman_agent.cache.tier_choice import TierName, num_worth_bringing
from dragoman_agent.device.base import BlockCopy, BlockDevice, DeviceError, UInt8Array
from dragoman_agent.engine.demotion import MAX_NUM_BLOCKS, Moved

MAX_NUM_RUNS = 16  # under way; beyond it a prefix is computed
_MAX_NUM_COPIES = 3  # under way on the device
_PATIENCE = 4.0  # times what computing would take; then whoever waits computes
_MIN_PATIENCE_SECONDS = 0.5

Waiter = Callable[[float], None]  # hears the time


@dataclass(slots=True, eq=False)
class _Part:
    """Blocks of one tier that move together."""

    tier: TierName
    found: list[Found]
    blocks: list[int]
    rows: list[UInt8Array] = field(default_factory=list)
    is_begun: bool = False
    num_good: int = -1  # read or in host memory; -1 while being read
    read_seconds: float = 0.0
    copy: BlockCopy | None = None
    is_done: bool = False


@dataclass(slots=True, eq=False)
class Run:
    """Blocks that continue what the device holds, on their way."""

    parent: PageHash | None
    parts: list[_Part]
    held: list[int]  # every block of the run and those before it, with a reference each
    give_up_at: float
    num_blocks: int
    waiters: list[Waiter] = field(default_factory=list)
    ended: Callable[[Run], None] | None = None
    came: list[tuple[int, bytes]] = field(default_factory=list)  # (block, digest) entered into the cache
    is_broken: bool = False  # a block did not come: no more is begun
    is_cut: bool = False  # the block that did not come was reached: what is behind it is of no use


class Bringer:
    """Owns the runs under way. `turn` moves them on."""

    def __init__(
        self,
        device: BlockDevice,
        pool: BlockPool,
        tiers: LowerTiers,
        page_size: int,
        prefill_seconds: Callable[[float], float],
        clock: Callable[[], float],
    ) -> None:
        """`prefill_seconds`: what computing so many tokens takes."""
        self._device = device
        self._pool = pool
        self._tiers = tiers
        self._page_size = page_size
        self._prefill_seconds = prefill_seconds
        self._clock = clock
        self._block_bytes = device.block_format.block_bytes
        self._max_num_copied = min(device.max_num_copied_blocks, MAX_NUM_BLOCKS)
        self._runs: list[Run] = []
        self._coming: dict[bytes, Run] = {}
        self._num_copies = 0
        self.from_tier: dict[TierName, Moved] = {"host": Moved(), "disk": Moved()}
        self.num_declined = 0  # runs that were found and computed all the same, as that is quicker

    @property
    def is_busy(self) -> bool:
        """Whether blocks are on their way."""
        return bool(self._runs)

    @property
    def held_blocks(self) -> set[int]:
        """Blocks with a reference of a run."""
        return {block for run in self._runs for block in run.held}

    def bring(self, pages: Pages, cached: Sequence[int], num_tail_tokens: int, waiter: Waiter) -> bool:
        """Bring what continues `cached`, the blocks of the first of `pages`, if that pays; False when there is nothing to wait for.

        `num_tail_tokens` are computed behind the pages in any case. `waiter` is called once, in a later `turn`.
        """
        if len(pages) <= len(cached):
            return False
        under_way = self._coming.get(pages[len(cached)].digest)
        if under_way is not None:
            under_way.waiters.append(waiter)
            return True
        found = self._tiers.run(pages.behind(len(cached)))
        if not found:
            return False
        num_left = (len(pages) - len(cached) - len(found)) * self._page_size + num_tail_tokens
        count = self.num_worth(found, num_left)
        if not count:
            self.num_declined += 1
            return False
        run = self.start(pages, cached, found[:count])
        if run is None:
            return False
        run.waiters.append(waiter)
        return True

    def num_worth(self, found: Sequence[Found], num_tail_tokens: int) -> int:
        """How many of the blocks found come quicker than they are computed."""
        now = self._clock()
        rates = {tier: rate.at(now) for tier, rate in self._tiers.rates.items()}
        tiers = [tier for tier, _ in found]
        return num_worth_bringing(
            tiers, rates, self._block_bytes, self._page_size, num_tail_tokens, self._prefill_seconds
        )

    def start(self, pages: Sequence[PageHash] | Pages, cached: Sequence[int], found: list[Found]) -> Run | None:
        """Begin to bring `found`, which continue `cached`; None where there is no room."""
        pool = self._pool
        if self._tiers.problem or len(self._runs) >= MAX_NUM_RUNS:
            return None
        if not pool.can_allocate(len(found) + pool.num_idle_of(cached)):
            return None
        held = list(cached)
        pool.acquire(held)
        blocks = pool.allocate(len(found)) or []
        self._tiers.pin(found)
        seconds = self._prefill_seconds(len(found) * self._page_size)
        run = Run(
            pages[len(cached) - 1] if cached else None,
            self._parts(found, blocks),
            held + blocks,
            self._clock() + max(_PATIENCE * seconds, _MIN_PATIENCE_SECONDS),
            len(found),
        )
        self._runs.append(run)
        self._coming.update((entry.page.digest, run) for _, entry in found)
        return run

    def turn(self, now: float) -> None:
        """Move every run on, the oldest first. Raises nothing: what fails is computed."""
        for run in list(self._runs):
            self._advance(run)
            if not run.parts:
                self._end(run, now)
            elif run.waiters and now >= run.give_up_at:
                self._wake(run, now)

    def _parts(self, found: list[Found], blocks: list[int]) -> list[_Part]:
        parts: list[_Part] = []
        most = {"host": self._max_num_copied, "disk": max(min(self._tiers.num_staging // 2, self._max_num_copied), 1)}
        for one, block in zip(found, blocks, strict=True):
            if not parts or parts[-1].tier != one.tier or len(parts[-1].blocks) == most[one.tier]:
                parts.append(_Part(one.tier, [], []))
            parts[-1].found.append(one)
            parts[-1].blocks.append(block)
        return parts

    def _advance(self, run: Run) -> None:
        for part in run.parts:
            if not part.is_begun and not run.is_broken and not self._begin(part):
                break
            if part.copy is None and part.num_good > 0:
                self._copy(run, part)
            self._look(run, part)
        while run.parts and (run.parts[0].is_done or (run.is_broken and not run.parts[0].is_begun)):
            self._enter(run, run.parts.pop(0))

    def _begin(self, part: _Part) -> bool:
        """Take the rows of a part, reading them where they are on disk; False while there is no room for it."""
        if part.tier == "host":
            if self._num_copies >= _MAX_NUM_COPIES:
                return False
            host = self._tiers.host
            assert host is not None
            part.rows = [host.row(entry.slot) for _, entry in part.found]
            part.num_good = len(part.rows)
        else:
            staging, disk = self._tiers.staging, self._tiers.disk
            if len(staging) < len(part.found):
                return False
            assert disk is not None
            part.rows = [staging.pop() for _ in part.found]
            disk.read([entry for _, entry in part.found], part.rows, partial(_note_read, part))
        part.is_begun = True
        return True

    def _copy(self, run: Run, part: _Part) -> None:
        count = part.num_good
        try:
            part.copy = self._device.copy_in(part.rows[:count], np.array(part.blocks[:count], dtype=np.int32))
            self._num_copies += 1
        except DeviceError as error:
            self._fail(run, part, str(error))

    def _look(self, run: Run, part: _Part) -> None:
        """Whether a part has come, or will not."""
        if part.is_done or part.num_good < 0 or not part.is_begun:
            return
        if part.copy is not None:
            try:
                if not part.copy.is_done():
                    return
                seconds = part.copy.seconds + part.read_seconds
            except DeviceError as error:
                self._num_copies -= 1
                self._fail(run, part, str(error))
                return
            self._num_copies -= 1
            num_bytes = part.num_good * self._block_bytes
            self.from_tier[part.tier].add(part.num_good, num_bytes, seconds)
            self._tiers.rates[part.tier].learn(num_bytes, seconds, self._clock())
        part.is_done = True
        if part.num_good < len(part.found):
            run.is_broken = True

    def _fail(self, run: Run, part: _Part, problem: str) -> None:
        part.num_good, part.is_done, run.is_broken = 0, True, True
        self._tiers.turn_off(problem)

    def _enter(self, run: Run, part: _Part) -> None:
        """Make what came of a part findable, and give back what it used. Nothing is entered behind a block that is missing."""
        for (_, entry), block in list(zip(part.found, part.blocks, strict=True))[: max(part.num_good, 0)]:
            if run.is_cut or entry.is_gone:  # forgotten meanwhile: its contents are not to be trusted
                run.is_cut = run.is_broken = True
                break
            if self._pool.cache_full_block(block, entry.page, run.parent):
                run.came.append((block, entry.page.digest))
            run.parent = entry.page
        run.is_cut = run.is_cut or part.num_good < len(part.found)
        if part.tier == "host" or not part.is_begun:
            self._tiers.unpin(part.found)
        else:
            self._tiers.staging.extend(part.rows)

    def _end(self, run: Run, now: float) -> None:
        self._runs.remove(run)
        self._coming = {digest: one for digest, one in self._coming.items() if one is not run}
        # The last of them is the first to be evicted, as with a sequence that ends.
        self._pool.free(run.held)
        if run.ended is not None:
            run.ended(run)
        self._wake(run, now)

    def _wake(self, run: Run, now: float) -> None:
        waiters, run.waiters = run.waiters, []
        for waiter in waiters:
            waiter(now)


def _note_read(part: _Part, num_good: int, seconds: float) -> None:
    part.num_good, part.read_seconds = num_good, seconds
