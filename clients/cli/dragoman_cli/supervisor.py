"""Starts server processes, reads what they announce, and stops them all. Owner of the children of `dragoman up`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from dragoman_cli.failure import Failure

_LINES_KEPT = 200
_EXIT_REFUSED = 2  # how our servers end when they cannot start, after one line
_MAX_LINE_BYTES = 1 << 20
_LAST_WORDS_SECONDS = 5.0  # a machine with more to do than cores takes seconds to end a process
# Stopping takes this long at most: the children end their streams, and what remains is killed.
STOP_SECONDS = 4.0

T = TypeVar("T")
Event = Mapping[str, Any]
ShowLine = Callable[[str, str], None]  # (process, line of its stderr)


@dataclass(frozen=True, slots=True)
class Pipe:
    """The end of a pipe that we read."""

    reader: asyncio.StreamReader
    transport: asyncio.ReadTransport

    async def lines(self) -> AsyncIterator[str]:
        """Its lines, until everyone who writes to it has ended."""
        while True:
            try:
                line = await self.reader.readline()
            except ValueError:  # longer than the limit: its rest is read as further lines
                continue
            if not line:
                return
            yield line.decode("utf-8", "replace").rstrip("\n")


class Child:
    """One server process. Its announced events come through `event`; its stderr is shown and its tail kept."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, events: Pipe, log: Pipe, show: ShowLine) -> None:
        self.name = name
        self.process = process
        self._pipes = (events, log)
        self._show = show
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._tail: deque[str] = deque(maxlen=_LINES_KEPT)
        self._fatal = ""
        self._refusal = ""
        self._readers = [asyncio.create_task(self._read_events(events)), asyncio.create_task(self._read_log(log))]

    async def event(self) -> Event:
        """The next announced event. Raises Failure with the last error of the process when it has died."""
        getter: asyncio.Task[Event] = asyncio.create_task(self._events.get())
        ended: asyncio.Task[int] = asyncio.create_task(self.wait())
        try:
            await asyncio.wait({getter, ended}, return_when=asyncio.FIRST_COMPLETED)
            if getter.done():
                return getter.result()
            if not self._events.empty():
                return self._events.get_nowait()
            raise self.death()
        finally:
            for task in (getter, ended):
                task.cancel()

    async def expect(self, kind: str) -> Event:
        """The next event of one kind; others are passed over. Raises Failure on "fatal" or death."""
        while True:
            event = await self.event()
            if event.get("event") == kind:
                return event
            if event.get("event") == "fatal":
                raise self.death()

    async def wait(self) -> int:
        """The exit status, once what it printed was read. What it started may live on and hold its stderr."""
        code = await self.process.wait()
        await asyncio.wait(self._readers, timeout=_LAST_WORDS_SECONDS)
        return code

    def death(self) -> Failure:
        """What to tell a person about the end of this process."""
        code = self.process.returncode
        how = (
            "failed" if code is None else f"was killed by {_signal_name(-code)}" if code < 0 else f"exited with {code}"
        )
        why = self._fatal or self.last_error() or "it printed nothing"
        if code == -signal.SIGKILL and not self._fatal:
            # Nothing it printed tells of this end, it had no time to.
            return Failure(
                f"the {self.name} {how}", "somebody killed it, or the kernel did for want of memory",
                "look for 'Out of memory' in dmesg; if it is there, free memory or take a smaller --max-context or model",
            )  # fmt: skip
        if code == 0 and not self._fatal:
            return Failure(
                f"the {self.name} has left", "it was drained, or told to stop, and came to its end in order",
                "start again: dragoman up",
            )  # fmt: skip
        if code == _EXIT_REFUSED and not self._fatal and self._refusal:
            # One line that says what, why and what to do.
            return Failure(f"the {self.name} cannot start: {self._refusal}")
        return Failure(f"the {self.name} {how}", why, f"run dragoman-{self.name} alone to see all of its log")

    def last_error(self) -> str:
        """The last line of its stderr that says something, without the program's name before it."""
        for line in reversed(self._tail):
            if line.strip():
                return line.strip().removeprefix(f"dragoman-{self.name}: ")
        return ""

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the process; nothing when it has ended."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    def kill(self) -> None:
        """Ends the process and what it started in its group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Gives the pipes back."""
        for task in self._readers:
            task.cancel()
        for pipe in self._pipes:
            pipe.transport.close()
        if self.process.stdin is not None:
            self.process.stdin.close()

    async def _read_events(self, pipe: Pipe) -> None:
        async for line in pipe.lines():
            try:
                event = json.loads(line)
            except ValueError:
                event = None
            if isinstance(event, dict):
                if event.get("event") == "fatal":
                    self._fatal = str(event.get("message", ""))
                self._events.put_nowait(event)
            elif line.strip():
                self._show(self.name, line)

    async def _read_log(self, pipe: Pipe) -> None:
        async for line in pipe.lines():
            self._tail.append(line)
            if line.startswith(f"dragoman-{self.name}: "):
                self._refusal = self.last_error()  # told with its death, once
                continue
            self._show(self.name, line)


class Supervisor:
    """The processes of one `dragoman up`, in the order in which they were started."""

    def __init__(self, show: ShowLine) -> None:
        self._show = show
        self.children: list[Child] = []

    async def start(self, name: str, module: str, arguments: Sequence[str], environ: Mapping[str, str]) -> Child:
        """Starts a server in a session of its own, so that Ctrl-C reaches it once, from us."""
        events, events_end = await open_pipe()
        log, log_end = await open_pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", "dragoman_cli.child", module, *arguments, "--announce",
                stdin=asyncio.subprocess.PIPE,
                stdout=events_end,
                stderr=log_end,
                env=dict(environ),
                start_new_session=True,
            )  # fmt: skip
        finally:
            os.close(events_end)
            os.close(log_end)
        child = Child(name, process, events, log, self._show)
        self.children.append(child)
        return child

    async def first_death(self) -> Child:
        """The first child that ends."""
        waits = {asyncio.create_task(child.wait()): child for child in self.children}
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            return waits[next(iter(done))]
        finally:
            for task in waits:
                task.cancel()

    async def unless_death(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, unless a child dies first. Raises Failure with the child's own last error then.

        Work that fails is given a moment too: a process that dies takes its connections along before it is gone.
        """
        task = asyncio.create_task(work)
        death = asyncio.create_task(self.first_death())
        try:
            await asyncio.wait({task, death}, return_when=asyncio.FIRST_COMPLETED)
            if not death.done() and task.exception() is not None:
                await asyncio.wait({death}, timeout=_LAST_WORDS_SECONDS)
            if death.done():
                raise death.result().death()
            return task.result()
        finally:
            for each in (task, death):
                each.cancel()
            await asyncio.gather(task, death, return_exceptions=True)

    async def stop(self, hurry: asyncio.Event | None = None) -> None:
        """Interrupts the children, the one started last first, and kills what is left after 4 s or when in a hurry."""
        waits = [asyncio.create_task(child.wait()) for child in self.children]
        for child in reversed(self.children):
            child.signal(signal.SIGINT)
        if waits:
            hurried: asyncio.Future[Any] = asyncio.create_task((hurry or asyncio.Event()).wait())
            everyone: asyncio.Future[Any] = asyncio.gather(*waits)
            await asyncio.wait({everyone, hurried}, timeout=STOP_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            hurried.cancel()
            for child in self.children:
                if child.process.returncode is None:
                    child.kill()
            await everyone
        for child in self.children:
            child.close()


async def open_pipe() -> tuple[Pipe, int]:
    """A pipe that we read, and the descriptor of its other end.

    asyncio's own pipes would keep `Process.wait` from returning while a grandchild holds them.
    """
    read_end, write_end = os.pipe()
    reader = asyncio.StreamReader(limit=_MAX_LINE_BYTES)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_end, "rb")
    )
    return Pipe(reader, transport), write_end


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
