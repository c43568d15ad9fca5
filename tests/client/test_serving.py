"""ErrorInterceptor on a real gRPC server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from dragoman.errors import DragomanError, from_rpc_error
from dragoman.serving import ErrorInterceptor, as_dragoman_error
from dragoman.v1 import error_pb2

closed: asyncio.Event


class Faulty(grpc.GenericRpcHandler):
    """Methods named by how they fail; messages are raw bytes."""

    def service(self, details: Any) -> Any:
        name = details.method.rpartition("/")[2]
        return {
            "Unary": grpc.unary_unary_rpc_method_handler(self.fail),
            "Plain": grpc.unary_unary_rpc_method_handler(self.answer),
            "Coroutine": grpc.unary_stream_rpc_method_handler(self.write_then_fail),
            "Generator": grpc.unary_stream_rpc_method_handler(self.yield_then_fail),
            "Both": grpc.stream_stream_rpc_method_handler(self.echo_then_fail),
            "Endless": grpc.unary_stream_rpc_method_handler(self.endless),
        }.get(name)

    async def fail(self, request: bytes, context: Any) -> bytes:
        if request == b"bug":
            raise KeyError("secret of the server")
        if request == b"long":
            long = "\U0001f600" * 5000
            raise DragomanError(
                error_pb2.ERROR_REASON_INVALID_REQUEST, "f: " + long, metadata={"param": long, "x": long}
            )
        raise DragomanError(
            error_pb2.ERROR_REASON_QUEUE_FULL, "full: retry later", retry_delay=1.5, metadata={"limit": "3"}
        )

    async def answer(self, request: bytes, context: Any) -> bytes:
        return request

    async def write_then_fail(self, request: bytes, context: Any) -> None:
        await context.write(b"1")
        await self.fail(request, context)

    async def yield_then_fail(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b"1"
        await self.fail(request, context)

    async def echo_then_fail(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request
        await self.fail(b"", context)

    async def endless(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        try:
            while True:
                yield b"1"
                await asyncio.sleep(0.01)
        finally:
            closed.set()


@pytest.fixture
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    server = grpc.aio.server(interceptors=[ErrorInterceptor()])
    server.add_generic_rpc_handlers((Faulty(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as opened:
        yield opened
    await server.stop(0)


async def call(channel: grpc.aio.Channel, name: str, body: bytes) -> tuple[list[bytes], grpc.aio.AioRpcError]:
    """What came before the failure, and the failure."""
    received: list[bytes] = []
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        if name == "Unary":
            await channel.unary_unary("/t.T/Unary")(body)
        elif name == "Both":
            async for message in channel.stream_stream("/t.T/Both")(iter([body])):
                received.append(message)
        else:
            async for message in channel.unary_stream(f"/t.T/{name}")(body):
                received.append(message)
    return received, caught.value


@pytest.mark.parametrize(("name", "num_before"), [("Unary", 0), ("Coroutine", 1), ("Generator", 1), ("Both", 1)])
async def test_dragoman_error_becomes_status_and_detail(channel: grpc.aio.Channel, name: str, num_before: int) -> None:
    received, failure = await call(channel, name, b"x")
    assert len(received) == num_before
    assert (failure.code(), failure.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "full: retry later")
    error = from_rpc_error(failure)
    assert (error.reason_name, error.retry_delay, error.metadata) == ("queue_full", 1.5, {"limit": "3"})


@pytest.mark.parametrize("name", ["Unary", "Coroutine", "Generator"])
async def test_a_bug_is_internal_with_an_id_and_its_trace_only_in_the_log(
    channel: grpc.aio.Channel, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        _, failure = await call(channel, name, b"bug")
    error = from_rpc_error(failure)
    assert (failure.code(), error.reason_name) == (grpc.StatusCode.INTERNAL, "internal")
    assert "secret" not in str(failure.details()) and "Traceback" not in str(failure.details())
    assert error.metadata["fault_id"] in caplog.text and "secret of the server" in caplog.text


@pytest.mark.parametrize("name", ["Unary", "Coroutine", "Generator"])
async def test_a_message_that_quotes_a_long_text_still_fits_the_trailers(channel: grpc.aio.Channel, name: str) -> None:
    _, failure = await call(channel, name, b"long")
    error = from_rpc_error(failure)
    assert (failure.code(), error.reason_name) == (grpc.StatusCode.INVALID_ARGUMENT, "invalid_request")
    assert error.message.startswith("f: \U0001f600") and error.message.endswith("\U0001f600...")
    assert {key: len(value.encode()) <= 1000 for key, value in error.metadata.items()} == {"param": True, "x": True}


async def test_good_calls_and_unknown_methods_pass_untouched(channel: grpc.aio.Channel) -> None:
    assert await channel.unary_unary("/t.T/Plain")(b"hi") == b"hi"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await channel.unary_unary("/t.T/Nothing")(b"")
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


async def test_cancelled_generator_runs_its_finally_at_once(channel: grpc.aio.Channel) -> None:
    global closed
    closed = asyncio.Event()
    endless = channel.unary_stream("/t.T/Endless")(b"")
    await endless.read()
    endless.cancel()
    async with asyncio.timeout(2):
        await closed.wait()


def test_known_errors_pass_through() -> None:
    error = DragomanError(error_pb2.ERROR_REASON_NO_AGENT, "none")
    assert as_dragoman_error(error, "here") is error
