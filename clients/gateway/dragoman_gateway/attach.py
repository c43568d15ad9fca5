"""The data plane: one Attach stream for each life of an agent, which carries all generations of this gateway on it."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from contextlib import suppress
from typing import Protocol

import grpc

from dragoman.attempt import LOST_CODES
from dragoman.errors import DragomanError, from_rpc_error
from dragoman.ticket import has_detail, plain_details
from dragoman.v1 import admission_service_pb2, error_pb2, generation_service_pb2, generation_service_pb2_grpc
from dragoman_gateway.channels import Channels

logger = logging.getLogger(__name__)


class Sink(Protocol):
    """Takes the events of one generation; called on the loop, must not block."""

    def on_response(self, response: generation_service_pb2.GenerateResponse) -> None:
        """An event of the accepted request."""

    def on_refused(self, error: DragomanError) -> None:
        """The agent refused the request; nothing follows."""

    def on_lost(self, error: DragomanError) -> None:
        """The agent is gone; nothing follows."""


class AgentLink:
    """One Attach stream. Frames of another epoch than the tickets' are refused and end the link."""

    def __init__(self, channel: grpc.aio.Channel, agent_id: str, epoch: int) -> None:
        self.agent_id = agent_id
        self.epoch = epoch
        self.is_open = True
        self._sinks: dict[int, Sink] = {}
        self._ids = itertools.count(1)
        self._outbox: deque[generation_service_pb2.AttachRequest] = deque()
        self._wake = asyncio.Event()
        self._call = generation_service_pb2_grpc.GenerationServiceStub(channel).Attach()
        self._tasks = [asyncio.ensure_future(self._read()), asyncio.ensure_future(self._write())]

    def start(self, request: generation_service_pb2.GenerateRequest, sink: Sink) -> int:
        """Send the request; its events go to `sink`. Returns the stream id for `credit` and `cancel`."""
        stream_id = next(self._ids)
        self._sinks[stream_id] = sink
        start = generation_service_pb2.AttachStart(stream_id=stream_id, request=request)
        self._send(generation_service_pb2.AttachRequest(start=start))
        return stream_id

    def credit(self, stream_id: int, until_cursor: int) -> None:
        """Allow tokens below `until_cursor` in every choice."""
        credit = generation_service_pb2.AttachCredit(stream_id=stream_id, until_cursor=until_cursor)
        self._send(generation_service_pb2.AttachRequest(credit=credit))

    def cancel(self, stream_id: int) -> None:
        """End a generation; nothing more of it is delivered."""
        if self._sinks.pop(stream_id, None) is not None:
            cancel = generation_service_pb2.AttachCancel(stream_id=stream_id)
            self._send(generation_service_pb2.AttachRequest(cancel=cancel))

    def fail(self, error: DragomanError) -> None:
        """End the link: every generation on it is lost."""
        if not self.is_open:
            return
        self.is_open = False
        self._call.cancel()
        self._wake.set()
        sinks, self._sinks = self._sinks, {}
        for sink in sinks.values():
            sink.on_lost(error)

    async def close(self) -> None:
        """Close at exit; the agent cancels what still runs."""
        self.is_open = False
        self._call.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _send(self, message: generation_service_pb2.AttachRequest) -> None:
        if self.is_open:
            self._outbox.append(message)
            self._wake.set()

    async def _write(self) -> None:
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError):
            while self.is_open:
                await self._wake.wait()
                self._wake.clear()
                while self._outbox and self.is_open:
                    await self._call.write(self._outbox.popleft())

    async def _read(self) -> None:
        try:
            async for frame in self._call:
                if frame.epoch != self.epoch:
                    logger.warning("agent %s sent a frame of another life; refused", self.agent_id)
                    self.fail(_lost(self.agent_id, "restarted"))
                    return
                self._deliver(frame)
            self.fail(_lost(self.agent_id, "closed the connection"))
        except grpc.aio.AioRpcError as error:
            if self.is_open:
                logger.warning("agent %s lost: %s", self.agent_id, plain_details(error))
            self.fail(_of_rpc_error(self.agent_id, error))
        except asyncio.CancelledError:
            if self.is_open:  # the call was cancelled beneath us, not this task by us
                self.fail(_lost(self.agent_id, "closed the connection"))
            raise

    def _deliver(self, frame: generation_service_pb2.AttachResponse) -> None:
        sinks = self._sinks
        for event in frame.events:
            sink = sinks.get(event.stream_id)
            if sink is None:
                continue
            if event.HasField("response"):
                if event.response.WhichOneof("event") in ("finished", "failed"):
                    del sinks[event.stream_id]
                sink.on_response(event.response)
            else:
                del sinks[event.stream_id]
                sink.on_refused(DragomanError.from_detail(event.refused))


class Links:
    """The links of this process, one for each (agent, epoch)."""

    def __init__(self, channels: Channels) -> None:
        self._channels = channels
        self._links: dict[tuple[str, int], AgentLink] = {}

    def get(self, ticket: admission_service_pb2.Ticket) -> AgentLink:
        """The link a ticket is for, opened at the first use."""
        key = (ticket.agent_id, ticket.epoch)
        link = self._links.get(key)
        if link is None or not link.is_open:
            self._forget_closed()
            link = AgentLink(self._channels.get(ticket.data_address, ticket.agent_id), ticket.agent_id, ticket.epoch)
            self._links[key] = link
        return link

    def agent_is_dead(self, agent_id: str, live_epoch: int | None) -> None:
        """End the links to earlier lives of an agent, or to all of them when `live_epoch` is None."""
        for (linked_id, epoch), link in list(self._links.items()):
            if linked_id == agent_id and epoch != live_epoch and link.is_open:
                link.fail(_lost(agent_id, "declared dead by the controller"))
        self._forget_closed()

    def has_open(self, agent_id: str) -> bool:
        """Whether a link to any life of the agent is open."""
        return any(linked == agent_id and link.is_open for (linked, _), link in self._links.items())

    async def close(self) -> None:
        """Close all links."""
        links, self._links = list(self._links.values()), {}
        await asyncio.gather(*(link.close() for link in links))

    def _forget_closed(self) -> None:
        for key in [key for key, link in self._links.items() if not link.is_open]:
            del self._links[key]


def _lost(agent_id: str, how: str) -> DragomanError:
    return DragomanError(error_pb2.ERROR_REASON_AGENT_LOST, f"agent {agent_id} was lost: {how}", retry_delay=1.0)


def _of_rpc_error(agent_id: str, error: grpc.aio.AioRpcError) -> DragomanError:
    if error.code() in LOST_CODES and not has_detail(error):
        return _lost(agent_id, plain_details(error))
    return from_rpc_error(error)
