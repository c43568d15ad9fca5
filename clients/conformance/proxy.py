"""A gRPC proxy before a real server that forwards bytes and breaks one stream or ticket where a case says so."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import grpc

from dragoman.channel import channel_options, server_options
from dragoman.v1 import admission_service_pb2 as admission_pb
from dragoman.v1 import generation_service_pb2 as pb

_ACQUIRE = "/dragoman.v1.AdmissionService/AcquireTicket"
_GENERATE = "/dragoman.v1.GenerationService/Generate"


@dataclass
class Fault:
    """Breaks one Generate: at most `cut_after_tokens` tokens pass, then the connection seems to be lost."""

    cut_after_tokens: int
    _num_tokens: int = 0

    async def before(self, event: pb.GenerateResponse, context: Any) -> None:
        """Ends the call in place of an event that would pass the limit."""
        self._num_tokens += len(event.delta.token_ids)
        if self._num_tokens > self.cut_after_tokens:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "Connection reset by peer")


class Proxy(grpc.GenericRpcHandler):
    """Forwards every call. `next_fault` gives the fault of each stream that is accepted, `tamper` changes granted tickets."""

    def __init__(
        self,
        next_fault: Callable[[], Fault | None] | None = None,
        tamper: Callable[[admission_pb.AcquireTicketResponse], None] | None = None,
    ) -> None:
        self._channel: Any = None  # its methods are typed for messages, and bytes pass here
        self._next_fault = next_fault
        self._tamper = tamper
        self._server = grpc.aio.server(options=server_options())
        self.address = ""

    async def start(self) -> None:
        """Serves on a free port."""
        self._server.add_generic_rpc_handlers((self,))
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        self.address = f"127.0.0.1:{port}"

    def forward_to(self, target: str) -> None:
        """Names the server behind. To be called before the first call comes."""
        self._channel = grpc.aio.insecure_channel(target, options=channel_options())

    async def stop(self) -> None:
        """Ends every call that runs."""
        await self._server.stop(0)
        if self._channel is not None:
            await self._channel.close()

    def service(self, details: Any) -> Any:
        """The handler of any method."""

        async def forward(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            async for response in self._forward(details.method, requests, context):
                yield response

        return grpc.stream_stream_rpc_method_handler(forward)

    async def _forward(self, method: str, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        fault: Fault | None = None
        assert self._channel is not None
        call = self._channel.stream_stream(method)(requests, timeout=context.time_remaining())
        try:
            async for response in call:
                if method == _ACQUIRE and self._tamper is not None:
                    granted = admission_pb.AcquireTicketResponse.FromString(response)
                    self._tamper(granted)
                    response = granted.SerializeToString()
                if method == _GENERATE and self._next_fault is not None:
                    event = pb.GenerateResponse.FromString(response)
                    if event.WhichOneof("event") == "started":
                        fault = self._next_fault()  # only now: a stream that is refused cannot be cut
                    elif fault is not None:
                        await fault.before(event, context)
                yield response
        except grpc.aio.AioRpcError as error:
            await context.abort(error.code(), error.details(), tuple(error.trailing_metadata()))
        finally:
            call.cancel()
