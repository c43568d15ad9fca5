"""Memory that a killed process still holds counts as free once the driver has taken it down: a start waits for that."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.fakes.cuda_driver import H200
from tests.fakes.machines import FakeStaticNvml

from dragoman_agent.pal import nvml_facts
from dragoman_agent.pal.nvml_facts import Nvml, is_ending

GIB = 1 << 30


@contextmanager
def killed() -> Iterator[subprocess.Popen[bytes]]:
    """A process that has ended and that nobody has waited for."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    yield process
    process.wait()
    assert process.stdin is not None
    process.stdin.close()


class Ending(FakeStaticNvml):
    """Memory is free, and its holder gone, when `process` is."""

    process: subprocess.Popen[bytes]

    def nvmlDeviceGetMemoryInfo(self, card: Any) -> Any:
        info = super().nvmlDeviceGetMemoryInfo(card)
        info.free = 100 * GIB if self.process.returncode is not None else 60 * GIB
        return info

    def nvmlDeviceGetComputeRunningProcesses(self, card: Any) -> Any:
        return super().nvmlDeviceGetComputeRunningProcesses(card) if self.process.returncode is None else []


def read(process: subprocess.Popen[bytes]) -> Any:
    card = H200.but(holders=((process.pid, 40 * GIB),))
    library = Ending(card)
    library.process = process
    library.nvmlInit()
    return Nvml(library).read(f"GPU-{card.uuid}", "0000:00:00.0")


def test_only_what_has_ended_is_ending() -> None:
    assert not is_ending(os.getpid())
    assert not is_ending(1 << 30), "nobody"
    with killed() as process:
        assert is_ending(process.pid)
    assert not is_ending(process.pid)


def test_a_killed_process_memory_is_waited_for() -> None:
    with killed() as process:
        threading.Timer(0.3, process.wait).start()
        reading = read(process)
    assert reading.values["memory.free"].value == 100 * GIB
    assert reading.holders == ()


def test_it_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(nvml_facts, "_ENDING_SECONDS", 0.1)
    with killed() as process:
        reading = read(process)
    assert reading.values["memory.free"].value == 60 * GIB
    assert f"(pid {process.pid}); the plan is made without it, start again once" in caplog.text
