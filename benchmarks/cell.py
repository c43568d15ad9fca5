"""A cell of real processes for fault tests, soak and suites: a controller, agents, a gateway; each on a free port."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import psutil
from prometheus_client.parser import text_string_to_metric_families

START_SECONDS = 60.0
STOP_SECONDS = 15.0


class CellError(AssertionError):
    """A process or a condition that did not come; the message holds the end of the log."""


class CellProcess:
    """One process that announces its life on stdout; its log goes to a file, so that no pipe can fill up."""

    def __init__(
        self,
        module: str,
        *flags: str,
        prefix: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
        log: Path | None = None,
    ) -> None:
        """`prefix`: a command that runs it, such as in a namespace. `log`: where the log goes; None for a file that is read back."""
        self.name = module.split(".")[0]
        self.log = tempfile.TemporaryFile("w+") if log is None else log.open("w")  # noqa: SIM115 - lives as long as the process
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("DRAGOMAN_")}
        self.popen = subprocess.Popen(
            [*prefix, sys.executable, "-P", "-c", f"from {module} import main; main()", *flags, "--announce"],
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env={**inherited, **(environ or {})},
        )
        self._events: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            self._events.put(json.loads(line))
        self._events.put(None)

    @property
    def pid(self) -> int:
        """Of the process itself."""
        return self.popen.pid

    def family(self) -> list[psutil.Process]:
        """The process and its children."""
        process = psutil.Process(self.pid)
        return [process, *process.children(recursive=True)]

    def wait_for(self, name: str, seconds: float = START_SECONDS) -> dict[str, Any]:
        """The next announced event of this name. Raises CellError."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            try:
                event = self._events.get(timeout=left)
            except queue.Empty:
                break
            if event is None:
                break
            if event["event"] == name:
                return event
        raise CellError(f"{self.name} did not announce {name!r}; its log ends: {self.log_text()[-2000:]}")

    def log_text(self) -> str:
        """Everything logged so far."""
        self.log.flush()
        with open(f"/proc/self/fd/{self.log.fileno()}", encoding="utf-8", errors="replace") as file:
            return file.read()

    def signal(self, number: int) -> None:
        """Send a signal to the process alone."""
        self.popen.send_signal(number)

    def kill_family(self) -> None:
        """SIGKILL for the process and its children, by pid."""
        for process in reversed(self.family()):
            process.kill()

    def close(self) -> int:
        """End it, whatever it does; the exit code."""
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGCONT)
            self.popen.send_signal(signal.SIGINT)
            try:
                self.popen.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.kill_family()
        code = self.popen.wait(STOP_SECONDS)
        self._reader.join(5)
        if self.popen.stdout is not None:
            self.popen.stdout.close()
        self.log.close()
        return code


class Cell:
    """The processes that belong together."""

    def __init__(
        self,
        environ: Mapping[str, str] | None = None,
        controller: Sequence[str] = (),
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        """`environ`: further variables of every process. `controller`: its flags. `credentials`: of clients, under TLS."""
        self._environ = dict(environ or {})
        self.credentials = credentials
        self.agents: dict[str, CellProcess] = {}
        self._agent_metrics: dict[str, str] = {}
        self.agent_address: dict[str, str] = {}
        self.gateway: CellProcess | None = None
        self.url = ""
        self._port = 0
        self.start_controller(*controller)

    def start_controller(self, *flags: str) -> None:
        """The controller; a later one takes the first one's port."""
        port = ("--port", str(self._port), "--metrics-port", "0")
        self.controller = CellProcess(
            "dragoman_controller.main", *port, "--log-level", "warning", *flags,
            environ=self._environ,
        )  # fmt: skip
        serving = self.controller.wait_for("serving")
        self.controller_address, self._controller_metrics = serving["grpc"], serving["metrics"]
        self._port = int(self.controller_address.rpartition(":")[2])

    def start_agent(
        self,
        agent_id: str,
        *flags: str,
        wait: bool = True,
        prefix: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
        log: Path | None = None,
        module: str = "dragoman_agent.main",
    ) -> CellProcess:
        """An agent on the null device unless `flags` say otherwise. `module`: what runs, where it is not the agent itself."""
        device = () if "--device" in flags else ("--device", "null")
        agent = self.agents[agent_id] = CellProcess(
            module, *device, "--port", "0", "--metrics-port", "0", "--agent-id", agent_id,
            "--controllers", self.controller_address, "--log-level", "warning", *flags,
            prefix=prefix, environ={**self._environ, **(environ or {})}, log=log,
        )  # fmt: skip
        if wait:
            self.wait_agent(agent_id)
        return agent

    def wait_agent(self, agent_id: str, seconds: float = START_SECONDS) -> None:
        """Until its model has run its first step, and what a GPU leaves for after that is there too."""
        agent = self.agents[agent_id]
        serving = agent.wait_for("serving", seconds)
        self._agent_metrics[agent_id], self.agent_address[agent_id] = serving["metrics"], serving["grpc"]
        if agent.wait_for("ready", seconds)["info"].get("prepares_later"):
            agent.wait_for("warmed", seconds)

    def start_gateway(self, *flags: str) -> None:
        """A gateway that takes requests when this returns."""
        self.gateway = CellProcess(
            "dragoman_gateway.main", "--port", "0", "--controller", self.controller_address, "--log-level", "warning", *flags,
            environ=self._environ,
        )  # fmt: skip
        self.url = "http://" + self.gateway.wait_for("serving")["http"]
        self.wait_serving(len(self.agents))

    def wait_serving(self, num_agents: int, seconds: float = 30.0) -> None:
        """Until the gateway sees so many serving agents."""
        wait_until(lambda: self.num_serving() >= num_agents, f"{num_agents} serving agents", seconds)

    def num_serving(self) -> int:
        """Agents that serve, as the gateway last heard."""
        return sum(agent["state"] == "serving" for agent in read_json(f"{self.url}/health")["agents"])

    def remove_agent(self, agent_id: str) -> int:
        """End an agent and forget it; its exit code."""
        self._agent_metrics.pop(agent_id, None)
        return self.agents.pop(agent_id).close()

    def processes(self) -> list[CellProcess]:
        """All that were started and not removed."""
        return [self.controller, *self.agents.values(), *([self.gateway] if self.gateway else [])]

    def close(self) -> None:
        """End all."""
        for process in reversed(self.processes()):
            process.close()

    # What the invariants are read from.

    def controller_metric(self, name: str, **labels: str) -> float:
        """Sum of the samples with these labels."""
        return metric_sum(self._controller_metrics, name, **labels)

    def agent_metric(self, agent_id: str, name: str, **labels: str) -> float:
        """Sum of the samples with these labels."""
        return metric_sum(self._agent_metrics[agent_id], name, **labels)

    def gateway_metric(self, name: str, **labels: str) -> float:
        """Sum of the samples with these labels."""
        return metric_sum(self.url.removeprefix("http://"), name, **labels)

    def leftovers(self) -> dict[str, float]:
        """What must be zero when nothing runs: requests, reservations, and KV blocks that cannot be allocated."""
        found = {"controller reservations": self.controller_metric("dragoman_granted_requests")}
        found["controller waiting"] = self.controller_metric("dragoman_requests_waiting")
        if self.gateway is not None:
            found["gateway requests"] = self.gateway_metric("dragoman_gateway_requests_running")
        for agent_id in self._agent_metrics:
            found[f"{agent_id} running"] = self.agent_metric(agent_id, "dragoman_requests_running")
            found[f"{agent_id} waiting"] = self.agent_metric(agent_id, "dragoman_requests_waiting")
            found[f"{agent_id} KV blocks in use"] = self.kv_blocks_in_use(agent_id)
        return {name: value for name, value in found.items() if value}

    def metrics_address(self, agent_id: str) -> str:
        """Where an agent's /metrics is."""
        return self._agent_metrics[agent_id]

    def kv_blocks_in_use(self, agent_id: str) -> float:
        """Blocks that are neither free nor idle in the prefix cache."""
        total = self.agent_metric(agent_id, "dragoman_kv_blocks", state="total")
        return total - self.agent_metric(agent_id, "dragoman_kv_blocks", state="free")

    def quiesce(self, seconds: float = 20.0) -> None:
        """Until nothing is left over. Raises CellError naming what is."""
        deadline = time.monotonic() + seconds
        while left := self.leftovers():
            if time.monotonic() > deadline:
                raise CellError(f"after {seconds:.0f} s still there: {left}")
            time.sleep(0.2)

    def footprint(self) -> dict[int, tuple[str, int, int]]:
        """pid -> (name, open file descriptors, resident bytes) of every process."""
        found = {}
        for process in self.processes():
            for member in process.family():
                found[member.pid] = (process.name, member.num_fds(), member.memory_info().rss)
        return found


@contextmanager
def running_cell(
    *agents: tuple[str, ...], gateway: tuple[str, ...] = (), environ: Mapping[str, str] | None = None
) -> Iterator[Cell]:
    """A cell with one agent for each tuple of flags, named agent-0 and so on, and a gateway."""
    cell = Cell(environ)
    try:
        for index, flags in enumerate(agents):
            cell.start_agent(f"agent-{index}", *flags, wait=False)
        for agent_id in list(cell.agents):
            cell.wait_agent(agent_id)
        cell.start_gateway(*gateway)
        yield cell
    finally:
        cell.close()


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 10.0) -> float:
    """Seconds until the condition held. Raises CellError naming `what`."""
    started = time.monotonic()
    while not condition():
        if time.monotonic() - started > seconds:
            raise CellError(f"not within {seconds:g} s: {what}")
        time.sleep(0.02)
    return time.monotonic() - started


def read_text(url: str) -> str:
    """The body of a GET; a 503 has one too."""
    try:
        with urllib.request.urlopen(url, timeout=10) as reply:
            return str(reply.read().decode())
    except urllib.error.HTTPError as error:
        with error:
            return error.read().decode()


def read_json(url: str) -> Any:
    """The JSON body of a GET."""
    return json.loads(read_text(url))


def metric_sum(address: str, name: str, **labels: str) -> float:
    """Sum of a metric's samples that have these labels, from a /metrics page."""
    total, seen = 0.0, False
    for family in text_string_to_metric_families(read_text(f"http://{address}/metrics")):
        seen |= family.name == name.removesuffix("_total")  # a counter with labels shows nothing before its first event
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                total += sample.value
    if not seen:
        raise CellError(f"{address}/metrics has no {name}{labels}")
    return total
