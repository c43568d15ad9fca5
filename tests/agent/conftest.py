"""Real agent processes on the null device, and channels to them."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import grpc
import psutil
import pytest

from dragoman.channel import channel_options

START_SECONDS = 30.0
COMMAND = (sys.executable, "-P", "-m", "dragoman_agent.main")


class AgentProcess:
    """One `dragoman-agent` under test; `events` are its announced lines."""

    def __init__(
        self, *flags: str, open: bool = True, device: str = "null", environ: dict[str, str] | None = None
    ) -> None:
        access = ["--open"] if open else []
        ports = ["--port", "0", "--metrics-port", "0"]
        self.process = subprocess.Popen(
            [*COMMAND, "--device", device, "--announce", *access, *ports, *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **{key: value for key, value in os.environ.items() if not key.startswith("DRAGOMAN_")},
                **(environ or {}),
            },
        )
        self.events: list[dict[str, Any]] = []
        self.log: list[str] = []
        self._arrived: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._readers = [
            threading.Thread(target=self._read_events, daemon=True),
            threading.Thread(target=self._read_log, daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def _read_events(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._arrived.put(json.loads(line))
        self._arrived.put(None)

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        self.log.extend(self.process.stderr)

    def wait_for(self, name: str, timeout: float = START_SECONDS) -> dict[str, Any]:
        """The next announced event of this name."""
        deadline = time.monotonic() + timeout
        while True:
            event = self._arrived.get(timeout=max(deadline - time.monotonic(), 0.01))
            if event is None:
                raise AssertionError(f"the agent ended before {name!r}: {''.join(self.log)}")
            self.events.append(event)
            if event["event"] == name:
                return event

    def wait_ready(self) -> AgentProcess:
        """Until the model has run its first step."""
        serving = self.wait_for("serving")
        self.address, self.metrics_address = serving["grpc"], serving["metrics"]
        self.info = self.wait_for("ready")["info"]
        return self

    @property
    def engine(self) -> psutil.Process:
        """The engine process."""
        children = psutil.Process(self.process.pid).children()
        assert len(children) == 1, children
        return children[0]

    def signal(self, number: int) -> None:
        """Send a signal to the rpc process."""
        self.process.send_signal(number)

    def wait_exit(self, timeout: float) -> int:
        """Exit code."""
        code = self.process.wait(timeout)
        for reader in self._readers:
            reader.join(timeout=5)
        return code

    def close(self) -> None:
        """End it, whatever it does."""
        if self.process.poll() is None:
            self.signal(signal.SIGINT)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)
        for reader in self._readers:
            reader.join(timeout=5)
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()


StartAgent = Callable[..., AgentProcess]


@pytest.fixture
def start_agent() -> Iterator[StartAgent]:
    """Starts agents that end with the test."""
    started: list[AgentProcess] = []

    def start(*flags: str, ready: bool = True, **options: Any) -> AgentProcess:
        agent = AgentProcess(*flags, **options)
        started.append(agent)
        return agent.wait_ready() if ready else agent

    yield start
    for agent in started:
        agent.close()


@pytest.fixture(scope="session")
def shared_agent() -> Iterator[AgentProcess]:
    """One open agent for all tests that leave no trace in it."""
    agent = AgentProcess().wait_ready()
    yield agent
    agent.close()


@pytest.fixture(scope="session")
def paced_agent() -> Iterator[AgentProcess]:
    """An open agent whose steps take what its step model says."""
    agent = AgentProcess("--null-speed", "1").wait_ready()
    yield agent
    agent.close()


@pytest.fixture
async def channel(shared_agent: AgentProcess) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to the shared agent."""
    async with grpc.aio.insecure_channel(shared_agent.address, options=channel_options()) as opened:
        yield opened
