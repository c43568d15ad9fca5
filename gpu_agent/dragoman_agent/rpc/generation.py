"""GenerationService: Generate, Attach and CancelGeneration."""

from __future__ import annotations

from collections.abc import AsyncIterator

from dragoman.serving import Context
from dragoman.v1 import generation_service_pb2, generation_service_pb2_grpc
from dragoman_agent.engine.messages import Delta, Failed, Finished, Start
from dragoman_agent.rpc.acceptance import Acceptance
from dragoman_agent.rpc.attach import AttachConnection
from dragoman_agent.rpc.convert import TokenBytes, fill_response
from dragoman_agent.rpc.engine_client import EngineClient
from dragoman_agent.rpc.served_model import ServedModel
from dragoman_agent.rpc.streaming import stream_generation
from dragoman_agent.rpc.validate import check_request_id


class GenerationServicer(generation_service_pb2_grpc.GenerationServiceServicer):
    """Streams tokens. Whatever ends a stream early frees its blocks within two engine steps."""

    def __init__(self, engine: EngineClient, acceptance: Acceptance, model: ServedModel, epoch: int) -> None:
        """`epoch` marks every Attach frame."""
        self._engine = engine
        self._acceptance = acceptance
        self._model = model
        self._epoch = epoch
        self._open_attaches: set[AttachConnection] = set()

    async def Generate(self, request: generation_service_pb2.GenerateRequest, context: Context) -> None:
        """One request: a start, deltas, one end. Deltas of a choice that wait for the reader are merged."""
        token_bytes = self._model.token_bytes
        await stream_generation(
            self._engine, self._acceptance, token_bytes, request, context, _GenerateReplies(token_bytes)
        )

    async def Attach(
        self,
        request_iterator: AsyncIterator[generation_service_pb2.AttachRequest],
        context: Context,
    ) -> None:
        """Many requests of one gateway: one frame a step with the events of all of them."""
        connection = AttachConnection(self._engine, self._acceptance, self._model, self._epoch)
        self._open_attaches.add(connection)
        try:
            await connection.serve(request_iterator, context)
        finally:
            self._open_attaches.discard(connection)
            connection.close()

    async def CancelGeneration(
        self, request: generation_service_pb2.CancelGenerationRequest, context: Context
    ) -> generation_service_pb2.CancelGenerationResponse:
        """Cancel by id from anywhere; the stream of the request ends with `finished`."""
        check_request_id(request.request_id)
        self._engine.cancel(request.request_id)
        return generation_service_pb2.CancelGenerationResponse()

    def finish_attaches(self) -> None:
        """End each Attach once its last generation has ended: the agent is closing."""
        for connection in self._open_attaches:
            connection.finish()


class _GenerateReplies:
    """Replies of Generate itself: one message an event."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes

    def of_start(
        self, start: Start, started: generation_service_pb2.GenerationStarted
    ) -> tuple[generation_service_pb2.GenerateResponse]:
        return (generation_service_pb2.GenerateResponse(started=started),)

    def of_event(self, event: Delta | Finished | Failed) -> tuple[generation_service_pb2.GenerateResponse]:
        message = generation_service_pb2.GenerateResponse()
        fill_response(message, event, self._token_bytes)
        return (message,)
