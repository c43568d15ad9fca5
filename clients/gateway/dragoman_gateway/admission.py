"""Tickets from the controller, over one Admit stream: what arrives in one turn of the loop goes out in one message."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import TypeAlias

import grpc

from dragoman.controllers import Controllers
from dragoman.errors import DragomanError, from_rpc_error
from dragoman.ticket import has_detail, plain_details
from dragoman.v1 import admission_service_pb2, admission_service_pb2_grpc, error_pb2
from dragoman_gateway.channels import Channels

logger = logging.getLogger(__name__)

MAX_BATCH = 256
UNREACHABLE_AFTER_SECONDS = 3.0
_FIRST_RETRY_SECONDS = 0.05
_MAX_RETRY_SECONDS = 1.0
AdmitCall: TypeAlias = (
    "grpc.aio.StreamStreamCall[admission_service_pb2.AdmitRequest, admission_service_pb2.AdmitResponse]"
)
# INTERNAL without a detail is one too: gRPC's word for a batch that could not be written any more.
_DOWN_CODES = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


@dataclass(slots=True)
class _Waiting:
    request: admission_service_pb2.AcquireTicketRequest
    future: asyncio.Future[admission_service_pb2.AcquireTicketResponse]


class Admissions:
    """Asks for tickets. Requests that wait are asked again after a reconnect; the controller knows them by id."""

    def __init__(self, channels: Channels, controllers: Controllers) -> None:
        self._channels = channels
        self._controllers = controllers
        self._waiting: dict[str, _Waiting] = {}
        self._unsent: list[str] = []
        self._abandoned: list[str] = []
        self._wake = asyncio.Event()
        self._down_since: float | None = None
        self._problem = ""

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
            address = self._controllers.current
            call: AdmitCall = admission_service_pb2_grpc.AdmissionServiceStub(self._channels.get(address)).Admit()
            writer = asyncio.ensure_future(self._write(call))
            try:
                async for response in call:
                    self._down_since, delay = None, _FIRST_RETRY_SECONDS
                    if self._take(response):
                        logger.warning("the controller at %s is shutting down, another one is asked", address)
                        break
            except grpc.aio.AioRpcError as error:
                self._failed(address, error)
            except Exception:
                logger.exception("the admission stream failed and is started again")
            finally:
                writer.cancel()
                await asyncio.gather(writer, return_exceptions=True)  # its cancellation is kept in, ours is not
                call.cancel()
            self._controllers.failed(address)
            await asyncio.sleep(delay)
            delay = min(delay * 2, _MAX_RETRY_SECONDS)

    def _take(self, response: admission_service_pb2.AdmitResponse) -> bool:
        """Whether to ask another controller, there being one: what this one turned away is then asked for again there."""
        has_others = len(self._controllers.addresses) > 1
        is_leaving = False
        for admission in response.admissions:
            if has_others and admission.refused.reason == error_pb2.ERROR_REASON_AGENT_DRAINING:
                is_leaving = True
            else:
                self._answer(admission)
        return is_leaving

    async def _write(self, call: AdmitCall) -> None:
        self._unsent = list(self._waiting)
        self._wake.set()
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

    def _failed(self, address: str, error: grpc.aio.AioRpcError) -> None:
        now = time.monotonic()
        if self._down_since is None:
            self._down_since = now
            self._problem = f" ({plain_details(error)})"
            logger.warning("admission stream to the controller at %s ended: %s", address, plain_details(error))
        is_down = error.code() in _DOWN_CODES or (error.code() is grpc.StatusCode.INTERNAL and not has_detail(error))
        if not is_down:
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
            f"the controller at {self._controllers} does not answer{self._problem}, so no agent can be chosen; try again soon",
            retry_delay=2.0,
        )
