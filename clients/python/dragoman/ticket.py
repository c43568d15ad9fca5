"""Where a request may go: tickets from a controller, or one open agent that takes requests without."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import grpc

from dragoman.controllers import TRANSPORT, Controllers
from dragoman.errors import ERROR_METADATA_KEY, DragomanError, from_rpc_error
from dragoman.retry import REFUSED
from dragoman.tls import handshake_problem, open_channel
from dragoman.v1 import admission_service_pb2 as pb
from dragoman.v1 import admission_service_pb2_grpc, error_pb2

# The longest wait for a call that does not wait for capacity.
CALL_SECONDS = 30.0
# The longest wait in the controller's queue when neither the request nor the policy bounds it sooner.
QUEUE_SECONDS = 600.0


R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Grant:
    """Tickets in the order in which they are to be tried."""

    tickets: tuple[pb.Ticket, ...]
    quote: pb.LatencyQuote | None


class Admission(Protocol):
    """Grants requests. Owner of no state but its channel."""

    async def acquire(self, request: pb.AcquireTicketRequest, timeout: float | None) -> Grant:
        """Waits for capacity, `timeout` seconds at most. Raises DragomanError."""

    def release(self, ticket: pb.Ticket) -> None:
        """Returns a ticket that was not used, in the background; one that cannot be returned expires by itself."""

    async def aclose(self) -> None:
        """Waits for the tickets on their way back."""


class Channels:
    """One channel an address, kept open until `close`. To be used in one event loop."""

    def __init__(self, credentials: grpc.ChannelCredentials | None) -> None:
        self._credentials = credentials
        self._channels: dict[tuple[str, str], grpc.aio.Channel] = {}

    def get(self, address: str, agent_id: str = "") -> grpc.aio.Channel:
        """The channel to `address`. With credentials, an agent's certificate must name its `agent_id`."""
        key = (address, agent_id if self._credentials else "")
        channel = self._channels.get(key)
        if channel is None:
            channel = self._channels[key] = self._open(*key)
        return channel

    async def close(self) -> None:
        """Closes all channels and cancels what runs on them."""
        channels, self._channels = list(self._channels.values()), {}
        await asyncio.gather(*(channel.close() for channel in channels))

    def _open(self, address: str, agent_id: str) -> grpc.aio.Channel:
        return open_channel(address, self._credentials, agent_id)


class ControllerAdmission:
    """Tickets from the controllers of a cell."""

    def __init__(self, channels: Channels, controllers: Controllers) -> None:
        self._channels = channels
        self._controllers = controllers
        self._releases: set[asyncio.Task[None]] = set()

    async def acquire(self, request: pb.AcquireTicketRequest, timeout: float | None) -> Grant:
        """Waits for capacity. Tickets on their way back arrive first: until then, asking again gives the same ones."""
        if self._releases:
            await asyncio.wait(self._releases)
        seconds = QUEUE_SECONDS if timeout is None else timeout
        granted = await ask_controller(
            self._controllers, lambda address: self._stub(address).AcquireTicket(request, timeout=seconds)
        )
        tickets = [granted.ticket]
        if granted.HasField("fallback_ticket"):
            tickets.append(granted.fallback_ticket)
        return Grant(tuple(tickets), granted.quote if granted.HasField("quote") else None)

    def release(self, ticket: pb.Ticket) -> None:
        """Returns a ticket."""
        task = asyncio.get_running_loop().create_task(self._release(ticket))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def aclose(self) -> None:
        """Waits for the tickets on their way back, shortly."""
        if self._releases:
            await asyncio.wait(self._releases, timeout=1.0)

    def _stub(self, address: str) -> Any:
        return admission_service_pb2_grpc.AdmissionServiceStub(self._channels.get(address))

    async def _release(self, ticket: pb.Ticket) -> None:
        stub = self._stub(self._controllers.current)
        try:
            await stub.ReleaseTicket(pb.ReleaseTicketRequest(token=ticket.token), timeout=CALL_SECONDS)
        except grpc.RpcError:
            pass  # it expires by itself


class OpenAgent:
    """One agent that was started with --open: every request goes to it, without a ticket."""

    def __init__(self, address: str) -> None:
        self._ticket = pb.Ticket(data_address=address)

    async def acquire(self, request: pb.AcquireTicketRequest, timeout: float | None) -> Grant:
        """Grants at once."""
        return Grant((self._ticket,), None)

    def release(self, ticket: pb.Ticket) -> None:
        """There is nothing to return."""

    async def aclose(self) -> None:
        """There is nothing to wait for."""


async def ask_controller(controllers: Controllers, call: Callable[[str], Awaitable[R]]) -> R:
    """The answer of a unary call, `call(address)`, to the first controller that gives one. Raises DragomanError."""

    def ask(address: str) -> Awaitable[R]:
        remedy = "start one with 'dragoman up', or give its address"
        return _ask(f"controller at {address}", remedy, lambda: call(address))

    return await controllers.ask(ask)


async def ask_agent(address: str, call: Callable[[], Awaitable[R]]) -> R:
    """The answer of a unary call to the agent at `address`. Raises DragomanError."""
    return await _ask(f"agent at {address}", "see 'dragoman ps' for the agents that are up", call)


async def _ask(whom: str, remedy: str, call: Callable[[], Awaitable[R]]) -> R:
    try:
        return await call()
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.UNAVAILABLE and not has_detail(error):
            message = f"cannot reach the {whom}: {plain_details(error)}; {remedy}"
            raise DragomanError(
                error_pb2.ERROR_REASON_NO_AGENT, message, metadata={TRANSPORT: plain_details(error)}
            ) from None
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and not has_detail(error):
            message = f"the {whom} did not answer in time"
            raise DragomanError(error_pb2.ERROR_REASON_DEADLINE_EXCEEDED, message) from None
        raise from_rpc_error(error) from None


def plain_details(error: grpc.RpcError) -> str:
    """What the transport says, without the layers it wraps around a connection that nobody accepts."""
    details = str(error.details() or error.code().name) if hasattr(error, "details") else str(error.code().name)
    if "Connection refused" in details:
        return REFUSED
    return handshake_problem(details) or details


def has_detail(error: grpc.RpcError) -> bool:
    """Whether the failure is the server's own word, and not the transport's."""
    trailing = error.trailing_metadata() if hasattr(error, "trailing_metadata") else None
    return any(entry[0] == ERROR_METADATA_KEY for entry in trailing or ())  # type: ignore[index]
