"""Measures one CUDA device for its profile; run in a process of its own, so that no context outlives the measurement.

python -m dragoman_agent.device.cuda_probe INDEX [--full] [--steps A,B] [--cache DIR]
prints a line of JSON a step: {"step", "seconds", "values"} or {"step", "seconds", "error"}; on stderr, what it is about to do.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from dragoman_agent.device import (
    cuda_probe_compute as compute,
)
from dragoman_agent.device import (
    cuda_probe_launch as launch,
)
from dragoman_agent.device import (
    cuda_probe_link as link,
)
from dragoman_agent.device import (
    cuda_probe_memory as memory,
)
from dragoman_agent.device.cuda_probe_bench import Bench, StepError
from dragoman_agent.device.error_text import first_line
from dragoman_agent.device.partition import PartitionError, limits_from_environ
from dragoman_agent.device.probe_answers import answer, own_stdout, say
from dragoman_agent.pal.probe_steps import FULL_STEPS, QUICK_STEPS
from dragoman_agent.pal.profile import Value
from dragoman_kernels.probe.driver import DriverError

STEPS = {
    "memory.read": memory.read,
    "memory.copy": memory.copy,
    "memory.by_size": memory.read_by_size,
    "memory.l2": memory.level_two,
    "memory.latency": memory.latency,
    "memory.latency_by_region": memory.latency_by_region,
    "scheduling.graph_node": launch.graph_node,
    "scheduling.grid_barrier": launch.grid_barrier,
    "scheduling.phase": memory.phase,
    "scheduling.stream_launch": launch.stream_launch,
    "scheduling.events": launch.events,
    "scheduling.atomics": launch.atomics,
    "scheduling.block_size": memory.by_block_size,
    "link.pinned": link.pinned,
    "link.pageable": link.pageable,
    "compute.bfloat16": compute.matmul_bfloat16,
    "compute.float16": compute.matmul_float16,
    "compute.float8": compute.matmul_float8,
    "compute.int8": compute.matmul_int8,
}
_NEEDS_MEMORY = "compute."  # these take matrices of their own
_WARM_UP_SECONDS = 0.15
_STARTED = time.perf_counter()


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; 0 when every step was tried, 1 when the device could not be opened, 3 when a failed step broke its context."""
    parser = argparse.ArgumentParser(prog="python -m dragoman_agent.device.cuda_probe", description=__doc__)
    parser.add_argument("index", type=int)
    parser.add_argument("--full", action="store_true", help="all steps, more repeats")
    parser.add_argument("--steps", default="", help="only these, separated by commas")
    parser.add_argument("--cache", type=Path, default=None, help="folder that keeps compiled kernels")
    arguments = parser.parse_args(argv)
    names = [name for name in arguments.steps.split(",") if name] or (FULL_STEPS if arguments.full else QUICK_STEPS)
    unknown = [name for name in names if name not in STEPS]
    if unknown:
        parser.error(f"no step {', '.join(unknown)}; there are {', '.join(STEPS)}")
    with own_stdout() as answers:
        return _measure(arguments, names, answers)


def _measure(arguments: argparse.Namespace, names: Sequence[str], answers: TextIO) -> int:
    try:
        limits = limits_from_environ()
        bench = Bench(arguments.index, full=arguments.full, limits=limits, cache_dir=arguments.cache)
    except (PartitionError, RuntimeError) as error:  # no driver library is a RuntimeError too
        say(f"GPU {arguments.index} could not be opened: {first_line(error)}")
        return 1
    with bench:
        answer(answers, "open", time.perf_counter() - _STARTED, values={})
        bench.warm_up(_WARM_UP_SECONDS)
        if limits.num_multiprocessors is not None:
            note = f"a green context; {limits.num_multiprocessors} asked for"
            count = Value(bench.session.num_multiprocessors, "", "reported", note=note)
            answer(answers, "partition", 0.0, values={"partition.multiprocessors": count})
        for name in names:
            if not _run(bench, name, answers):
                os._exit(3)  # the context is broken: nothing after it could be trusted, not even its destruction
    return 0


def _run(bench: Bench, name: str, answers: TextIO) -> bool:
    """One step; False when the device does not work any more after it."""
    say(f"step {name}")
    if name.startswith(_NEEDS_MEMORY):
        bench.drop_pool()
    start = time.perf_counter()
    try:
        values = bench.clocks.noted(STEPS[name](bench))
    except (StepError, ValueError, RuntimeError) as error:  # driver and compiler errors are RuntimeErrors
        answer(answers, name, time.perf_counter() - start, error=first_line(error))
        return _still_works(bench, name)
    answer(answers, name, time.perf_counter() - start, values=values)
    return True


def _still_works(bench: Bench, name: str) -> bool:
    try:
        bench.session.synchronize()
    except DriverError as error:
        say(f"the device answers {error} after step {name}")
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
