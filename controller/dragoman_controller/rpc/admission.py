"""AdmissionService."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from dragoman.durations import duration_of
from dragoman.errors import DragomanError
from dragoman.serving import Context
from dragoman.v1 import admission_service_pb2 as pb
from dragoman.v1 import admission_service_pb2_grpc as pb_grpc
from dragoman_controller.admission import Answer, Queued
from dragoman_controller.cell import Cell
from dragoman_controller.placer import Granted
from dragoman_controller.requests import AdmissionRequest
from dragoman_controller.rpc.convert import admission_request, quote_message, ticket_response


class AdmissionServicer(pb_grpc.AdmissionServiceServicer):
    """Answers clients and gateways."""

    def __init__(self, cell: Cell) -> None:
        self._cell = cell

    async def AcquireTicket(self, request: pb.AcquireTicketRequest, context: Context) -> pb.AcquireTicketResponse:
        """Waits until the request is admitted. A caller that leaves takes its request out of the queue."""
        wanted = admission_request(request)
        future: asyncio.Future[Granted | DragomanError] = asyncio.get_running_loop().create_future()

        def take(answer: Answer) -> None:
            if not isinstance(answer, Queued) and not future.done():
                future.set_result(answer)

        self._cell.admission.submit(wanted, take)
        try:
            answer = await future
        except asyncio.CancelledError:
            self._cell.admission.detach(wanted, take)
            raise
        if isinstance(answer, DragomanError):
            raise answer
        return ticket_response(answer)

    async def Admit(
        self, request_iterator: AsyncIterator[pb.AdmitRequest], context: Context
    ) -> AsyncIterator[pb.AdmitResponse]:
        """Answers batches; everything that is answered in one turn of the loop goes out in one message."""
        stream = _AdmitStream(self._cell)
        reader = asyncio.create_task(stream.read(request_iterator))
        try:
            while True:
                await stream.wake.wait()
                stream.wake.clear()
                if stream.answers:
                    answers, stream.answers = stream.answers, []
                    yield pb.AdmitResponse(admissions=answers)
                elif stream.finished and not stream.waiting:
                    break
            await reader
        finally:
            reader.cancel()
            stream.close()

    async def ReleaseTicket(self, request: pb.ReleaseTicketRequest, context: Context) -> pb.ReleaseTicketResponse:
        """Takes back an unused ticket."""
        self._cell.release_ticket(request.token)
        return pb.ReleaseTicketResponse()

    async def Quote(self, request: pb.QuoteRequest, context: Context) -> pb.QuoteResponse:
        """Tells the cost, grants nothing."""
        quote, agent_id = self._cell.admission.quote(admission_request(request.request))
        return pb.QuoteResponse(quote=quote_message(quote), agent_id=agent_id)


class _AdmitStream:
    """One gateway's stream: the answers that have not gone out, and the requests that still wait."""

    def __init__(self, cell: Cell) -> None:
        self._cell = cell
        self.answers: list[pb.Admission] = []
        self.waiting: dict[_Listener, None] = {}
        self.wake = asyncio.Event()
        self.finished = False

    async def read(self, requests: AsyncIterator[pb.AdmitRequest]) -> None:
        try:
            async for batch in requests:
                for message in batch.requests:
                    self._submit(message)
                for request_id in batch.abandoned_request_ids:
                    self._abandon(request_id)
        finally:
            self.finished = True
            self.wake.set()

    def put(self, admission: pb.Admission) -> None:
        self.answers.append(admission)
        self.wake.set()

    def close(self) -> None:
        """The gateway is gone: what waits for it alone is taken out of the queue."""
        for listener in list(self.waiting):
            self._cell.admission.detach(listener.request, listener)
        self.waiting.clear()

    def _submit(self, message: pb.AcquireTicketRequest) -> None:
        try:
            request = admission_request(message)
        except DragomanError as error:
            self.put(pb.Admission(request_id=message.request_id, refused=error.to_detail()))
            return
        self._cell.admission.submit(request, _Listener(self, request))

    def _abandon(self, request_id: str) -> None:
        for listener in [one for one in self.waiting if one.request.request_id == request_id]:
            del self.waiting[listener]
        self._cell.admission.abandon(request_id)


class _Listener:
    """Turns the answers to one request of a stream into messages."""

    __slots__ = ("_stream", "request")

    def __init__(self, stream: _AdmitStream, request: AdmissionRequest) -> None:
        self._stream = stream
        self.request = request

    def __call__(self, answer: Answer) -> None:
        admission = pb.Admission(request_id=self.request.request_id)
        if isinstance(answer, Queued):
            self._stream.waiting[self] = None
            admission.queued.position = answer.position
            admission.queued.predicted_wait.CopyFrom(duration_of(answer.predicted_wait_seconds))
        else:
            self._stream.waiting.pop(self, None)
            if isinstance(answer, DragomanError):
                admission.refused.CopyFrom(answer.to_detail())
            else:
                admission.granted.CopyFrom(ticket_response(answer))
        self._stream.put(admission)
