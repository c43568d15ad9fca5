"""Attach against a real agent and engine process."""

from __future__ import annotations

import asyncio
import uuid
from collections import defaultdict
from typing import Any

import grpc
import pytest

from dragoman.errors import from_rpc_error
from dragoman.v1 import generation_service_pb2_grpc, telemetry_service_pb2, telemetry_service_pb2_grpc
from dragoman.v1.generation_service_pb2 import (
    FINISH_REASON_CANCELLED,
    AttachCancel,
    AttachCredit,
    AttachEvent,
    AttachRequest,
    AttachStart,
    GenerateRequest,
    SamplingParameters,
    StopCriteria,
)


class Gateway:
    """One Attach: keeps each stream's events."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.call = generation_service_pb2_grpc.GenerationServiceStub(channel).Attach()
        self.events: dict[int, list[AttachEvent]] = defaultdict(list)
        self.num_frames = 0

    async def start(self, stream_id: int, *, text: str = "hello", max_tokens: int = 8, **fields: Any) -> str:
        request = GenerateRequest(
            request_id=str(uuid.uuid4()), text=text, stop=StopCriteria(max_output_tokens=max_tokens), **fields
        )
        await self.call.write(AttachRequest(start=AttachStart(stream_id=stream_id, request=request)))
        return request.request_id

    async def credit(self, stream_id: int, until: int) -> None:
        await self.call.write(AttachRequest(credit=AttachCredit(stream_id=stream_id, until_cursor=until)))

    async def cancel(self, stream_id: int) -> None:
        await self.call.write(AttachRequest(cancel=AttachCancel(stream_id=stream_id)))

    async def read(self) -> bool:
        frame = await self.call.read()
        if frame is grpc.aio.EOF:
            return False
        self.num_frames += 1
        assert frame.epoch
        for event in frame.events:
            self.events[event.stream_id].append(event)
        return True

    async def read_until_ended(self, *streams: int, timeout: float = 10.0) -> None:
        async with asyncio.timeout(timeout):
            while not all(self.has_ended(stream) for stream in streams):
                assert await self.read()

    def has_ended(self, stream: int) -> bool:
        return bool(self.events[stream]) and (
            self.events[stream][-1].HasField("refused")
            or self.events[stream][-1].response.WhichOneof("event") in ("finished", "failed")
        )

    def num_tokens(self, stream: int) -> int:
        return sum(len(e.response.delta.token_ids) for e in self.events[stream])

    def check(self, stream: int) -> None:
        """Started, contiguous cursors, one end."""
        kinds = [event.response.WhichOneof("event") for event in self.events[stream]]
        assert kinds[0] == "started" and kinds.count("started") == 1
        assert kinds[-1] == "finished"
        cursor = 0
        for event in self.events[stream]:
            if event.response.HasField("delta"):
                assert event.response.delta.cursor == cursor
                cursor += len(event.response.delta.token_ids)


async def until_live(channel: grpc.aio.Channel, count: int, timeout: float = 20.0) -> None:
    """Until the load says that so many requests run or wait. It follows the engine's steps and idle ticks."""
    request = telemetry_service_pb2.WatchLoadRequest()
    request.interval.FromMilliseconds(20)
    call = telemetry_service_pb2_grpc.TelemetryServiceStub(channel).WatchLoad(request)
    async with asyncio.timeout(timeout):
        async for response in call:
            load = response.agents[0].load
            if load.running_requests + load.waiting_requests == count:
                call.cancel()
                return


async def test_a_hundred_streams_share_frames(channel: grpc.aio.Channel) -> None:
    gateway = Gateway(channel)
    for stream in range(100):
        await gateway.start(stream, text=f"prompt {stream}", max_tokens=20 + stream % 7)
    await gateway.read_until_ended(*range(100))
    for stream in range(100):
        gateway.check(stream)
        assert gateway.num_tokens(stream) == 20 + stream % 7
    num_events = sum(map(len, gateway.events.values()))
    assert gateway.num_frames < num_events / 4
    await gateway.call.done_writing()
    assert await gateway.call.read() is grpc.aio.EOF


async def test_agent_never_sends_past_the_credit(channel: grpc.aio.Channel) -> None:
    gateway = Gateway(channel)
    await gateway.start(1, max_tokens=2000)
    await gateway.start(2, max_tokens=50, initial_credit=3)
    while gateway.num_tokens(1) < 256 or gateway.num_tokens(2) < 3:
        assert await gateway.read()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await gateway.read()
    assert (gateway.num_tokens(1), gateway.num_tokens(2)) == (256, 3)


async def test_credit_lets_a_stream_go_on(channel: grpc.aio.Channel) -> None:
    gateway = Gateway(channel)
    await gateway.start(2, max_tokens=50, initial_credit=0)
    assert await gateway.read()
    for until in (1, 10, 50):
        await gateway.credit(2, until)
        while gateway.num_tokens(2) < until:
            assert await gateway.read()
        assert gateway.num_tokens(2) == until
    await gateway.read_until_ended(2)
    gateway.check(2)


async def test_refusal_is_an_event_and_others_go_on(channel: grpc.aio.Channel) -> None:
    gateway = Gateway(channel)
    await gateway.start(1, max_tokens=100)
    await gateway.start(2, sampling=SamplingParameters(temperature=float("nan")))
    await gateway.start(3, text="x" * 40_000)
    await gateway.start(4, model="nope")
    await gateway.read_until_ended(1, 2, 3, 4)
    gateway.check(1)
    assert [e.refused.metadata["param"] for e in gateway.events[2]] == ["sampling.temperature"]
    assert [e.refused.metadata["param"] for e in gateway.events[3]] == ["prompt"]
    assert [e.refused.metadata["param"] for e in gateway.events[4]] == ["model"]


async def test_cancel_ends_one_stream_with_its_finish(channel: grpc.aio.Channel) -> None:
    gateway = Gateway(channel)
    await gateway.start(1, max_tokens=5000)
    await gateway.start(2, max_tokens=100)
    while not gateway.num_tokens(1):
        assert await gateway.read()
    await gateway.cancel(1)
    await gateway.cancel(77)
    await gateway.credit(77, 5)
    await gateway.read_until_ended(1, 2)
    gateway.check(2)
    assert gateway.events[1][-2].response.delta.finish.reason == FINISH_REASON_CANCELLED


async def test_long_prompt_does_not_hold_the_others_up_and_can_be_cancelled(channel: grpc.aio.Channel) -> None:
    gateway = Gateway(channel)
    await gateway.start(1, text="y" * 30_000, max_tokens=3)
    await gateway.start(2, text="short", max_tokens=3)
    await gateway.start(3, text="z" * 30_000, max_tokens=3)
    await gateway.cancel(3)
    await gateway.read_until_ended(1, 2, 3)
    gateway.check(1)
    gateway.check(2)
    first = next(iter(gateway.events[1])).response.started
    assert first.prompt_tokens == 30_000


async def test_closing_the_call_cancels_all(channel: grpc.aio.Channel) -> None:
    gateway = Gateway(channel)
    for stream in range(20):
        await gateway.start(stream, max_tokens=5000)
    while len(gateway.events) < 20:
        assert await gateway.read()
    await until_live(channel, 20)
    gateway.call.cancel()
    await until_live(channel, 0)


async def test_half_close_lets_running_streams_end(channel: grpc.aio.Channel) -> None:
    gateway = Gateway(channel)
    await gateway.start(1, max_tokens=100)
    await gateway.call.done_writing()
    while await gateway.read():
        pass
    gateway.check(1)
    assert await gateway.call.code() == grpc.StatusCode.OK


async def test_stream_id_in_use_ends_the_call(channel: grpc.aio.Channel) -> None:
    gateway = Gateway(channel)
    await gateway.start(1, max_tokens=5000)
    await gateway.start(1, max_tokens=5000)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        while await gateway.read():
            pass
    error = from_rpc_error(caught.value)
    assert (error.reason_name, error.metadata["param"]) == ("invalid_request", "start.stream_id")
    await until_live(channel, 0)


async def test_stream_id_may_be_used_again_after_its_end(channel: grpc.aio.Channel) -> None:
    gateway = Gateway(channel)
    for _ in range(3):
        gateway.events.clear()
        await gateway.start(1, max_tokens=3)
        await gateway.read_until_ended(1)
        gateway.check(1)


async def test_message_of_a_later_version_is_ignored(channel: grpc.aio.Channel) -> None:
    gateway = Gateway(channel)
    await gateway.call.write(AttachRequest())
    await gateway.start(1, max_tokens=3)
    await gateway.read_until_ended(1)
    gateway.check(1)
