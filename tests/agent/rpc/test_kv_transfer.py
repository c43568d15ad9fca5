"""FetchBlocks of a real agent: whole prefixes by unit, refusals by what differs, a reader that stops reading."""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from typing import Any

import grpc
import pytest

from dragoman.channel import channel_options
from dragoman.errors import DragomanError, from_rpc_error
from dragoman.prefix_hash import prefix_hashes, root_hash, transfer_digest, wire_hash
from dragoman.v1 import generation_service_pb2 as gen
from dragoman.v1 import generation_service_pb2_grpc, kv_transfer_service_pb2_grpc
from dragoman.v1 import kv_transfer_service_pb2 as pb
from dragoman_agent.device.null_model import NullModel
from dragoman_agent.prefetch import TransferRate, whole_blocks

DIGEST = bytes.fromhex(NullModel().digest)


def request(units: list[int], **changes: Any) -> pb.FetchBlocksRequest:
    fields: dict[str, Any] = {
        "model_digest": DIGEST, "kv_type": "null", "layout": "states, tokens", "block_tokens": 64,
        "unit_hashes": units,
    }  # fmt: skip
    return pb.FetchBlocksRequest(**{**fields, **changes})


async def computed(channel: grpc.aio.Channel, num_units: int) -> list[int]:
    """Has the agent compute a prompt of its own; the wire hashes of its units."""
    prompt = [1 + byte for byte in hashlib.shake_128(uuid.uuid4().bytes).digest(64 * num_units + 5)]
    message = gen.GenerateRequest(request_id=str(uuid.uuid4()), stop=gen.StopCriteria(max_output_tokens=1))
    message.token_ids.ids.extend(prompt)
    stub = generation_service_pb2_grpc.GenerationServiceStub(channel)
    assert [m async for m in stub.Generate(message)][-1].HasField("finished")
    return [wire_hash(unit) for unit in prefix_hashes(root_hash(DIGEST), prompt)]


async def fetch(channel: grpc.aio.Channel, message: pb.FetchBlocksRequest) -> list[Any]:
    stub = kv_transfer_service_pb2_grpc.KvTransferServiceStub(channel)
    return [block async for block in whole_blocks(stub.FetchBlocks(message))]


async def refusal(channel: grpc.aio.Channel, message: pb.FetchBlocksRequest) -> DragomanError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await fetch(channel, message)
    return from_rpc_error(caught.value)


async def test_a_prefix_is_sent_whole_and_in_order(channel: grpc.aio.Channel) -> None:
    units = await computed(channel, 40)
    blocks = await fetch(channel, request(units))
    assert [wire_hash(unit) for block in blocks for unit in block.units] == units
    assert blocks[0].parent == b"" and [b.parent for b in blocks[1:]] == [b.digest for b in blocks[:-1]]
    assert {len(block.data) for block in blocks} == {64 * 12}
    shorter = await fetch(channel, request([*units[:7], 12345]))
    assert shorter == blocks[:7], "up to the last unit that is held"
    assert await fetch(channel, request([12345])) == []
    by_hash = await fetch(channel, request([], block_hashes=[block.digest for block in blocks[:3]]))
    assert by_hash == blocks[:3]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"model_digest": b"x" * 32}, "model_digest"),
        ({"kv_type": "float16"}, "kv_type"),
        ({"layout": "other"}, "layout"),
        ({"block_tokens": 16}, "block_tokens"),
    ],
)
async def test_another_format_is_refused_by_what_differs(
    channel: grpc.aio.Channel, changes: dict[str, Any], param: str
) -> None:
    error = await refusal(channel, request([1], **changes))
    assert error.reason_name == "kv_layout_mismatch" and error.metadata["param"] == param
    assert "compute the prefix" in error.message


async def test_absurd_numbers_of_hashes_are_refused(channel: grpc.aio.Channel) -> None:
    for message in (request([]), request(list(range(1, 20_000))), request([1], block_hashes=[b"x" * 32])):
        assert (await refusal(channel, message)).metadata["param"] == "unit_hashes"


async def test_a_reader_that_stops_reading_holds_up_nobody(channel: grpc.aio.Channel) -> None:
    units = await computed(channel, 400)
    stub = kv_transfer_service_pb2_grpc.KvTransferServiceStub(channel)
    stalled = [stub.FetchBlocks(request(units)) for _ in range(4)]
    for call in stalled:
        await call.read()
    assert await asyncio.wait_for(computed(channel, 2), 5)
    for call in stalled:
        call.cancel()
    async with asyncio.timeout(5):
        while True:  # until the agent has noticed
            try:
                assert len(await fetch(channel, request(units))) == 400
                break
            except grpc.aio.AioRpcError as error:
                assert from_rpc_error(error).reason_name == "queue_full"
                await asyncio.sleep(0.05)


async def test_an_agent_with_tickets_hands_nothing_out_without(start_agent: Any) -> None:
    agent = start_agent("--controllers", "127.0.0.1:1", open=False)
    async with grpc.aio.insecure_channel(agent.address, options=channel_options()) as channel:
        assert (await refusal(channel, request([1]))).reason_name == "ticket_required"


async def test_pieces_of_a_block_are_put_together() -> None:
    async def pieces() -> Any:
        for name, data in ((b"a", b"1"), (b"a", b"2"), (b"b", b"3"), (b"c", b""), (b"c", b"4")):
            yield pb.FetchBlocksResponse(block_hash=name, data=data)

    assert [(block.digest, block.data) async for block in whole_blocks(pieces())] == [
        (b"a", b"12"), (b"b", b"3"), (b"c", b"4"),
    ]  # fmt: skip


def test_the_rate_follows_what_is_seen() -> None:
    rate = TransferRate()
    rate.learn(0, 0.0, 1.0)
    assert rate.bytes_per_second == 0
    rate.learn(1000, 0.5, 1.5)
    assert (rate.bytes_per_second, rate.base_seconds) == (1000, 0.5)
    for _ in range(50):
        rate.learn(8000, 0.25, 1.25)
    assert rate.bytes_per_second == pytest.approx(8000, rel=1e-3) and rate.base_seconds == pytest.approx(0.25, rel=1e-3)


def test_a_transfer_is_bound_to_its_units_and_to_nothing_else() -> None:
    from dragoman.prefix_hash import prompt_digest_of_ids

    assert transfer_digest([1, 2]) != transfer_digest([2, 1])
    assert transfer_digest([1]) != prompt_digest_of_ids([1, 0])
