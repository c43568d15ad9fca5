"""The rpc process's end of the engine: spawns the engine process, sends commands, fans the step frames out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dragoman.v1 import error_pb2
from dragoman_agent.engine.messages import (
    Cancel,
    Credit,
    Delta,
    Embedded,
    Failed,
    Fatal,
    Finished,
    FrameDecoder,
    Load,
    Progress,
    ProtocolError,
    Ready,
    Shutdown,
    Start,
    StartEmbed,
    Step,
    ToEngine,
    encode,
)

logger = logging.getLogger(__name__)

Event = Delta | Finished | Failed | Embedded
OnEnd = Callable[[Event, int], None]  # the terminal event, and the tokens of the longest choice
STEP_AGE_LIMIT_SECONDS = 3.0
_CONNECT_TIMEOUT_SECONDS = 30.0
_STDERR = 2  # our stdout carries the announced events and nothing else


class EventSink(Protocol):
    """Takes the events of one request. Called on the event loop; must not block and must not raise."""

    def deliver(self, event: Event) -> None:
        """One event, in order. Finished, Failed and Embedded are the last."""


class EngineListener(Protocol):
    """Hears of the engine's life."""

    def engine_progress(self, progress: Progress) -> None:
        """Loading goes on."""

    def engine_ready(self, ready: Ready) -> None:
        """The first step has run."""

    def engine_died(self, reason: int, message: str) -> None:
        """The engine is gone and every live request has got its Failed event. Called once."""


@dataclass(slots=True)
class Live:
    """One request the engine holds."""

    sink: EventSink
    on_end: OnEnd
    num_seqs: int
    priority: int
    max_output_tokens: int
    num_emitted: int = 0  # tokens of the furthest choice
    cancelled: bool = False


class EngineClient:
    """Owns the engine process, the socket to it, and the table of live requests.

    A request is live from `submit` to its terminal event, also after its caller has gone: the engine's word frees it.
    """

    def __init__(self, listener: EngineListener, *, step_age_limit: float = STEP_AGE_LIMIT_SECONDS) -> None:
        """`step_age_limit`: seconds without a step or an idle tick after which the engine counts as wedged."""
        self._listener = listener
        self._step_age_limit = step_age_limit
        self._decoder = FrameDecoder()
        self._transport: asyncio.Transport | None = None
        self._outbox: list[bytes] = []
        self._process: asyncio.subprocess.Process | None = None
        self._directory: Path | None = None
        self._server: asyncio.AbstractServer | None = None
        self._watch: asyncio.Task[None] | None = None
        self._connected: asyncio.Future[None] | None = None
        self._fatal: Fatal | None = None
        self._stopping = False
        self._dead = False
        self._last_step = 0.0
        self._step_listeners: list[Callable[[Step], None]] = []
        self._dirty: dict[Callable[[], None], None] = {}
        self.live: dict[str, Live] = {}
        self.num_live_seqs = 0
        self.ready: Ready | None = None
        self.load: Load | None = None

    async def start(self, command: Sequence[str]) -> None:
        """Spawn `command` plus `--socket PATH` and wait until it has connected. Raises RuntimeError when it does not.

        The process gets its own session: a Ctrl-C at the terminal reaches us alone, and we end the streams first.
        """
        self._directory = Path(tempfile.mkdtemp(prefix="dragoman-agent-"))  # mode 0700
        path = str(self._directory / "engine.sock")
        loop = asyncio.get_running_loop()
        self._connected = loop.create_future()
        self._server = await loop.create_unix_server(lambda: _EngineProtocol(self), path)
        self._process = await asyncio.create_subprocess_exec(
            *command, "--socket", path, stdin=asyncio.subprocess.DEVNULL, stdout=_STDERR, start_new_session=True
        )
        self._watch = asyncio.create_task(self._watch_process(self._process))
        await asyncio.wait({self._connected}, timeout=_CONNECT_TIMEOUT_SECONDS)
        if not self._connected.done():
            self._process.kill()

    @property
    def pid(self) -> int | None:
        """Process id of the engine."""
        return self._process.pid if self._process else None

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
        if isinstance(command, Start):
            num_seqs, max_tokens = command.num_choices, command.stop.max_output_tokens
        else:
            num_seqs, max_tokens = 1, 0
        self.live[command.request_id] = Live(sink, on_end, num_seqs, command.priority, max_tokens)
        self.num_live_seqs += num_seqs
        self._send(command)

    def cancel(self, request_id: str, *, detach: bool = False) -> None:
        """Cancel a request; unknown ids are ignored. `detach` drops the events still to come: the caller is gone."""
        live = self.live.get(request_id)
        if live is None:
            return
        if detach:
            live.sink = _NOWHERE
        if not live.cancelled:
            live.cancelled = True
            self._send(Cancel(request_id))

    def grant(self, request_id: str, until: int) -> None:
        """Let the engine send tokens below cursor `until`."""
        if request_id in self.live:
            self._send(Credit(request_id, until))

    def kill(self) -> None:
        """End the process at once, without a word to the streams."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    async def stop(self, timeout: float) -> None:
        """End the engine: each live request gets its Failed event. After `timeout` seconds the process is killed."""
        self._stopping = True
        self._send(Shutdown())
        if self._process is not None and self._process.returncode is None:
            try:
                await asyncio.wait_for(self._process.wait(), timeout)
            except TimeoutError:
                logger.warning("the engine did not end within %.1f s and is killed", timeout)
                self._process.kill()
                await self._process.wait()
        if self._watch is not None:
            await self._watch
        if self._transport is not None:
            self._transport.close()
        if self._server is not None:
            self._server.close()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

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
        if self._connected is not None and not self._connected.done():
            self._connected.set_result(None)

    def _data_received(self, data: bytes) -> None:
        try:
            messages = self._decoder.feed(data)
        except ProtocolError as error:
            logger.exception("the engine sent something that is not a message")
            self._fatal = Fatal(error_pb2.ERROR_REASON_INTERNAL, f"the engine sent something unreadable: {error}")
            self._die()
            return
        for message in messages:
            match message:
                case Step():
                    self._take_step(message)
                case Progress():
                    self._listener.engine_progress(message)
                case Ready():
                    self.ready = message
                    self._last_step = time.monotonic()
                    self._listener.engine_ready(message)
                case Fatal():
                    self._fatal = message
        while self._dirty:
            dirty, self._dirty = self._dirty, {}
            for flush in dirty:
                flush()

    def _take_step(self, step: Step) -> None:
        self._last_step = time.monotonic()
        self.load = step.load
        live = self.live
        for event in step.events:
            entry = live.get(event.request_id)
            if entry is None:
                continue
            if type(event) is Delta:
                end = event.cursor + len(event.token_ids)
                if end > entry.num_emitted:
                    entry.num_emitted = end
            else:
                del live[event.request_id]
                self.num_live_seqs -= entry.num_seqs
                entry.on_end(event, entry.num_emitted)
            entry.sink.deliver(event)
        for listener in self._step_listeners:
            listener(step)

    def _connection_lost(self) -> None:
        # The exit code, which says more, follows within a moment; a process that closed its socket and lives on does not.
        asyncio.get_running_loop().call_later(0.2, self._die)

    async def _watch_process(self, process: asyncio.subprocess.Process) -> None:
        await process.wait()
        if self._connected is not None and not self._connected.done():
            self._connected.set_result(None)
        await asyncio.sleep(0)  # what it last wrote is read first
        self._die()

    def _die(self) -> None:
        if self._dead:
            return
        self._dead = True
        reason, message = self._cause_of_death()
        live, self.live, self.num_live_seqs = self.live, {}, 0
        for request_id, entry in live.items():
            failed = Failed(request_id, reason, message)
            entry.on_end(failed, entry.num_emitted)
            entry.sink.deliver(failed)
        while self._dirty:
            dirty, self._dirty = self._dirty, {}
            for flush in dirty:
                flush()
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        if not self._stopping:
            self._listener.engine_died(reason, message)

    def _cause_of_death(self) -> tuple[int, str]:
        if self._fatal is not None:
            return self._fatal.reason, self._fatal.message
        if self._stopping:
            return error_pb2.ERROR_REASON_AGENT_LOST, "the agent was stopped; resume on another agent"
        code = self._process.returncode if self._process else None
        how = "its socket closed" if code is None else f"signal {-code}" if code < 0 else f"exit code {code}"
        return error_pb2.ERROR_REASON_AGENT_LOST, f"the engine process ended ({how}); resume on another agent"


class _Nowhere:
    def deliver(self, event: Event) -> None:
        """Nobody listens any more."""


_NOWHERE = _Nowhere()


class _EngineProtocol(asyncio.Protocol):
    def __init__(self, client: EngineClient) -> None:
        self._client = client

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._client._connection_made(transport)  # type: ignore[arg-type]

    def data_received(self, data: bytes) -> None:
        self._client._data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._client._connection_lost()
