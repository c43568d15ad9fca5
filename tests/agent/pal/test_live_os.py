"""Live samples of the host, against psutil and against a child that burns time."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from dragoman_agent.pal import live_os
from dragoman_agent.pal.live_os import OsSource


@pytest.fixture
def burner() -> Iterator[int]:
    """A process that uses a core until the test ends."""
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    yield child.pid
    child.kill()
    child.wait(10)


def test_memory_is_the_systems_and_ours_is_not_foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = psutil.virtual_memory()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)  # other processes come and go meanwhile
    sample = OsSource(lambda: [os.getpid()]).sample()
    blind = OsSource(list).sample()
    assert sample.total_memory_bytes == memory.total
    assert sample.foreign_memory_bytes is not None and blind.foreign_memory_bytes is not None
    own = psutil.Process().memory_info().rss
    assert blind.foreign_memory_bytes - sample.foreign_memory_bytes == pytest.approx(own, rel=0.2)
    assert sample.cpu_share_ratio is None, "there is no interval yet"


def test_time_of_our_own_processes_does_not_count_as_taken_by_others(
    burner: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_os, "_STAT", tmp_path / "none")  # how many others run is not the question here
    as_ours, as_others = OsSource(lambda: [burner]), OsSource(list)
    for source in (as_ours, as_others):
        source.sample()
    time.sleep(0.6)
    ours, others = as_ours.sample(), as_others.sample()
    assert ours.utilization_ratio is not None and ours.utilization_ratio > 0 == others.utilization_ratio
    assert ours.cpu_share_ratio is not None and others.cpu_share_ratio is not None
    assert ours.cpu_share_ratio > others.cpu_share_ratio


def test_a_busy_machine_still_leaves_what_a_fair_scheduler_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All cores are taken, and yet our threads would get their turn."""
    (tmp_path / "stat").write_text("ctxt 1\nprocs_running 9\nprocs_blocked 0\n")
    monkeypatch.setattr(live_os, "_STAT", tmp_path / "stat")
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    busy = iter([0.0, 1e6, 1e6])
    monkeypatch.setattr(live_os, "_busy_seconds", lambda: next(busy))
    source = OsSource(list)
    source.sample()
    time.sleep(0.25)
    assert source.sample().cpu_share_ratio == pytest.approx(1 / (1 + 8 / 2))
    time.sleep(0.25)
    assert source.sample().cpu_share_ratio == 1.0, "nobody took anything"
    monkeypatch.setattr(live_os, "_STAT", tmp_path / "none")
    source._last = (time.monotonic() - 1, 0.0, 0.0)
    monkeypatch.setattr(live_os, "_busy_seconds", lambda: 1e6)
    assert source.sample().cpu_share_ratio == 0.0, "not counted here: the idle share alone"


def test_a_process_that_ended_is_left_out() -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait(10)
    assert OsSource(lambda: [child.pid]).sample().foreign_memory_bytes is not None


def test_pressure_of_the_container_comes_before_the_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "some avg10={0} avg60=0.00 avg300=0.00 total=1\nfull avg10={0} avg60=0.00 avg300=0.00 total=1\n"
    for name, value in (("container", "25.00"), ("host", "50.00")):
        (tmp_path / name).write_text(text.format(value))
    monkeypatch.setattr(live_os, "_PRESSURE", tmp_path / "container")
    monkeypatch.setattr(live_os, "_SYSTEM_PRESSURE", tmp_path / "host")
    assert OsSource(list).sample().memory_stall_ratio == 0.25
    (tmp_path / "container").unlink()
    assert OsSource(list).sample().memory_stall_ratio == 0.5
    (tmp_path / "host").unlink()
    assert OsSource(list).sample().memory_stall_ratio is None
