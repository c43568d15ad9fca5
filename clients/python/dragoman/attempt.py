"""One stream at one agent: opened with a ticket, accepted, read to its one end. Knows nothing of retries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import grpc

from dragoman.controllers import TRANSPORT
from dragoman.durations import duration_of
from dragoman.errors import DragomanError, from_rpc_error
from dragoman.ticket import Channels, has_detail, plain_details
from dragoman.v1 import admission_service_pb2 as admission_pb
from dragoman.v1 import error_pb2, generation_service_pb2_grpc
from dragoman.v1 import generation_service_pb2 as pb

# The agent ends a request at its deadline by itself, with a reason; the transport cuts it this much later.
_DEADLINE_SLACK_SECONDS = 0.5
# Statuses without a detail in which a connection or a process that went away shows itself. INTERNAL is gRPC's word for a
# message that could not be written any more.
LOST_CODES = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
)


@dataclass(slots=True)
class Attempt:
    """A stream that an agent accepted. The owner calls `cancel` when it stops reading before the end."""

    ticket: admission_pb.Ticket
    started: pb.GenerationStarted
    _call: grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]

    async def read(self) -> pb.GenerationDelta | pb.GenerationFinished:
        """The next event. Raises DragomanError when the request failed or the agent was lost."""
        response = await _read(self._call, self.ticket)
        kind = response.WhichOneof("event")
        if kind == "delta":
            return response.delta
        if kind == "finished":
            return response.finished
        if kind == "failed":
            raise DragomanError.from_detail(response.failed.error)
        if kind == "started":
            # A second start is the agent's next life, or another one behind the same address.
            raise lost(self.ticket, "started the request a second time")
        raise lost(self.ticket, "sent an event that this version does not know")

    def cancel(self) -> None:
        """Cancels the request at the agent."""
        self._call.cancel()


async def open_attempt(
    channels: Channels,
    ticket: admission_pb.Ticket,
    request: pb.GenerateRequest,
    remaining_seconds: float | None,
) -> Attempt:
    """Sends the request and waits until it is accepted. Raises DragomanError when it is refused or the agent is lost."""
    sent = pb.GenerateRequest()
    sent.CopyFrom(request)
    sent.ticket_token = ticket.token
    timeout = None
    if remaining_seconds is not None:
        sent.deadline.CopyFrom(duration_of(remaining_seconds))
        timeout = remaining_seconds + _DEADLINE_SLACK_SECONDS
    stub = generation_service_pb2_grpc.GenerationServiceStub(channels.get(ticket.data_address, ticket.agent_id))
    call = stub.Generate(sent, timeout=timeout)
    try:
        response = await _read(call, ticket)
        if response.WhichOneof("event") == "failed":
            raise DragomanError.from_detail(response.failed.error)
        if response.WhichOneof("event") != "started":
            raise lost(ticket, "sent tokens before it accepted the request")
        if ticket.epoch and response.started.epoch != ticket.epoch:
            raise lost(ticket, "is in another life than the ticket is for")
    except BaseException:
        call.cancel()
        raise
    return Attempt(ticket, response.started, call)


def lost(ticket: admission_pb.Ticket, what: str) -> DragomanError:
    """The error of an agent that can no longer be trusted with this stream."""
    name = f"{ticket.agent_id} at {ticket.data_address}" if ticket.agent_id else f"at {ticket.data_address}"
    return DragomanError(error_pb2.ERROR_REASON_AGENT_LOST, f"the agent {name} {what}")


async def _read(call: Any, ticket: admission_pb.Ticket) -> pb.GenerateResponse:
    try:
        response = await call.read()
    except grpc.RpcError as error:
        raise _failure(error, ticket) from None
    if response is grpc.aio.EOF:
        raise lost(ticket, "ended the stream without saying how the request ended")
    assert isinstance(response, pb.GenerateResponse)
    return response


def _failure(error: grpc.RpcError, ticket: admission_pb.Ticket) -> DragomanError:
    if not has_detail(error) and error.code() in LOST_CODES:
        unreachable = lost(ticket, f"cannot be reached: {plain_details(error)}")
        if not ticket.agent_id:  # an open agent is the only one there is
            unreachable.metadata[TRANSPORT] = plain_details(error)
        return unreachable
    if not has_detail(error) and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DragomanError(error_pb2.ERROR_REASON_DEADLINE_EXCEEDED, "the deadline of the request passed")
    return from_rpc_error(error)
