"""Every end a hint can have, with a real transfer over gRPC and an engine that says what the test wants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from dragoman.durations import duration_of
from dragoman.errors import DragomanError
from dragoman.serving import ErrorInterceptor
from dragoman.v1 import error_pb2, kv_transfer_service_pb2_grpc
from dragoman.v1 import kv_transfer_service_pb2 as pb
from dragoman.v1.agent_registry_service_pb2 import HintOutcome, PrefetchPrefix
from dragoman_agent import prefetch
from dragoman_agent.engine.messages import BlocksImported, BringBlocks, ImportBlocks
from dragoman_agent.kv_journal import KvJournal
from dragoman_agent.prefetch import Prefetcher
from dragoman_agent.registration import HintEnd
from dragoman_agent.rpc.kv_transfer import KvFormat

UNITS = (11, 12, 13)
FORMAT = KvFormat(b"d" * 32, "null", "states", 64, 100)


class Engine:
    """Takes blocks as it is told to."""

    def __init__(self) -> None:
        self.taken: list[ImportBlocks] = []
        self.room = 1000
        self.present = 0
        self.brought: list[BringBlocks] = []
        self.problem = ""
        self.on_blocks_used: Callable[[str], None] = lambda exchange_id: None

    async def import_blocks(self, command: ImportBlocks) -> BlocksImported:
        self.taken.append(command)
        num_present = min(len(command.blocks), self.present)
        num_new = min(len(command.blocks) - num_present, self.room)
        self.room -= num_new
        return BlocksImported(command.exchange_id, num_new, num_present)

    async def bring_blocks(self, command: BringBlocks) -> BlocksImported:
        self.brought.append(command)
        num_present = min(len(command.units), self.present)
        num_new = min(len(command.units) - num_present, self.room)
        return BlocksImported(command.exchange_id, num_new, num_present, self.problem)


class Source(kv_transfer_service_pb2_grpc.KvTransferServiceServicer):
    """Holds one block a unit, up to `num_held` of them."""

    def __init__(self) -> None:
        self.num_held = len(UNITS)
        self.delay = 0.0
        self.error: DragomanError | None = None
        self.requests: list[pb.FetchBlocksRequest] = []

    async def FetchBlocks(self, request: Any, context: Any) -> AsyncIterator[pb.FetchBlocksResponse]:
        self.requests.append(request)
        if self.error is not None:
            raise self.error
        for unit in list(request.unit_hashes)[: self.num_held]:
            await asyncio.sleep(self.delay)
            name = unit.to_bytes(32, "little")
            yield pb.FetchBlocksResponse(block_hash=name, data=b"x" * FORMAT.block_bytes, unit_hashes=[name])


class Rig:
    """A prefetcher between an engine and a source."""

    def __init__(self, address: str, source: Source) -> None:
        self.address, self.source = address, source
        self.engine, self.journal = Engine(), KvJournal()
        self.counted: list[str] = []
        self.ends: list[HintEnd] = []
        self.prefetcher = Prefetcher(self.engine, self.journal, self.counted.append)  # type: ignore[arg-type]
        self.prefetcher.format = FORMAT

    async def hint(self, **changes: Any) -> None:
        fields: dict[str, Any] = {"source_address": self.address, "source_ticket": b"t", "block_hashes": UNITS}
        self.prefetcher.hint(PrefetchPrefix(model="m", **{**fields, **changes}), self.ends.append)
        await asyncio.gather(*self.prefetcher._tasks)

    @property
    def end(self) -> tuple[str, str]:
        (end,) = self.ends
        name = HintOutcome.Name(end.outcome).removeprefix("HINT_OUTCOME_").lower()
        assert self.counted == [name]
        return name, end.message


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    server, source = grpc.aio.server(interceptors=[ErrorInterceptor()]), Source()
    kv_transfer_service_pb2_grpc.add_KvTransferServiceServicer_to_server(source, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    made = Rig(f"127.0.0.1:{port}", source)
    yield made
    await made.prefetcher.close()
    await server.stop(0)


async def test_brought_in_time_and_used(rig: Rig) -> None:
    await rig.hint()
    assert rig.ends == [], "it has not ended before a request came, or none did"
    (command,) = rig.engine.taken
    assert len(command.blocks) == 3
    request = rig.source.requests[0]
    assert (request.ticket_token, tuple(request.unit_hashes), request.kv_type) == (b"t", UNITS, "null")
    assert rig.prefetcher.rate.bytes_per_second > 0
    rig.engine.on_blocks_used(command.exchange_id)
    rig.engine.on_blocks_used(command.exchange_id)
    assert rig.end == ("used", "")


async def test_brought_and_nobody_came(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "UNUSED_SECONDS", 0.05)
    await rig.hint()
    await asyncio.sleep(0.2)
    assert rig.end[0] == "unused"
    rig.engine.on_blocks_used(rig.engine.taken[0].exchange_id)
    assert rig.end[0] == "unused"


async def test_the_request_came_first(rig: Rig) -> None:
    rig.engine.present = 3
    await rig.hint()
    assert rig.end[0] == "late"


async def test_a_part_of_it(rig: Rig) -> None:
    rig.source.num_held = 2
    await rig.hint()
    assert rig.end == ("clipped", "2 blocks, 2 of 3 units; the other agent holds no more of it")


async def test_no_room_for_all_of_it(rig: Rig) -> None:
    rig.engine.room = 1
    await rig.hint()
    assert rig.end == ("clipped", "1 blocks, 1 of 3 units; there is no room for more")


async def test_a_fetch_slower_than_computing_is_given_up(rig: Rig) -> None:
    rig.source.delay = 5.0
    await rig.hint(time_limit=duration_of(0.05))
    assert rig.end == ("refused", "it took longer than the 0.05 s of computing it")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"block_hashes": ()}, "no block hashes"),
        ({"source_address": "127.0.0.1:1", "source_agent_id": "gone"}, "agent gone at 127.0.0.1:1"),
    ],
)
async def test_hints_that_cannot_be_followed(rig: Rig, changes: dict[str, Any], reason: str) -> None:
    await rig.hint(**changes)
    assert rig.end[0] == "refused" and reason in rig.end[1]


async def test_refusals_of_the_other_agent_are_told(rig: Rig) -> None:
    rig.source.error = DragomanError(error_pb2.ERROR_REASON_KV_LAYOUT_MISMATCH, "kv_type is 'a' there and 'b' here")
    await rig.hint()
    assert rig.end[0] == "refused" and "kv_type is 'a' there" in rig.end[1]


async def test_nothing_is_left_at_the_source(rig: Rig) -> None:
    rig.source.num_held = 0
    await rig.hint()
    assert rig.end == ("refused", "the other agent no longer holds any of it")


async def test_what_is_held_is_not_fetched(rig: Rig) -> None:
    rig.journal.take([unit.to_bytes(8, "little") for unit in UNITS], [])
    await rig.hint()
    assert rig.end[0] == "refused" and "held here already" in rig.end[1] and not rig.source.requests


async def test_a_device_without_blocks_and_too_many_at_once(rig: Rig) -> None:
    rig.source.delay = 0.2
    wanted = PrefetchPrefix(source_address=rig.address, block_hashes=UNITS)
    for _ in range(prefetch.MAX_NUM_FETCHES):
        rig.prefetcher.hint(wanted, lambda end: None)
    rig.prefetcher.hint(wanted, rig.ends.append)
    assert "fetches are under way" in rig.end[1]
    rig.prefetcher.format = None
    rig.prefetcher.hint(wanted, rig.ends.append)
    assert "does not take in KV blocks" in rig.ends[1].message


async def test_brought_up_from_the_lower_tiers_and_used(rig: Rig) -> None:
    await rig.hint(source_address="")
    (command,) = rig.engine.brought
    assert command.units == [unit.to_bytes(8, "little") for unit in UNITS] and not rig.source.requests
    assert rig.ends == [] and rig.prefetcher.rate.bytes_per_second == 0
    rig.engine.on_blocks_used(command.exchange_id)
    assert rig.end == ("used", "")


@pytest.mark.parametrize(
    ("room", "present", "problem", "end"),
    [
        (2, 0, "there is no room for more", ("clipped", "2 blocks, 2 of 3 units; there is no room for more")),
        (2, 0, "", ("clipped", "2 blocks, 2 of 3 units; the lower tiers hold no more of it")),
        (0, 0, "none of it is held in the lower tiers", ("refused", "none of it is held in the lower tiers")),
        (0, 3, "", ("late", "a request computed the prefix meanwhile")),
    ],
)
async def test_ends_of_a_hint_at_the_lower_tiers(
    rig: Rig, room: int, present: int, problem: str, end: tuple[str, str]
) -> None:
    rig.engine.room, rig.engine.present, rig.engine.problem = room, present, problem
    await rig.hint(source_address="")
    assert rig.end == end
