"""The rpc process' end of the engine: sends commands, fans the step frames out, notices its death."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

from dragoman.errors import DragomanError
from dragoman.v1 import error_pb2
from dragoman_agent.engine.frames import FrameDecoder, ProtocolError, encode
from dragoman_agent.engine.messages import (
    BlocksExported,
    BlocksImported,
    BlocksUsed,
    BringBlocks,
    Cancel,
    Credit,
    ExportBlocks,
    Failed,
    Fatal,
    ImportBlocks,
    Load,
    Progress,
    Ready,
    Shutdown,
    Start,
    StartEmbed,
    Step,
    TierReport,
    ToEngine,
    Tune,
    Warmed,
)
from dragoman_agent.engine_process import EngineProcess
from dragoman_agent.rpc.engine_exchanges import Command, EngineExchanges
from dragoman_agent.rpc.hang_watch import HangWatch
from dragoman_agent.rpc.live_table import NOWHERE, Event, EventSink, Live, LiveTable, OnEnd
from dragoman_text import TextTokenizer

__all__ = ["EngineClient", "EngineListener", "Event", "EventSink"]

T = TypeVar("T", BlocksExported, BlocksImported)

logger = logging.getLogger(__name__)

STEP_AGE_LIMIT_SECONDS = 3.0
WEDGED_SECONDS = 6.0  # as the controller declares a silent agent dead
_FATAL_SECONDS = 0.2  # from the engine's last word to its end; a device that has failed may hold it up for longer
_BOTH_ENDS_SECONDS = 0.5


class EngineListener(Protocol):
    """Hears of the engine's life."""

    def engine_progress(self, progress: Progress) -> None:
        """Loading goes on."""

    def engine_ready(self, ready: Ready) -> None:
        """The first step has run."""

    def engine_warmed(self, warmed: Warmed) -> None:
        """What the start left for later is done, or ended."""

    def engine_died(self, reason: int, message: str) -> None:
        """The engine is gone and every live request has got its Failed event. Called once."""


class EngineClient:
    """Owns the connection to the engine process and the table of live requests.

    A request is live from `submit` to its terminal event, also after its caller has gone: the engine's word frees it.
    """

    def __init__(
        self,
        process: EngineProcess,
        listener: EngineListener,
        tokenizer: TextTokenizer,
        *,
        step_age_limit: float = STEP_AGE_LIMIT_SECONDS,
    ) -> None:
        """`step_age_limit`: seconds without a step or an idle tick after which the engine counts as wedged."""
        self._listener = listener
        self._table = LiveTable(tokenizer)
        self._step_age_limit = step_age_limit
        self._decoder = FrameDecoder()
        self._transport: asyncio.Transport | None = None
        self._outbox: list[bytes] = []
        self._process = process
        self._server: asyncio.AbstractServer | None = None
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._fatal: Fatal | None = None
        self._stopping = False
        self._disconnected = False
        self._exited = asyncio.Event()
        self._dead = False
        self._last_step = 0.0
        self._hang = HangWatch()
        self._idle: asyncio.Future[None] | None = None
        self._step_listeners: list[Callable[[Step], None]] = []
        self._dirty: dict[Callable[[], None], None] = {}
        self._exchanges = EngineExchanges(self._send)
        self.on_blocks_used: Callable[[str], None] = lambda exchange_id: None
        self.on_tiers: Callable[[TierReport], None] = lambda report: None
        self.ready: Ready | None = None
        self.load: Load | None = None
        self.num_tokens_of_step = 0  # output tokens in the last frame

    async def start(self) -> None:
        """Wait for the engine's connection in the background. Until it comes, the process' end is its failure."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: _EngineProtocol(self), sock=self._process.take_listener())
        self._process.watch(lambda: self._from_thread(loop))

    def _from_thread(self, loop: asyncio.AbstractEventLoop) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has been closed: nobody is left to tell
            loop.call_soon_threadsafe(self._process_ended)

    @property
    def live(self) -> Mapping[str, Live]:
        """The requests that the engine holds, by id."""
        return self._table.by_id

    @property
    def num_live_seqs(self) -> int:
        """Their sequences."""
        return self._table.num_seqs

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        return self._process.pid

    @property
    def is_serving(self) -> bool:
        """Whether requests can be submitted: loaded, alive, and steps or ticks keep coming."""
        return self.ready is not None and not self._dead and self.step_age <= self._step_age_limit

    @property
    def is_dead(self) -> bool:
        """Whether the engine is gone for good."""
        return self._dead

    @property
    def step_age(self) -> float:
        """Seconds since the last finished step or idle tick; 0 while the model loads."""
        return time.monotonic() - self._last_step if self._last_step else 0.0

    async def wait_idle(self) -> None:
        """Until no request is live."""
        while self.live:
            self._idle = asyncio.get_running_loop().create_future()
            await self._idle

    def on_step(self, listener: Callable[[Step], None]) -> Callable[[], None]:
        """Call `listener` with each step frame. Returns the function that ends it."""
        self._step_listeners.append(listener)
        return lambda: self._step_listeners.remove(listener)

    def flush_after_batch(self, flush: Callable[[], None]) -> None:
        """Call `flush` once when the frames now at hand have been delivered: so that a step makes one message."""
        self._dirty[flush] = None

    def submit(self, command: Start | StartEmbed, sink: EventSink, on_end: OnEnd) -> None:
        """Hand a request to the engine. The caller has checked `is_serving` and that the id is free.

        `on_end` hears the terminal event even when the caller of the request has gone.
        """
        self._table.add(command, sink, on_end)
        self._send(command)

    def cancel(self, request_id: str, *, detach: bool = False) -> None:
        """Cancel a request; unknown ids are ignored. `detach` drops the events still to come: the caller is gone."""
        live = self.live.get(request_id)
        if live is None:
            return
        if detach:
            live.sink = NOWHERE
        if not live.cancelled:
            live.cancelled = True
            self._send(Cancel(request_id))

    @property
    def was_lost(self) -> bool:
        """Whether the engine is gone without having been stopped."""
        return self._dead and not self._stopping

    def let_go_when_wedged(self, report: Callable[[str], None] | None = None) -> int:
        """After 6 s without a step, tell every caller to resume elsewhere; the number told. `report` hears each id first.

        The requests stay live, cancelled, until the engine wakes and frees them, or dies.
        """
        if self.ready is None or self._dead or self.step_age < WEDGED_SECONDS:
            return 0
        message = f"the engine has not finished a step for {self.step_age:.1f} s; resume on another agent"
        told = 0
        for request_id, entry in list(self.live.items()):
            if entry.sink is not NOWHERE:
                sink = entry.sink
                if report is not None:
                    report(request_id)
                self.cancel(request_id, detach=True)
                sink.deliver(Failed(request_id, int(error_pb2.ERROR_REASON_AGENT_LOST), message))
                told += 1
        self._end_of_batch()
        return told

    def give_up_when_hung(self) -> bool:
        """After a minute without a step, see HangWatch, the engine is killed, as if it had died; whether that is so now."""
        if self.ready is None or self._dead or not self._hang.is_hung(self._last_step, time.monotonic()):
            return False
        reason = int(error_pb2.ERROR_REASON_AGENT_LOST)
        self.abandon(reason, f"the engine has not finished a step for {self.step_age:.0f} s and is given up")
        return True

    async def export_blocks(self, command: ExportBlocks) -> BlocksExported:
        """Cached blocks, read between two steps. Raises AGENT_LOST when the engine is gone."""
        return await self._exchange(command, BlocksExported)

    async def import_blocks(self, command: ImportBlocks) -> BlocksImported:
        """Enter blocks into the cache, between two steps. Raises AGENT_LOST when the engine is gone."""
        return await self._exchange(command, BlocksImported)

    async def bring_blocks(self, command: BringBlocks) -> BlocksImported:
        """Bring a prefix up from the tiers below the device. Raises AGENT_LOST when the engine is gone."""
        return await self._exchange(command, BlocksImported)

    async def _exchange(self, command: Command, kind: type[T]) -> T:
        if not self.is_serving:
            raise DragomanError(error_pb2.ERROR_REASON_AGENT_LOST, "the engine is not serving; ask another agent")
        answer = await self._exchanges.ask(command)
        assert isinstance(answer, kind)
        return answer

    def grant(self, request_id: str, until: int) -> None:
        """Let the engine send tokens below cursor `until`."""
        if request_id in self.live:
            self._send(Credit(request_id, until))

    def tune(self, limits: Tune) -> None:
        """Let the engine work within new limits."""
        self._send(limits)

    def abandon(self, reason: int, message: str) -> None:
        """Give the engine up at once: its device is gone. Each live request gets its Failed event, the listener is told."""
        self._fatal = Fatal(reason, message)
        self._die()

    async def stop(self, timeout: float) -> None:
        """End the engine: each live request gets its Failed event. After `timeout` seconds the process is killed."""
        self._stopping = True
        if self.ready is not None and not self._dead:
            self._send(Shutdown())
            try:
                await asyncio.wait_for(asyncio.shield(self._ended), timeout)
            except TimeoutError:
                logger.warning("the engine did not end within %.1f s and is killed", timeout)
        elif self._fatal is not None:
            # It may have something to write yet.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._exited.wait(), _FATAL_SECONDS)
        self._process.kill(0.0)
        self._die()
        if self._transport is not None:
            self._transport.close()
        if self._server is not None:
            self._server.close()

    def _send(self, command: ToEngine) -> None:
        """Commands of one turn of the loop leave in one write."""
        if self._transport is None or self._dead:
            return
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush_outbox)
        self._outbox.append(encode(command))

    def _flush_outbox(self) -> None:
        frames, self._outbox = self._outbox, []
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(frames))

    def _connection_made(self, transport: asyncio.Transport) -> None:
        if self._transport is not None:
            transport.abort()
            return
        self._transport = transport
        self._process.forget_socket()

    def _data_received(self, data: bytes) -> None:
        try:
            messages = self._decoder.feed(data)
        except ProtocolError as error:
            logger.exception("the engine sent something that is not a message")
            self._fatal = Fatal(error_pb2.ERROR_REASON_INTERNAL, f"the engine sent something unreadable: {error}")
            self._die()
            return
        for message in messages:
            if self._dead:  # nobody is left to hear what was still on its way
                break
            match message:
                case Step():
                    self._take_step(message)
                case Progress():
                    self._listener.engine_progress(message)
                case Ready():
                    self.ready = message
                    self._last_step = time.monotonic()
                    self._listener.engine_ready(message)
                case Warmed():
                    self._listener.engine_warmed(message)
                case Fatal():
                    self._fatal = message
                    asyncio.get_running_loop().call_later(_FATAL_SECONDS, self._process.kill, 0.0)
                    self._die(kill=False)
                case BlocksExported() | BlocksImported():
                    self._exchanges.take(message)
                case BlocksUsed():
                    self.on_blocks_used(message.exchange_id)
                case TierReport():
                    self.on_tiers(message)
        self._end_of_batch()

    def _end_of_batch(self) -> None:
        while self._dirty:
            dirty, self._dirty = self._dirty, {}
            for flush in dirty:
                flush()
        if not self.live and self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    def _take_step(self, step: Step) -> None:
        self._last_step = time.monotonic()
        self.load = step.load
        self.num_tokens_of_step = self._table.take(step)
        for listener in self._step_listeners:
            listener(step)

    def _connection_lost(self) -> None:
        self._disconnected = True
        self._die_soon()

    def _process_ended(self) -> None:
        self._exited.set()
        self._die_soon()

    def _die_soon(self) -> None:
        """At once when both have happened: the last frames are read and the exit code is known. Else the other is due.

        So it is for an engine that ended before this process listened: its connection and last frames wait to be taken.
        """
        if (self._disconnected and self._exited.is_set()) or (self._transport is None and self._process.last_words):
            self._die()
        else:
            asyncio.get_running_loop().call_later(_BOTH_ENDS_SECONDS, self._die)

    def _die(self, *, kill: bool = True) -> None:
        if self._dead:
            return
        self._dead = True
        reason, message = self._cause_of_death()
        self._exchanges.fail(lambda: DragomanError(reason, message))  # type: ignore[arg-type]
        self._table.fail_all(reason, message)
        self._end_of_batch()
        if kill:
            self._process.kill(0.0)
        if not self._ended.done():
            self._ended.set_result(None)
        if not self._stopping:
            self._listener.engine_died(reason, message)

    def _cause_of_death(self) -> tuple[int, str]:
        if self._fatal is not None:
            return self._fatal.reason, self._fatal.message
        if self._stopping:
            return error_pb2.ERROR_REASON_AGENT_LOST, "the agent was stopped; resume on another agent"
        if words := self._process.last_words:
            return error_pb2.ERROR_REASON_DEVICE_FAULT, words
        code = self._process.returncode
        how = "its socket closed" if code is None else f"signal {-code}" if code < 0 else f"exit code {code}"
        return error_pb2.ERROR_REASON_AGENT_LOST, f"the engine process ended ({how}); resume on another agent"


class _EngineProtocol(asyncio.Protocol):
    def __init__(self, client: EngineClient) -> None:
        self._client = client

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._client._connection_made(transport)  # type: ignore[arg-type]

    def data_received(self, data: bytes) -> None:
        self._client._data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._client._connection_lost()
