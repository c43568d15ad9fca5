"""AdmissionService."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable

from dragoman.errors import DragomanError
from dragoman.serving import Context
from dragoman.v1 import admission_service_pb2 as pb
from dragoman.v1 import admission_service_pb2_grpc as pb_grpc
from dragoman_controller.admission import Answer, Queued
from dragoman_controller.cell import Cell
from dragoman_controller.granted import Granted
from dragoman_controller.native.library import Library
from dragoman_controller.requests import AdmissionRequest
from dragoman_controller.rpc.answers import AnswerWriter
from dragoman_controller.rpc.convert import admission_request, fill_quote

# Requests decided in one turn of the loop, and answers that may wait for their gateway to read.
MAX_BATCH = 256
MAX_NUM_UNSENT = 4096


class AdmissionServicer(pb_grpc.AdmissionServiceServicer):
    """Answers clients and gateways."""

    def __init__(self, cell: Cell, library: Library | None = None) -> None:
        """`library`: what writes quotes."""
        self._cell = cell
        self._writer = AnswerWriter(library)

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
        return self._writer.granted(answer)

    async def Admit(
        self, request_iterator: AsyncIterator[pb.AdmitRequest], context: Context
    ) -> AsyncIterator[pb.AdmitResponse]:
        """Answers batches; everything that is answered in one turn of the loop goes out in one message."""
        stream = _AdmitStream(self._cell, self._writer)
        reader = asyncio.create_task(stream.read(request_iterator))
        try:
            while True:
                await stream.wake.wait()
                stream.wake.clear()
                if stream.answers:
                    yield stream.take_answer()
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
        response = pb.QuoteResponse(agent_id=agent_id)
        fill_quote(response.quote, quote)
        return response


class _AdmitStream:
    """One gateway's stream: the answers that have not gone out, and the requests that still wait.

    A batch is read, decided, and written out in three passes: each is many times the same work, which the processor then
    has in its caches.
    """

    def __init__(self, cell: Cell, writer: AnswerWriter) -> None:
        self._cell, self._writer = cell, writer
        self.answers: list[tuple[str, Answer]] = []
        """What has been answered and not sent, by request id."""
        self.waiting: dict[_Listener, None] = {}
        self.wake = asyncio.Event()
        self.finished = False
        self._is_read = asyncio.Event()  # a gateway that does not read its answers is not read either
        self._listeners_of: dict[str, list[_Listener]] = {}

    async def read(self, requests: AsyncIterator[pb.AdmitRequest]) -> None:
        try:
            async for batch in requests:
                # Others are heard between the parts of a message, however long it is.
                for start in range(0, len(batch.requests), MAX_BATCH):
                    self.take_requests(batch.requests[start : start + MAX_BATCH])
                    await self._next_turn()
                for start in range(0, len(batch.abandoned_request_ids), MAX_BATCH):
                    for request_id in batch.abandoned_request_ids[start : start + MAX_BATCH]:
                        self._abandon(request_id)
                    await self._next_turn()
        finally:
            self.finished = True
            self.wake.set()

    async def _next_turn(self) -> None:
        while len(self.answers) > MAX_NUM_UNSENT:
            self._is_read.clear()
            await self._is_read.wait()
        await asyncio.sleep(0)

    def take_requests(self, messages: Iterable[pb.AcquireTicketRequest]) -> None:
        """Decides on every request of a batch."""
        requests = []
        for message in messages:
            try:
                requests.append(admission_request(message))
            except DragomanError as error:
                self.answer(message.request_id, error)
        submit = self._cell.admission.submit
        for request in requests:
            submit(request, _Listener(self, request))

    def take_answer(self) -> pb.AdmitResponse:
        """The message with everything answered so far."""
        answers, self.answers = self.answers, []
        self._is_read.set()
        return self._writer.batch(answers)

    def close(self) -> None:
        """The gateway is gone: what waits for it alone is taken out of the queue."""
        for listener in list(self.waiting):
            self._cell.admission.detach(listener.request, listener)
        self.waiting.clear()

    def answer(self, request_id: str, answer: Answer) -> None:
        """Puts an answer on its way."""
        self.answers.append((request_id, answer))
        self.wake.set()

    def wait_for(self, listener: _Listener) -> None:
        """Another answer follows."""
        if listener not in self.waiting:
            self.waiting[listener] = None
            self._listeners_of.setdefault(listener.request.request_id, []).append(listener)

    def is_answered(self, listener: _Listener) -> None:
        """Nothing follows."""
        if self.waiting.pop(listener, self) is not self:
            listeners = self._listeners_of[listener.request.request_id]
            listeners.remove(listener)
            if not listeners:
                del self._listeners_of[listener.request.request_id]

    def _abandon(self, request_id: str) -> None:
        for listener in list(self._listeners_of.get(request_id, ())):
            self.is_answered(listener)
        self._cell.admission.abandon(request_id)


class _Listener:
    """Hands the answers to one request on to its stream."""

    __slots__ = ("_stream", "request")

    def __init__(self, stream: _AdmitStream, request: AdmissionRequest) -> None:
        self._stream = stream
        self.request = request

    def __call__(self, answer: Answer) -> None:
        if isinstance(answer, Queued):
            self._stream.wait_for(self)
        elif self._stream.waiting:
            self._stream.is_answered(self)
        self._stream.answer(self.request.request_id, answer)
