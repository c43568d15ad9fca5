"""The trace file: what a reader finds in it, that steady state overlaps, and what bounds it."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dragoman_agent.device.base import StepResult
from dragoman_agent.device.cpu import CpuStepHandle
from dragoman_agent.device.null import NullDevice
from dragoman_agent.device.null_model import NullModel, default_null_plan
from dragoman_agent.engine.local import build_core, run_all
from dragoman_agent.engine.messages import Sampling, Start, Step, Stop
from dragoman_agent.engine.trace import TimedStep, TraceError, TraceWriter

MODEL = NullModel()


def read(path: Path) -> list[dict[str, Any]]:
    """Events of a file, as a reader takes it that forgives the missing bracket."""
    text = path.read_text()
    events: list[dict[str, Any]] = json.loads(text if text.rstrip().endswith("]") else text + "]")
    return events


def traced_core(directory: Path, speed: float, **options: Any) -> tuple[Any, TraceWriter]:
    device = NullDevice("hash", speed)
    plan = default_null_plan(MODEL, num_blocks=64, max_num_seqs=8)
    device.load(MODEL, plan, lambda progress: None)
    trace = TraceWriter(directory, **options)
    return build_core(device, MODEL, plan, trace=trace), trace


def starts(count: int, num_tokens: int, **sampling: Any) -> list[Start]:
    return [
        Start(f"r{i}", [1 + i] * 20, Sampling(**sampling), Stop(num_tokens), credit=1 << 20, key=i)
        for i in range(count)
    ]


def steps_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted((e for e in events if e["ph"] == "X" and e["tid"] == 2), key=lambda e: e["args"]["step"])


def test_in_steady_state_a_step_is_handed_over_before_the_one_before_it_ends(tmp_path: Path) -> None:
    core, trace = traced_core(tmp_path, speed=5.0)
    run_all(core, starts(4, 60))
    trace.close()
    events = read(trace.path)
    steps = steps_of(events)
    assert [e["args"]["step"] for e in steps] == list(range(1, len(steps) + 1)) and len(steps) >= 60
    early = [after["args"]["handed_over"] < step["ts"] + step["dur"] for step, after in itertools.pairwise(steps[2:])]
    # A machine under load may stop the host for a step; without run-ahead none is early.
    assert sum(early) >= 0.8 * len(early)
    for step, after in itertools.pairwise(steps):
        assert after["ts"] >= step["ts"] + step["dur"] - 1.0, "one step at a time"
    assert sum(e["args"]["decode_tokens"] + e["args"]["prefill_tokens"] for e in steps) == 4 * (20 + 60 - 1)
    assert steps[5]["args"]["sequences"] == 4


def test_a_cpu_step_ends_when_its_thread_is_done() -> None:
    future: Future[StepResult] = Future()
    sampling: Future[Any] = Future()
    sampling.set_result(None)
    handle = CpuStepHandle(future, sampling)
    before = time.perf_counter()
    future.set_result(StepResult(np.zeros(1, np.int32), np.ones(1, np.bool_)))
    handle.result()
    assert isinstance(handle, TimedStep) and before <= handle.ended() <= time.perf_counter()


def test_a_step_that_is_waited_for_is_seen_to_be(tmp_path: Path) -> None:
    core, trace = traced_core(tmp_path, speed=1.0)
    run_all(core, [Start("r", [1] * 20, Sampling(num_prompt_logprobs=0), Stop(12), credit=1 << 20)])
    trace.close()
    steps = steps_of(read(trace.path))
    assert len(steps) >= 12
    for step, after in itertools.pairwise(steps):
        assert after["args"]["handed_over"] >= step["ts"] + step["dur"] - 1.0


def test_parts_of_the_hosts_work_add_up_to_what_is_published(tmp_path: Path) -> None:
    core, trace = traced_core(tmp_path, speed=1.0)
    frames: list[Step] = []
    run_all(core, starts(3, 30), on_step=frames.append)
    trace.close()
    seconds: dict[str, float] = defaultdict(float)
    for event in read(trace.path):
        if event["ph"] == "X" and event["tid"] == 1:
            seconds[event["name"]] += event["dur"] * 1e-6
    assert {"schedule", "build", "take", "hand out", "frame"} <= seconds.keys()
    published = sum(frame.host_seconds for frame in frames)
    # The last frame's own making is counted for a next one, which there is not.
    assert published == pytest.approx(sum(seconds.values()), rel=0.1)


def test_the_file_is_whole_when_the_process_is_killed(tmp_path: Path) -> None:
    """Everything up to the last write can be read, with names of the tracks."""
    code = (
        "import sys, time; sys.path[:0] = [sys.argv[2]]\n"
        "from pathlib import Path; from dragoman_agent.engine.trace import TraceWriter\n"
        "trace = TraceWriter(Path(sys.argv[1]))\n"
        "for i in range(3000): trace.host('part', i, i + 0.5)\n"
        "trace._write(); trace.host('lost', 0, 1); print('written', flush=True); time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path), "."], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"written\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    (path,) = tmp_path.iterdir()
    assert not path.read_text().endswith("]")
    events = read(path)
    assert sum(event["name"] == "part" for event in events) == 3000
    assert {e["args"]["name"] for e in events if e["ph"] == "M"} == {"Dragoman engine", "host", "device"}


def test_two_files_hold_the_newest_events(tmp_path: Path) -> None:
    core, trace = traced_core(tmp_path, speed=0.0, max_file_bytes=40_000)
    for round_ in range(12):
        run_all(core, [Start(f"q{round_}", [1] * 8, Sampling(), Stop(30), credit=1 << 20, key=round_)])
        trace._write()
    trace.close()
    files = sorted(tmp_path.iterdir())
    assert files == [trace.path.with_suffix(".1.json"), trace.path]
    assert all(file.stat().st_size < 80_000 for file in files)
    last = [step["args"]["step"] for file in files for step in steps_of(read(file))]
    assert last == list(range(last[0], core._step_count + 1)) and last[0] > 1


def test_a_full_disk_ends_the_trace_and_not_the_engine(tmp_path: Path) -> None:
    core, trace = traced_core(tmp_path, speed=0.0)
    os.close(trace._file)
    trace._file = os.open("/dev/full", os.O_WRONLY)
    events = run_all(core, starts(2, 10))
    trace._write()
    assert "ends here" in trace.problem and "No space left" in trace.problem
    assert sum(type(event).__name__ == "Finished" for event in events) == 2
    trace.close()


def test_a_directory_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TraceError, match=r"--trace-dir .*file/x: cannot write there .*give a directory"):
        TraceWriter(tmp_path / "file" / "x")
