"""The catalogue is whole, and a failure survives the wire."""

import grpc
import pytest

from dragoman.errors import DragomanError, error_metadata, from_rpc_error, reason_name, traits
from dragoman.v1 import error_pb2

REASONS = [v.number for v in error_pb2.ErrorReason.DESCRIPTOR.values]


@pytest.mark.parametrize("reason", REASONS)
def test_every_reason_has_traits_that_agree(reason: int) -> None:
    entry = traits(reason)
    assert 400 <= entry.http_status <= 599
    assert entry.grpc_code is not grpc.StatusCode.OK
    assert entry.remedy.endswith(".")
    # SDKs repeat 5xx, 408, 409 and 429 by themselves: a client's own mistake must not be among them.
    if entry.grpc_code is grpc.StatusCode.INVALID_ARGUMENT:
        assert entry.http_status == 400
        assert not entry.retryable


def test_unknown_reason_counts_as_internal() -> None:
    assert traits(9999).http_status == 500
    assert reason_name(9999) == "unknown_9999"


def test_detail_round_trip() -> None:
    error = DragomanError(error_pb2.ERROR_REASON_QUEUE_FULL, "full", retry_delay=1.25, metadata={"limit": "8"})
    again = DragomanError.from_detail(error.to_detail())
    assert (again.reason, again.message, again.retry_delay, again.metadata) == (
        error.reason,
        "full",
        1.25,
        {"limit": "8"},
    )


async def test_detail_crosses_a_real_call() -> None:
    error = DragomanError(error_pb2.ERROR_REASON_TICKET_EXPIRED, "too late")

    async def handler(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        await context.abort(error.grpc_code, error.message, trailing_metadata=error_metadata(error))
        return b""

    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("t.T", {"M": grpc.unary_unary_rpc_method_handler(handler)}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            with pytest.raises(grpc.RpcError) as caught:
                await channel.unary_unary("/t.T/M")(b"")
        received = from_rpc_error(caught.value)
        assert received.reason == error_pb2.ERROR_REASON_TICKET_EXPIRED
        assert received.retryable
        assert received.message == "too late"
    finally:
        await server.stop(None)
