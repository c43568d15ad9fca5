"""Real servers: controller and null agents as processes of their own, announced and stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_START_SECONDS = 60.0


@dataclass(slots=True)
class Server:
    """A process that serves."""

    process: subprocess.Popen[str]
    address: str
    log: Path

    def kill(self) -> None:
        """As kill -9."""
        self.process.kill()

    def stop(self) -> None:
        """SIGINT, then SIGKILL after 6 s."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(6)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


class StartError(Exception):
    """A server that did not come up; the message has the end of its log."""


def start_controller(folder: Path, *arguments: str) -> Server:
    """A controller. Raises StartError."""
    return _start(folder, "dragoman_controller.main", arguments, "serving")


def start_agent(folder: Path, *arguments: str) -> Server:
    """A null agent that has its model. Raises StartError."""
    return _start(folder, "dragoman_agent.main", ("--device", "null", *arguments), "ready")


def _start(folder: Path, module: str, arguments: tuple[str, ...], until: str) -> Server:
    log = folder / f"{module.split('.')[0]}-{len(list(folder.iterdir()))}.log"
    environ = {name: value for name, value in os.environ.items() if not name.startswith("DRAGOMAN_")}
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, *arguments, "--port", "0", "--metrics-port", "0", "--announce"],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=environ,
        )
    assert process.stdout is not None
    watchdog = threading.Timer(_START_SECONDS, process.kill)
    watchdog.start()
    address = ""
    try:
        for line in process.stdout:
            event: dict[str, Any] = json.loads(line)
            address = str(event["grpc"]) if event["event"] == "serving" else address
            if event["event"] == until:
                return Server(process, address, log)
    finally:
        watchdog.cancel()
    process.wait()
    process.stdout.close()
    raise StartError(f"{module} did not start: {log.read_text()[-2000:]}")
