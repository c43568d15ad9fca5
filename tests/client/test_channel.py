"""The options reach gRPC under names that it knows, and do what they are there for."""

from __future__ import annotations

import asyncio
import contextlib

import grpc
import pytest

from dragoman.channel import MAX_MESSAGE_BYTES, channel_options, server_options


def test_values_of_the_design() -> None:
    server, channel = dict(server_options()), dict(channel_options())
    for options in (server, channel):
        assert options["grpc.keepalive_time_ms"] == 4500
        assert options["grpc.keepalive_timeout_ms"] == 2000
        assert options["grpc.http2.ping_timeout_ms"] == 2000
        assert options["grpc.keepalive_permit_without_calls"] == 1
        assert options["grpc.http2.bdp_probe"] == 0
        assert options["grpc.max_receive_message_length"] == options["grpc.max_send_message_length"] == 16 << 20
    assert server["grpc.http2.min_ping_interval_without_data_ms"] == 1000
    assert server["grpc.server.max_pending_requests"] == 20_000
    assert server["grpc.server.max_pending_requests_hard_limit"] == 40_000
    assert server["grpc.so_reuseport"] == 0


async def echo(request: bytes, _context: object) -> bytes:
    return request


@contextlib.asynccontextmanager
async def serving():
    server = grpc.aio.server(options=server_options())
    handler = grpc.unary_unary_rpc_method_handler(echo)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Echo", {"Echo": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(0)


async def test_a_large_message_passes_and_a_larger_one_is_refused() -> None:
    async with serving() as port, grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=channel_options()) as channel:
        call = channel.unary_unary("/test.Echo/Echo")
        large = bytes(MAX_MESSAGE_BYTES - 1024)
        assert await asyncio.wait_for(call(large), 10) == large
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await call(bytes(MAX_MESSAGE_BYTES + 1))
        assert failure.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_second_server_cannot_share_the_port() -> None:
    async with serving() as port:
        second = grpc.aio.server(options=server_options())
        with pytest.raises(RuntimeError):
            second.add_insecure_port(f"127.0.0.1:{port}")


async def test_a_web_proxy_does_not_swallow_the_data_plane(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("no_grpc_proxy", raising=False)
    async with serving() as port, grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=channel_options()) as channel:
        assert await asyncio.wait_for(channel.unary_unary("/test.Echo/Echo")(b"hi", timeout=5), 10) == b"hi"
