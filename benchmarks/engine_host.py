"""CPU time of the engine's own work a step: 256 requests on the null device, nothing waited for.

    python -m benchmarks.engine_host [--batch 256] [--steps 400] [--rounds 5] [--case decode] [--parts] [--record]

Cases: `decode`, plain requests without end; `mixed`, each writes 64 tokens and another takes its place; `filters`, top-k with top-p;
`penalties`, which the engine has to know the text for. What the null device computes is taken out; encoding and writing the frame
to a socket are in. The other end reads between the steps, outside the time taken. `--parts` says where the time goes; a run with it
is not recorded, as it takes more readings.
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

from dragoman_agent.device.base import SamplingBatch, StepBatch
from dragoman_agent.device.null import NullDevice, NullStepHandle
from dragoman_agent.device.null_model import NullModel, default_null_plan
from dragoman_agent.engine.core import EngineCore
from dragoman_agent.engine.local import build_core
from dragoman_agent.engine.loop import Connection
from dragoman_agent.engine.messages import Sampling, Start, Stop

PREDICTED_MICROSECONDS = 173.0  # see NOTES.md, "Host work a step"
NUM_PROMPT = 128
NUM_MIXED_OUTPUT = 64
CASES: dict[str, dict[str, float]] = {
    "decode": {},
    "mixed": {},
    "filters": {"top_k": 40, "top_p": 0.9},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.2},
}


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


class TimedHandle:
    """A step of a TimedDevice."""

    def __init__(self, device: TimedDevice, handle: NullStepHandle) -> None:
        self._device, self._handle = device, handle
        self.result, self.ended = handle.result, handle.ended

    def supply(self, sampling: SamplingBatch) -> None:
        """See LateStep."""
        begun = time.thread_time()
        self._handle.supply(sampling)
        self._device.seconds += time.thread_time() - begun


class TimedDevice(NullDevice):
    """Its own time apart."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0

    def submit(self, batch: StepBatch) -> TimedHandle:  # type: ignore[override] # in its place
        """See Device."""
        begun = time.thread_time()
        handle = super().submit(batch)
        self.seconds += time.thread_time() - begun
        return TimedHandle(self, handle)


def prompt_of(index: int) -> list[int]:
    """Of other length for each, so that block tables grow in different steps."""
    return [(index * 7 + i) % 250 for i in range(NUM_PROMPT + index % 64)]


class Load:
    """Requests of one case: so many live at once."""

    def __init__(self, case: str, batch: int, num_steps: int) -> None:
        self._fields: Any = CASES[case]
        self._num_output = NUM_MIXED_OUTPUT if case == "mixed" else num_steps * 2
        self._batch = batch
        self.num_sent = 0

    def fill(self, core: EngineCore) -> None:
        """Start as many as are missing. Those of the first batch end one after the other."""
        while len(core.requests) < self._batch:
            index = self.num_sent
            self.num_sent += 1
            least = self._num_output * (index + 1) // self._batch if index < self._batch else 0
            num_output = self._num_output if self._num_output > NUM_MIXED_OUTPUT or not least else least
            stop = Stop(max_output_tokens=num_output, eos_token_ids=[258])
            sampling = Sampling(seed=index, **self._fields)
            core.receive(Start(f"request-{index}", prompt_of(index), sampling, stop, credit=1 << 30, key=index))


def measure(batch: int, num_steps: int, stopwatch: Stopwatch | None, case: str = "decode") -> float:
    """Host CPU seconds a step."""
    device, model = TimedDevice(), NullModel()
    plan = default_null_plan(model, max_num_seqs=batch, num_blocks=batch * (6 + num_steps // 32))
    device.load(model, plan, lambda progress: None)
    core = build_core(device, model, plan)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    connection = Connection(ours)
    load = Load(case, batch, num_steps)
    for _ in range(20):
        load.fill(core)
        core.turn(connection.send)
        theirs.recv(1 << 20)
    assert case == "mixed" or len(core.scheduler.running) == batch
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
        load.fill(core)
    assert case == "mixed" or load.num_sent == batch, "a request ended: it was no steady state"
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
    parser.add_argument("--case", choices=list(CASES), default="decode")
    parser.add_argument("--parts", action="store_true", help="say where the time goes")
    parser.add_argument("--record", action="store_true", help="put the result into benchmarks/results/cpu.json")
    options = parser.parse_args()
    if options.parts:
        stopwatch = Stopwatch()
        total = measure(options.batch, options.steps, stopwatch, options.case)
        for part, seconds in sorted(stopwatch.seconds.items(), key=lambda item: -item[1]):
            print(f"{part:10} {seconds / options.steps * 1e6:7.1f} us{'  (not in the sum)' * (part == 'device')}")
        print(f"{'sum':10} {total * 1e6:7.1f} us a step, the readings included")
        return
    samples = [measure(options.batch, options.steps, None, options.case) * 1e6 for _ in range(options.rounds)]
    print(
        f"host work a step at {options.batch}, {options.case}: {statistics.median(samples):.0f} us {[round(s) for s in samples]}"
    )
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
