"""CPU time of the engine's own work a step: 256 plain requests in decode on the null device, nothing waited for.

    python -m benchmarks.engine_host [--batch 256] [--steps 400] [--rounds 5] [--parts] [--record]

What the null device computes is taken out; encoding and writing the frame to a socket are in. The other end reads between
the steps, outside the time taken. `--parts` says where the time goes; a run with it is not recorded, as it takes more readings.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from benchmarks.record import make_record, save

from dragoman_agent.device.base import StepBatch, StepHandle
from dragoman_agent.device.null import NullDevice
from dragoman_agent.device.null_model import NullModel, default_null_plan
from dragoman_agent.engine.core import EngineCore
from dragoman_agent.engine.local import build_core
from dragoman_agent.engine.loop import Connection
from dragoman_agent.engine.messages import Sampling, Start, Stop

PREDICTED_MICROSECONDS = 250.0  # see NOTES.md, "Host work a step"
NUM_PROMPT = 128


class Stopwatch:
    """CPU seconds of this thread by part; parts nest and each has only its own."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner = 0.0

    def around(self, part: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """`work` with its time taken."""

        def timed(*arguments: Any) -> Any:
            outer, self._inner = self._inner, 0.0
            begun = time.thread_time()
            try:
                return work(*arguments)
            finally:
                spent = time.thread_time() - begun
                self.seconds[part] += spent - self._inner
                self._inner = outer + spent

        return timed


class TimedDevice(NullDevice):
    """Its own time apart."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0

    def submit(self, batch: StepBatch) -> StepHandle:
        """See Device."""
        begun = time.thread_time()
        handle = super().submit(batch)
        self.seconds += time.thread_time() - begun
        return handle


def prompt_of(index: int) -> list[int]:
    """Of other length for each, so that block tables grow in different steps."""
    return [(index * 7 + i) % 250 for i in range(NUM_PROMPT + index % 64)]


def measure(batch: int, num_steps: int, stopwatch: Stopwatch | None) -> float:
    """Host CPU seconds a step."""
    device, model = TimedDevice(), NullModel()
    plan = default_null_plan(model, max_num_seqs=batch, num_blocks=batch * (4 + num_steps // 32))
    device.load(model, plan, lambda progress: None)
    core = build_core(device, model, plan)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    connection = Connection(ours)
    for index in range(batch):
        stop = Stop(max_output_tokens=num_steps * 2, eos_token_ids=[258])
        sampling = Sampling(seed=index)
        core.receive(Start(f"request-{index}", prompt_of(index), sampling, stop, credit=1 << 30, key=index))
    for _ in range(20):
        core.turn(connection.send)
        theirs.recv(1 << 20)
    assert len(core.scheduler.running) == batch
    if stopwatch is not None:
        watch(core, connection, stopwatch)
    device.seconds = total = 0.0
    for _ in range(num_steps):
        begun = time.thread_time()
        connection.receive(0.0)
        core.turn(connection.send)
        total += time.thread_time() - begun
        while len(theirs.recv(1 << 20)) == 1 << 20:
            pass
    assert len(core.scheduler.running) == batch, "a request ended: it was no steady state"
    ours.close()
    theirs.close()
    return (total - device.seconds) / num_steps


def watch(core: EngineCore, connection: Connection, stopwatch: Stopwatch) -> None:
    """Take the time of each part."""
    parts: list[tuple[Any, str, str]] = [
        (core.scheduler, "schedule", "schedule"),
        (core.scheduler, "launched", "schedule"),
        (core._builder, "build", "build"),
        (core._device, "submit", "device"),
        (core, "collect", "take"),
        (core, "emit", "hand out"),
        (core, "_frame", "frame"),
        (connection, "send", "send"),
        (connection, "receive", "receive"),
        (core, "turn", "rest"),
    ]
    for owner, name, part in parts:
        setattr(owner, name, stopwatch.around(part, getattr(owner, name)))


def main() -> None:
    """Measure, print, and save where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--parts", action="store_true", help="say where the time goes")
    parser.add_argument("--record", action="store_true", help="put the result into benchmarks/results/cpu.json")
    options = parser.parse_args()
    if options.parts:
        stopwatch = Stopwatch()
        total = measure(options.batch, options.steps, stopwatch)
        for part, seconds in sorted(stopwatch.seconds.items(), key=lambda item: -item[1]):
            print(f"{part:10} {seconds / options.steps * 1e6:7.1f} us{'  (not in the sum)' * (part == 'device')}")
        print(f"{'sum':10} {total * 1e6:7.1f} us a step, the readings included")
        return
    samples = [measure(options.batch, options.steps, None) * 1e6 for _ in range(options.rounds)]
    print(f"host work a step at {options.batch}: {statistics.median(samples):.0f} us {[round(s) for s in samples]}")
    if options.record:
        record = make_record(
            bench="host_step", case=f"null-b{options.batch}", metric="microseconds", unit="us", samples=samples,
            predicted=PREDICTED_MICROSECONDS, packages=("numpy", "msgpack"),
            command=f"python -m benchmarks.engine_host --batch {options.batch} --record",
            note="CPU time of the engine's thread without the null device's own; encoding and sending included",
        )  # fmt: skip
        print(f"saved to {save('cpu', [record])}")


if __name__ == "__main__":
    main()
