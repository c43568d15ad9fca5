"""The loop of the engine process: commands from a socket, turns of the core, one frame a step back."""

from __future__ import annotations

import logging
import select
import socket
import time
from collections import deque

from dragoman.v1 import error_pb2
from dragoman_agent.device.base import DeviceError
from dragoman_agent.engine.core import EngineCore
from dragoman_agent.engine.exchange import BlockExchange
from dragoman_agent.engine.frames import FrameDecoder, encode
from dragoman_agent.engine.host_work import HostWork
from dragoman_agent.engine.messages import (
    BlocksImported,
    BringBlocks,
    Cancel,
    Credit,
    ExportBlocks,
    Fatal,
    FromEngine,
    ImportBlocks,
    Shutdown,
    Start,
    StartEmbed,
    Step,
    Tune,
)
from dragoman_agent.engine.preparing import Preparing
from dragoman_agent.engine.tiers import KvTiers

logger = logging.getLogger(__name__)

TICK_SECONDS = 1.0
_WAITING_POLL_SECONDS = 0.02  # requests are live but none can run: deadlines and credit are looked at this often
_COMPILING_POLL_SECONDS = 0.001  # a grammar compiles, or KV blocks move: most are done in about as much
_RECEIVE_BYTES = 1 << 20
STOPPED_MESSAGE = "the agent was stopped before this request ended; resume it on another agent from the last cursor"


class Connection:
    """The engine's end of the stream to the rpc process."""

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream
        self._decoder = FrameDecoder()
        self._poll = select.poll()
        self._poll.register(stream, select.POLLIN)
        self.is_open = True
        self.num_steps_sent = 0
        self.host_work = HostWork()  # who keeps account of the time; the core's own while it runs

    def send(self, message: FromEngine) -> None:
        """Write one frame; when the other end is gone, `is_open` says so."""
        begun = time.perf_counter()
        self.num_steps_sent += isinstance(message, Step)
        try:
            self._stream.sendall(encode(message))
        except (BrokenPipeError, ConnectionResetError):
            self.is_open = False
        self.host_work.done("send", begun)

    def receive(self, timeout: float) -> list[object]:
        """The messages at hand, after waiting up to `timeout` seconds for the first. Raises ProtocolError."""
        if not self._poll.poll(timeout * 1000):
            return []
        begun = time.perf_counter()
        messages: list[object] = []
        while True:
            try:
                data = self._stream.recv(_RECEIVE_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except ConnectionResetError:
                data = b""
            if not data:
                self.is_open = False
                break
            messages.extend(self._decoder.feed(data))
        self.host_work.done("receive", begun)
        return messages


def run(connection: Connection, core: EngineCore, preparing: Preparing | None = None) -> bool:
    """Serve until Shutdown or until the other end is gone; False when the device failed, which was then said.

    `preparing`: what the device left for after the start.
    """
    last_step = time.monotonic()  # when one was told: by these frames alone the other end knows that the engine lives
    timeout = 0.0
    exchanges: deque[ExportBlocks | ImportBlocks] = deque()
    connection.host_work = core.host_work
    if core.tiers is not None:
        core.tiers.lower.tell_all()  # what the disk held at the start went to the frames of the warm-up
    while connection.is_open:
        messages = connection.receive(timeout)
        if messages and not _take_commands(connection, core, messages, exchanges):
            return True
        try:
            num_steps = connection.num_steps_sent
            if core.exchange is not None:
                _exchange(connection, core, core.exchange, exchanges)
            ran = core.turn(connection.send)
            if core.tiers is not None:
                _tell_tiers(connection, core, core.tiers)
            if preparing is not None and not preparing.turn(connection.send, is_busy=ran or bool(exchanges)):
                preparing = None
            if connection.num_steps_sent == num_steps and time.monotonic() - last_step >= TICK_SECONDS:
                connection.send(core.tick())
            if connection.num_steps_sent > num_steps:
                last_step = time.monotonic()
        except DeviceError as error:
            logger.error("the device failed: %s", error)
            reason = error_pb2.ERROR_REASON_DEVICE_FAULT
            connection.send(core.fail_all(reason, f"the device failed in this step: {error}"))
            connection.send(Fatal(int(reason), f"the device failed: {error}"))
            return False
        if ran or core.has_output or exchanges or (preparing is not None and preparing.is_idle):
            timeout = 0.0  # do not wait, but read what came between two prepared parts
        elif core.is_compiling or core.is_moving:
            timeout = _COMPILING_POLL_SECONDS
        elif core.requests:
            timeout = _WAITING_POLL_SECONDS
        else:
            timeout = max(0.0, last_step + TICK_SECONDS - time.monotonic())
    return True


def _take_commands(
    connection: Connection, core: EngineCore, messages: list[object], exchanges: deque[ExportBlocks | ImportBlocks]
) -> bool:
    """Give each command to whom it is for; False after Shutdown, which was then answered."""
    begun = time.perf_counter()
    for message in messages:
        if isinstance(message, Start | StartEmbed | Cancel | Credit | Tune):
            core.receive(message)
        elif isinstance(message, ExportBlocks | ImportBlocks):
            if core.exchange is not None:
                exchanges.append(message)
        elif isinstance(message, BringBlocks):
            if core.tiers is not None:
                core.tiers.receive(message)
            else:
                why = "this agent keeps KV blocks on its device only"
                connection.send(BlocksImported(message.exchange_id, 0, 0, why))
        elif isinstance(message, Shutdown):
            connection.send(core.fail_all(error_pb2.ERROR_REASON_AGENT_LOST, STOPPED_MESSAGE))
            return False
        else:
            logger.warning("ignoring a message that is no command: %s", type(message).__name__)
    core.host_work.done("commands", begun)
    return True


def _tell_tiers(connection: Connection, core: EngineCore, tiers: KvTiers) -> None:
    """What the tiers answer and report. What came up is told at once: the next request may need it."""
    answers = tiers.take_answers()
    if answers:
        connection.send(core.tick())
    for answer in answers:
        connection.send(answer)
    if report := tiers.take_report(time.monotonic()):
        connection.send(report)


def _exchange(
    connection: Connection, core: EngineCore, exchange: BlockExchange, commands: deque[ExportBlocks | ImportBlocks]
) -> None:
    """One exchange a turn, so that the steps go on. What came in is told at once: the next request may need it."""
    came_in = bool(commands) and isinstance(commands[0], ImportBlocks)
    if commands:
        begun = time.perf_counter()
        exchange.receive(commands.popleft())
        core.host_work.done("exchange", begun)
    answers, exchange.answers = exchange.answers, []
    if came_in:
        connection.send(core.tick())
    for answer in answers:
        connection.send(answer)
