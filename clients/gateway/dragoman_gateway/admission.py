"""Tickets from the controller, over one Admit stream: what arrives in one turn of the loop goes out in one message."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

import grpc

from dragoman.errors import DragomanError, from_rpc_error
from dragoman.v1 import admission_service_pb2, admission_service_pb2_grpc, error_pb2

logger = logging.getLogger(__name__)

MAX_BATCH = 256
UNREACHABLE_AFTER_SECONDS = 3.0
_FIRST_RETRY_SECONDS = 0.05
_MAX_RETRY_SECONDS = 1.0
AdmitCall: TypeAlias = (
    "grpc.aio.StreamStreamCall[admission_service_pb2.AdmitRequest, admission_service_pb2.AdmitResponse]"
)
_DOWN_CODES = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


@dataclass(slots=True)
class _Waiting:
    request: admission_service_pb2.AcquireTicketRequest
    future: asyncio.Future[admission_service_pb2.AcquireTicketResponse]


class Admissions:
    """Asks for tickets. Requests that wait are asked again after a reconnect; the controller knows them by id."""

    def __init__(self, channel: grpc.aio.Channel, address: str) -> None:
        self._stub = admission_service_pb2_grpc.AdmissionServiceStub(channel)
        self._address = address
        self._waiting: dict[str, _Waiting] = {}
        self._unsent: list[str] = []
        self._abandoned: list[str] = []
        self._wake = asyncio.Event()
        self._down_since: float | None = None

    async def acquire(
        self, request: admission_service_pb2.AcquireTicketRequest
    ) -> admission_service_pb2.AcquireTicketResponse:
        """The grant of `request`. Raises DragomanError when it is refused, or when the controller cannot be reached.

        Cancelling the caller takes the request out of the controller's queue.
        """
        if self._is_unreachable():
            raise self._unreachable()
        future: asyncio.Future[admission_service_pb2.AcquireTicketResponse] = asyncio.get_running_loop().create_future()
        self._waiting[request.request_id] = _Waiting(request, future)
        self._unsent.append(request.request_id)
        self._wake.set()
        try:
            return await future
        except asyncio.CancelledError:
            self.abandon(request.request_id)
            raise
        finally:
            self._waiting.pop(request.request_id, None)

    def abandon(self, request_id: str) -> None:
        """Return the ticket of a request, or its place in the queue."""
        self._abandoned.append(request_id)
        self._wake.set()

    async def run(self) -> None:
        """Keep the stream up until cancelled."""
        delay = _FIRST_RETRY_SECONDS
        while True:
            call = self._stub.Admit()
            writer = asyncio.ensure_future(self._write(call))
            try:
                async for response in call:
                    self._down_since, delay = None, _FIRST_RETRY_SECONDS
                    for admission in response.admissions:
                        self._answer(admission)
            except grpc.aio.AioRpcError as error:
                self._failed(error)
            except Exception:
                logger.exception("the admission stream failed and is started again")
            finally:
                writer.cancel()
                with suppress(asyncio.CancelledError):
                    await writer
                call.cancel()
            await asyncio.sleep(delay)
            delay = min(delay * 2, _MAX_RETRY_SECONDS)

    async def _write(self, call: AdmitCall) -> None:
        self._unsent = list(self._waiting)
        try:
            await call.wait_for_connection()
            self._down_since = None
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._unsent or self._abandoned:
                    await call.write(self._next_batch())
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # the reader of the same call sees the failure and reports it

    def _next_batch(self) -> admission_service_pb2.AdmitRequest:
        ids, self._unsent = self._unsent[:MAX_BATCH], self._unsent[MAX_BATCH:]
        abandoned, self._abandoned = self._abandoned, []
        requests = [self._waiting[request_id].request for request_id in ids if request_id in self._waiting]
        return admission_service_pb2.AdmitRequest(requests=requests, abandoned_request_ids=abandoned)

    def _answer(self, admission: admission_service_pb2.Admission) -> None:
        waiting = self._waiting.get(admission.request_id)
        outcome = admission.WhichOneof("outcome")
        if waiting is None or waiting.future.done():
            if outcome == "granted":
                self.abandon(admission.request_id)
        elif outcome == "granted":
            waiting.future.set_result(admission.granted)
        elif outcome == "refused":
            waiting.future.set_exception(DragomanError.from_detail(admission.refused))

    def _failed(self, error: grpc.aio.AioRpcError) -> None:
        now = time.monotonic()
        if self._down_since is None:
            self._down_since = now
            logger.warning("admission stream to the controller at %s ended: %s", self._address, error.details())
        if error.code() not in _DOWN_CODES:
            self._fail_waiting(from_rpc_error(error))
        elif self._is_unreachable():
            self._fail_waiting(self._unreachable())

    def _fail_waiting(self, error: DragomanError) -> None:
        for waiting in self._waiting.values():
            if not waiting.future.done():
                waiting.future.set_exception(error)

    def _is_unreachable(self) -> bool:
        return self._down_since is not None and time.monotonic() - self._down_since > UNREACHABLE_AFTER_SECONDS

    def _unreachable(self) -> DragomanError:
        return DragomanError(
            error_pb2.ERROR_REASON_NO_AGENT,
            f"the controller at {self._address} does not answer, so no agent can be chosen; try again soon",
            retry_delay=2.0,
        )
