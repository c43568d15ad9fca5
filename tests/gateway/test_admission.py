"""What becomes of requests that wait for a ticket while the stream to the controller breaks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from dragoman.controllers import Controllers
from dragoman.v1 import admission_service_pb2, admission_service_pb2_grpc
from dragoman_gateway.admission import Admissions
from dragoman_gateway.channels import Channels


class BreakingController(admission_service_pb2_grpc.AdmissionServiceServicer):
    """Ends its first stream with a status and no word of its own, and grants on the next."""

    def __init__(self, code: grpc.StatusCode) -> None:
        self._code = code
        self.num_streams = 0

    async def Admit(
        self, batches: AsyncIterator[admission_service_pb2.AdmitRequest], context: Any
    ) -> AsyncIterator[admission_service_pb2.AdmitResponse]:
        self.num_streams += 1
        async for batch in batches:
            if not batch.requests:
                continue
            if self.num_streams == 1:
                await context.abort(self._code, "Internal error from Core")
            granted = admission_service_pb2.AcquireTicketResponse(ticket=admission_service_pb2.Ticket(token=b"1"))
            answers = [
                admission_service_pb2.Admission(request_id=one.request_id, granted=granted) for one in batch.requests
            ]
            yield admission_service_pb2.AdmitResponse(admissions=answers)


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL])
async def test_a_stream_that_breaks_without_a_word_of_the_controller_is_opened_again(code: grpc.StatusCode) -> None:
    """INTERNAL is what grpc.aio makes of a connection that ends while a batch is written."""
    controller = BreakingController(code)
    server = grpc.aio.server()
    admission_service_pb2_grpc.add_AdmissionServiceServicer_to_server(controller, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channels = Channels()
    admissions = Admissions(channels, Controllers([f"127.0.0.1:{port}"]))
    running = asyncio.ensure_future(admissions.run())
    try:
        async with asyncio.timeout(10):
            granted = await admissions.acquire(admission_service_pb2.AcquireTicketRequest(request_id="r", model="m"))
        assert (granted.ticket.token, controller.num_streams) == (b"1", 2)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await channels.close()
        await server.stop(None)
