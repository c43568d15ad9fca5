"""The engine process that is spawned before there is a plan: which library it imports, and when it is given up."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from dragoman_agent import startup
from dragoman_agent.config import AgentSettings
from dragoman_agent.device.null_model import default_null_plan, open_null_model
from dragoman_agent.engine.frames import FrameDecoder
from dragoman_agent.engine.messages import Ready
from dragoman_agent.engine_process import EngineProcess
from dragoman_agent.startup import EarlyEngine, StartupError, engine_config, likely_kind, prepare

NULL = AgentSettings(device="null", open=True)
CONFIG = engine_config(NULL, default_null_plan(open_null_model("null"), num_blocks=64, max_num_seqs=4))


@contextmanager
def early(kind: str) -> Iterator[EarlyEngine]:
    engine = EarlyEngine(kind)
    try:
        yield engine
    finally:
        engine.stop()


@pytest.mark.parametrize("was_lost", [False, True])
def test_an_engine_is_gone_before_a_measurement_but_an_agent_that_lost_its_own_leaves_at_once(was_lost: bool) -> None:
    """A driver may take seconds to end it. Who starts anew waits for its memory then, see nvml_facts."""
    with early("null") as engine:
        process = engine._process
        assert process is not None
        real, waits = process._process.wait, list[float]()

        def wait(timeout: float) -> int:
            waits.append(timeout)
            if timeout < 1.0:  # that long it takes to end
                raise subprocess.TimeoutExpired("engine", timeout)
            return real(timeout)

        process._process.wait = wait  # type: ignore[method-assign, assignment]
        process._process.poll = lambda: None  # type: ignore[method-assign] # nobody has noticed
        if was_lost:
            process.kill()
        engine.stop()
        assert waits == ([0.2] if was_lost else [5.0])
    assert real(5.0) == -signal.SIGKILL


def becomes_ready(process: EngineProcess) -> Ready:
    with process.take_listener() as listener:
        listener.settimeout(20)
        stream, _ = listener.accept()
    decoder = FrameDecoder()
    with stream:
        stream.settimeout(20)
        while data := stream.recv(1 << 20):
            for message in decoder.feed(data):
                if isinstance(message, Ready):
                    return message
    raise AssertionError("the engine ended before it was ready")


def engines() -> list[int]:
    """Process ids of this process' engines."""
    return [
        child.pid for child in psutil.Process().children() if any("engine.process" in word for word in words(child))
    ]


def words(process: psutil.Process) -> list[str]:
    """Its command line, which one that has just been spawned does not have at once."""
    while not (found := process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.001)
    return found


@pytest.mark.parametrize(
    ("requested", "there", "kind"),
    [
        ("null", "/dev/nvidiactl", "null"),
        ("cpu", "/dev/nvidiactl", "cpu"),
        ("cuda", "", "cuda"),
        ("auto", "/dev/nvidiactl", "cuda"),
        ("auto", "/dev/dxg", "cuda"),
        ("auto", "/dev/kfd", "hip"),
        ("auto", "", "cpu"),
    ],
)
def test_what_is_asked_for_or_has_a_driver_is_likely(requested: str, there: str, kind: str) -> None:
    assert likely_kind(requested, lambda path: path == there) == kind


def test_the_process_that_was_spawned_early_gets_the_plan() -> None:
    with early("cpu") as engine:
        (pid,) = engines()
        process = engine.configure(CONFIG)
        assert process.pid == pid
        times = becomes_ready(process).info["start_seconds"]
        assert list(times)[:2] == ["imports", "plan"] and times["imports"] > 0
    assert process.returncode is not None and not engines()


def test_a_process_that_imported_a_library_in_vain_is_not_kept() -> None:
    with early("cuda") as engine:
        (pid,) = engines()
        process = engine.configure(CONFIG)
        assert process.pid != pid and engines() == [process.pid]
        becomes_ready(process)
        maps = {Path(entry.path).name for entry in psutil.Process(process.pid).memory_maps()}
        assert not any("torch" in name for name in maps)


def test_a_measurement_ends_it_and_the_next_gets_the_plan() -> None:
    with early("null") as engine:
        (pid,) = engines()
        engine.stop()
        engine.stop()
        assert not engines()
        process = engine.configure(CONFIG)
        assert process.pid != pid
        becomes_ready(process)


def test_one_that_died_early_is_said_where_it_is_waited_for() -> None:
    with early("null") as engine:
        (pid,) = engines()
        os.kill(pid, signal.SIGKILL)
        process = engine.configure(CONFIG)
        ended = threading.Event()
        process.watch(ended.set)
        assert ended.wait(5) and process.pid == pid and process.returncode == -9


@pytest.mark.parametrize(
    "settings",
    [
        AgentSettings(device="null", open=True, model="/no/such"),
        AgentSettings(device="null", open=True, chat_template=Path("/no/such.jinja")),
        AgentSettings(device="cpu", open=True, model="/no/such.gguf"),
    ],
)
def test_a_start_that_fails_leaves_no_engine(settings: AgentSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    spawned: list[EngineProcess] = []

    class Noted(EngineProcess):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            spawned.append(self)

    monkeypatch.setattr(startup, "EngineProcess", Noted)
    with pytest.raises(StartupError, match="/no/such"), prepare(settings):
        pass
    assert [process.returncode for process in spawned] == [-9] and not engines()


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (
            AgentSettings(device="null", open=True, kv_disk_dir=Path("/kv"), kv_disk_bytes=10),
            "--kv-disk-bytes 10 holds no",
        ),
        (AgentSettings(device="null", open=True, kv_host_bytes=10), "--kv-host-bytes 10 holds no KV block"),
        (
            AgentSettings(device="null", open=True, kv_host_bytes=1 << 60),
            "more than the .* of host memory that are free",
        ),
    ],
)
def test_tiers_of_the_null_device_are_held_to_the_same_rules(settings: AgentSettings, problem: str) -> None:
    with pytest.raises(StartupError, match=problem), prepare(settings):
        pass
    assert not engines()


def test_what_is_measured_is_measured_without_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    running: list[list[int]] = []
    from dragoman_agent.pal import probe

    measure = probe._measure

    def noted(*arguments: Any) -> Any:
        running.append(engines())
        return measure(*arguments)

    monkeypatch.setattr(probe, "_measure", noted)
    monkeypatch.setattr("dragoman_agent.device.cpu.choose_cpu_road", _kept_road())
    settings = AgentSettings(device="cpu", open=True, model="random:smollm2-135m", cache_dir=tmp_path)
    with prepare(settings) as prepared:
        assert running == [[]] and engines() == [prepared.engine.pid]


def _kept_road() -> Callable[..., Any]:
    """Kernels of the usual cache, so that none are built."""
    from dragoman_agent.device.cpu_road import choose_cpu_road
    from dragoman_agent.model.embedded import default_cache_dir

    return lambda model, dtype, cache_dir: choose_cpu_road(model, dtype, default_cache_dir(os.environ))
