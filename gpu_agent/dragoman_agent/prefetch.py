"""Brings prefix blocks that a controller hinted at from another agent or from the agent's own lower tiers.

Tells in the end what became of each hint.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import grpc

from dragoman.channel import channel_options
from dragoman.durations import seconds_of
from dragoman.errors import DragomanError, from_rpc_error
from dragoman.prefix_hash import UNIT_TOKENS
from dragoman.v1 import kv_transfer_service_pb2 as pb
from dragoman.v1 import kv_transfer_service_pb2_grpc
from dragoman.v1.agent_registry_service_pb2 import (
    HINT_OUTCOME_CLIPPED,
    HINT_OUTCOME_LATE,
    HINT_OUTCOME_REFUSED,
    HINT_OUTCOME_UNUSED,
    HINT_OUTCOME_USED,
    PrefetchPrefix,
)
from dragoman_agent.engine.messages import BringBlocks, CachedBlock, ImportBlocks
from dragoman_agent.kv_journal import KvJournal
from dragoman_agent.registration import HintEnd
from dragoman_agent.rpc.engine_client import EngineClient
from dragoman_agent.rpc.kv_transfer import KvFormat

logger = logging.getLogger(__name__)

MAX_NUM_FETCHES = 2
MAX_NUM_WAITING_HINTS = 256
# Blocks are entered into the cache in parts, each between two steps.
IMPORT_BYTES = 1 << 20
UNUSED_SECONDS = 60.0
LONGEST_FETCH_SECONDS = 30.0
_NEWEST_WEIGHT = 0.3

Dial = Callable[[str, str], grpc.aio.Channel]
Ended = Callable[[HintEnd], None]
_NAMES = {
    HINT_OUTCOME_USED: "used",
    HINT_OUTCOME_LATE: "late",
    HINT_OUTCOME_CLIPPED: "clipped",
    HINT_OUTCOME_REFUSED: "refused",
    HINT_OUTCOME_UNUSED: "unused",
}


def dial_plain(address: str, agent_id: str) -> grpc.aio.Channel:
    """A channel without encryption, for loopback."""
    return grpc.aio.insecure_channel(address, options=channel_options())


@dataclass(slots=True)
class TransferRate:
    """What fetches were seen to take, the newest weighing most; 0 while none was seen."""

    bytes_per_second: float = 0.0
    base_seconds: float = 0.0

    def learn(self, num_bytes: int, first_seconds: float, seconds: float) -> None:
        """One fetch: seconds to its first block, and in all."""
        if num_bytes <= 0 or seconds <= 0:
            return
        rate = num_bytes / max(seconds - first_seconds, seconds / 10)
        weight = _NEWEST_WEIGHT if self.bytes_per_second else 1.0
        self.bytes_per_second += weight * (rate - self.bytes_per_second)
        self.base_seconds += weight * (first_seconds - self.base_seconds)


@dataclass(slots=True)
class _Fetch:
    """What a fetch has brought so far."""

    num_imported: int = 0
    num_present: int = 0
    num_bytes: int = 0
    first_seconds: float = 0.0
    covered: set[int] = field(default_factory=set)
    problem: str = ""


class Prefetcher:
    """Owner of the hints under way, and of the rate at which blocks come in. One fetch is one exchange with the engine."""

    def __init__(
        self, engine: EngineClient, journal: KvJournal, count: Callable[[str], None], dial: Dial = dial_plain
    ) -> None:
        """`count` hears the name of each outcome."""
        self._engine = engine
        self._journal = journal
        self._count = count
        self._dial = dial
        self._tasks: set[asyncio.Task[None]] = set()
        self._unused: dict[str, tuple[Ended, asyncio.TimerHandle]] = {}
        self.rate = TransferRate()
        self.format: KvFormat | None = None
        """Set once the engine is ready."""
        engine.on_blocks_used = self._used

    def hint(self, wanted: PrefetchPrefix, ended: Ended) -> None:
        """Take a hint; `ended` hears of its one end."""
        if refusal := self._refusal(wanted):
            self._end(ended, HINT_OUTCOME_REFUSED, refusal)
            return
        task = asyncio.create_task(self._run(wanted, ended))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Give up what is under way."""
        for _, timer in self._unused.values():
            timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _refusal(self, wanted: PrefetchPrefix) -> str:
        if self.format is None:
            return "this agent's device does not take in KV blocks"
        if not wanted.block_hashes:
            return "the hint has no block hashes"
        if all(unit in self._journal.held for unit in wanted.block_hashes):
            return "the whole prefix is held here already"
        if len(self._tasks) >= MAX_NUM_FETCHES:
            return f"{MAX_NUM_FETCHES} fetches are under way"
        return ""

    async def _run(self, wanted: PrefetchPrefix, ended: Ended) -> None:
        fetch, exchange_id = _Fetch(), uuid.uuid4().hex
        limit = LONGEST_FETCH_SECONDS
        if wanted.HasField("time_limit") and wanted.source_address:
            # What comes from the agent's own tiers is weighed by the engine, which does not stop half-way.
            limit = seconds_of(wanted.time_limit)
        began = time.monotonic()
        try:
            async with asyncio.timeout(min(limit, LONGEST_FETCH_SECONDS)):
                if wanted.source_address:
                    await self._fetch(wanted, exchange_id, fetch, began)
                else:
                    await self._bring(wanted, exchange_id, fetch)
        except TimeoutError:
            fetch.problem = f"it took longer than the {limit:.3g} s of computing it"
        except grpc.RpcError as error:
            fetch.problem = (
                f"agent {wanted.source_agent_id} at {wanted.source_address}: {from_rpc_error(error).message}"
            )
        except DragomanError as error:
            fetch.problem = error.message
        if wanted.source_address:
            self.rate.learn(fetch.num_bytes, fetch.first_seconds, time.monotonic() - began)
        self._conclude(wanted, exchange_id, fetch, ended)

    async def _fetch(self, wanted: PrefetchPrefix, exchange_id: str, fetch: _Fetch, began: float) -> None:
        assert self.format is not None
        request = self.format.request(wanted.source_ticket, tuple(wanted.block_hashes))
        async with self._dial(wanted.source_address, wanted.source_agent_id) as channel:
            call = kv_transfer_service_pb2_grpc.KvTransferServiceStub(channel).FetchBlocks(request)
            try:
                part: list[CachedBlock] = []
                async for block in whole_blocks(call):
                    fetch.first_seconds = fetch.first_seconds or time.monotonic() - began
                    fetch.num_bytes += len(block.data)
                    part.append(block)
                    if sum(len(one.data) for one in part) >= IMPORT_BYTES:
                        if not await self._import(exchange_id, part, fetch):
                            return
                        part = []
                if part:
                    await self._import(exchange_id, part, fetch)
            finally:
                call.cancel()

    async def _bring(self, wanted: PrefetchPrefix, exchange_id: str, fetch: _Fetch) -> None:
        """From the tiers below the device; the engine says why there is no more."""
        assert self.format is not None
        units = list(wanted.block_hashes)
        command = BringBlocks(exchange_id, [unit.to_bytes(8, "little") for unit in units])
        answer = await self._engine.bring_blocks(command)
        fetch.num_imported, fetch.num_present, fetch.problem = answer.num_imported, answer.num_present, answer.problem
        num_tokens = (answer.num_imported + answer.num_present) * self.format.block_tokens
        fetch.covered.update(units[: num_tokens // UNIT_TOKENS])

    async def _import(self, exchange_id: str, part: list[CachedBlock], fetch: _Fetch) -> bool:
        """Whether all of the part was taken."""
        answer = await self._engine.import_blocks(ImportBlocks(exchange_id, part))
        taken = answer.num_imported + answer.num_present
        fetch.num_imported += answer.num_imported
        fetch.num_present += answer.num_present
        fetch.covered.update(int.from_bytes(unit[:8], "little") for block in part[:taken] for unit in block.units)
        if taken < len(part):
            fetch.problem = "there is no room for more"
        return taken == len(part)

    def _conclude(self, wanted: PrefetchPrefix, exchange_id: str, fetch: _Fetch, ended: Ended) -> None:
        num_units = sum(unit in fetch.covered for unit in wanted.block_hashes)
        what = f"{fetch.num_imported} blocks, {num_units} of {len(wanted.block_hashes)} units"
        if not fetch.num_imported and fetch.num_present and not fetch.problem:
            self._end(ended, HINT_OUTCOME_LATE, "a request computed the prefix meanwhile")
        elif not fetch.num_imported:
            gone = "the other agent no longer holds any of it"
            self._end(ended, HINT_OUTCOME_REFUSED, fetch.problem or (gone if wanted.source_address else "nothing came"))
        elif num_units < len(wanted.block_hashes):
            holder = "the other agent holds" if wanted.source_address else "the lower tiers hold"
            self._end(ended, HINT_OUTCOME_CLIPPED, f"{what}; {fetch.problem or f'{holder} no more of it'}")
        else:
            self._await_use(exchange_id, ended, what)

    def _await_use(self, exchange_id: str, ended: Ended, what: str) -> None:
        if len(self._unused) >= MAX_NUM_WAITING_HINTS:
            self._unused_for_long(next(iter(self._unused)))
        timer = asyncio.get_running_loop().call_later(UNUSED_SECONDS, self._unused_for_long, exchange_id)
        self._unused[exchange_id] = ended, timer
        logger.debug("prefetched %s", what)

    def _used(self, exchange_id: str) -> None:
        waiting = self._unused.pop(exchange_id, None)
        if waiting is not None:
            waiting[1].cancel()
            self._end(waiting[0], HINT_OUTCOME_USED, "")

    def _unused_for_long(self, exchange_id: str) -> None:
        ended, timer = self._unused.pop(exchange_id)
        timer.cancel()
        self._end(ended, HINT_OUTCOME_UNUSED, f"no request came for it within {UNUSED_SECONDS:.0f} s")

    def _end(self, ended: Ended, outcome: int, message: str) -> None:
        self._count(_NAMES[outcome])  # type: ignore[index]
        ended(HintEnd(outcome, message))  # type: ignore[arg-type]


async def whole_blocks(call: AsyncIterator[pb.FetchBlocksResponse]) -> AsyncIterator[CachedBlock]:
    """The blocks of a transfer, their pieces put together."""
    block: CachedBlock | None = None
    pieces: list[bytes] = []
    async for piece in call:
        if block is not None and piece.block_hash != block.digest:
            block.data = b"".join(pieces)
            yield block
            block, pieces = None, []
        if block is None:
            block = CachedBlock(piece.block_hash, piece.parent_hash, list(piece.unit_hashes), b"")
        pieces.append(piece.data)
    if block is not None:
        block.data = b"".join(pieces)
        yield block
