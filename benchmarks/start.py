"""Time, CPU and memory of a start: `dragoman up` with the embedded model, and the controller alone.

    python -m benchmarks.start [--rounds 3] [--record]

Ready means that a token has come through the whole path. Memory is the resident size of the agent's two processes once ready.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

import psutil
from benchmarks.record import Record, make_record, save

COMMAND = "python -m benchmarks.start --record"
PREDICTED = {"seconds_to_ready": 6.0, "controller_cpu_seconds": 0.4, "agent_resident_bytes": 350e6}


@dataclass(frozen=True, slots=True)
class Sample:
    """One round."""

    seconds_to_ready: float
    agent_resident_bytes: float
    controller_cpu_seconds: float


def start_all() -> tuple[float, float]:
    """Seconds from `dragoman up` to ready, and the resident bytes of agent and engine."""
    ports = [
        f"--{name}=0"
        for name in ("port", "controller-port", "agent-port", "controller-metrics-port", "agent-metrics-port")
    ]
    command = [sys.executable, "-m", "dragoman_cli.main", "up", "--device", "cpu", "--json-summary", *ports]
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        line = next((line for line in process.stdout if line.startswith("{")), "")
        seconds = time.perf_counter() - begin
        if not line:
            raise RuntimeError(f"dragoman up did not get ready (exit {process.wait()})")
        agent = [
            child
            for child in psutil.Process(process.pid).children(recursive=True)
            if any("dragoman_agent" in word for word in child.cmdline())
        ]
        resident = sum(child.memory_info().rss for child in agent)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=30)
    return seconds, float(resident)


def start_controller() -> float:
    """CPU seconds of the controller until it serves."""
    command = [sys.executable, "-m", "dragoman_controller.main", "--port", "0", "--metrics-port", "0", "--announce"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        if json.loads(process.stdout.readline())["event"] != "serving":
            raise RuntimeError("the controller did not say that it serves")
        times = psutil.Process(process.pid).cpu_times()
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=30)
    return float(times.user + times.system)


def records(samples: list[Sample]) -> list[Record]:
    """One record a figure."""
    units = {"seconds_to_ready": "s", "controller_cpu_seconds": "s", "agent_resident_bytes": "bytes"}
    return [
        make_record(
            bench="start", case="smollm2-135m-cpu", metric=metric, unit=unit,
            samples=[getattr(sample, metric) for sample in samples], predicted=PREDICTED[metric], command=COMMAND,
            packages=("grpcio",),
        )
        for metric, unit in units.items()
    ]  # fmt: skip


def main() -> None:
    """Run and print; `--record` saves."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    start_all()  # compiles the kernels and measures the profile where this machine has neither yet
    samples = []
    for _ in range(options.rounds):
        seconds, resident = start_all()
        samples.append(Sample(seconds, resident, start_controller()))
        print(samples[-1], flush=True)
    print(f"median {statistics.median(s.seconds_to_ready for s in samples):.2f} s to ready")
    if options.record:
        print(save("cpu", records(samples)))


if __name__ == "__main__":
    main()
