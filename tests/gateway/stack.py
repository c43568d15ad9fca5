"""Real processes for the gateway's tests: controller, agent on the null device, gateway; each on a port of its own."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

START_SECONDS = 30.0
STOP_SECONDS = 8.0
MODEL = "null"


class Process:
    """A child with announce lines on stdout. Its stderr is kept for the message of a failed test."""

    def __init__(self, module: str, *arguments: str) -> None:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("DRAGOMAN_")}
        self.child = subprocess.Popen(
            [sys.executable, "-c", f"from {module} import main; main()", *arguments, "--announce"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**environment, "PYTHONFAULTHANDLER": "1"},
        )
        self.log: list[str] = []
        self._is_asked = False
        self._events: queue.Queue[dict[str, Any]] = queue.Queue()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._read_out, self._read_err)]
        for thread in self._threads:
            thread.start()

    def _read_out(self) -> None:
        assert self.child.stdout is not None
        for line in self.child.stdout:
            self._events.put(json.loads(line))

    def _read_err(self) -> None:
        assert self.child.stderr is not None
        for line in self.child.stderr:
            self.log.append(line.rstrip())

    def wait_for(self, event: str) -> dict[str, Any]:
        """The next announce line of this kind."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            try:
                announced = self._events.get(timeout=0.1)
            except queue.Empty:
                if self.child.poll() is not None:
                    break
                continue
            if announced["event"] == event:
                return announced
        raise AssertionError(f"no {event!r} from {self.child.args}; log: {self.log[-20:]}")

    def ask_to_stop(self, signal_number: int = signal.SIGINT) -> None:
        """Send the signal, once."""
        if self.child.poll() is None and not self._is_asked:
            self._is_asked = True
            self.child.send_signal(signal_number)

    def stop(self, signal_number: int = signal.SIGINT) -> int:
        """End it and wait."""
        self.ask_to_stop(signal_number)
        try:
            code = self.child.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            # What each thread does is in the log then, see PYTHONFAULTHANDLER.
            self.child.send_signal(signal.SIGABRT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.child.wait(2)
            self.child.kill()
            self.child.wait()
            for thread in self._threads:
                thread.join(5)
            raise AssertionError(f"{self.child.args} did not stop; log: {self.log[-80:]}") from None
        finally:
            for thread in self._threads:
                thread.join(5)
            for pipe in (self.child.stdout, self.child.stderr):
                if pipe is not None:
                    pipe.close()
        return code


@dataclass
class Stack:
    """A controller, agents and a gateway that belong together."""

    controller: Process
    controller_address: str
    agents: list[Process] = field(default_factory=list)
    gateway: Process | None = None
    url: str = ""

    def add_agent(self, *arguments: str) -> Process:
        """One more agent, ready to serve."""
        agent = start_agent(self.controller_address, *arguments)
        self.agents.append(agent)
        agent.wait_for("ready")
        wait_until_ready(self.url)
        return agent

    def stop(self) -> None:
        """End all."""
        processes = [process for process in [self.gateway, *self.agents, self.controller] if process is not None]
        for process in processes:
            process.ask_to_stop()
        for process in processes:
            process.stop()


def start_controller(*arguments: str) -> tuple[Process, str]:
    """A controller and its address."""
    controller = Process("dragoman_controller.main", "--port", "0", "--metrics-port", "0", *arguments)
    return controller, controller.wait_for("serving")["grpc"]


def start_agent(controller: str, *arguments: str) -> Process:
    """An agent on the null device, which writes what its oracle says."""
    return Process(
        "dragoman_agent.main", "--device", "null", "--model", "null", "--port", "0", "--metrics-port", "0",
        "--controllers", controller, *arguments,
    )  # fmt: skip


def start_gateway(controller: str, *arguments: str) -> tuple[Process, str]:
    """A gateway and its URL."""
    gateway = Process("dragoman_gateway.main", "--port", "0", "--controller", controller, *arguments)
    return gateway, "http://" + gateway.wait_for("serving")["http"]


def wait_until_ready(url: str, *, num_agents: int = 1) -> None:
    """Returns when /health says that so many agents serve."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        agents = httpx.get(f"{url}/health").json()["agents"]
        if sum(agent["state"] == "serving" for agent in agents) >= num_agents:
            return
        time.sleep(0.05)
    raise AssertionError(f"{url} is not ready: {httpx.get(f'{url}/health').text}")


@contextmanager
def running_stack(agents: list[tuple[str, ...]], gateway: tuple[str, ...] = ()) -> Iterator[Stack]:
    """A stack for one test, with these agents' and this gateway's options."""
    controller, address = start_controller()
    stack = Stack(controller, address)
    try:
        for index, arguments in enumerate(agents):
            stack.agents.append(start_agent(address, "--agent-id", f"agent-{index}", *arguments))
        stack.gateway, stack.url = start_gateway(address, *gateway)
        for agent in stack.agents:
            agent.wait_for("ready")
        wait_until_ready(stack.url, num_agents=len(agents))
        yield stack
    finally:
        stack.stop()
