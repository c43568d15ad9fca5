"""What handing a decode step to a GPU takes the host, part by part, with and without kernels that start early.

python -m benchmarks.submit_gpu [qwen3-0.6b] [--out FILE]      a line a batch: medians in microseconds
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.card import Result, keep, result, usable_gpu
from benchmarks.gpu_setup import CACHE, LIMITS, Loaded

from dragoman_agent.device import cuda
from dragoman_agent.device.base import StepBatch
from dragoman_agent.device.cuda import CudaDevice
from dragoman_agent.device.warm_up import decode_batch
from dragoman_agent.model.source import open_model
from dragoman_agent.pal.plan import Plan
from dragoman_agent.pal.planner import Switches, plan_for
from dragoman_agent.pal.probe import profile_device

BATCHES = (1, 32, 256)
CONTEXT = 512  # at first
NUM_STEPS = 300
NUM_SAMPLES = 3  # as many parts of the steps, one behind the other, whose medians they are
PREDICTED_US = 85.0  # of submit at 1 (65 to 75) and at 256 (80 to 95): NOTES.md, "Host work a step"


def timed(owner: Any, name: str, into: dict[str, list[float]]) -> None:
    """Let `owner.name` note what each call takes."""
    whole: Callable[..., Any] = getattr(owner, name)

    def call(*arguments: Any) -> Any:
        begin = time.perf_counter()
        result = whole(*arguments)
        into.setdefault(name, []).append(time.perf_counter() - begin)
        return result

    setattr(owner, name, call)


def steps(plan: Plan, batch: int) -> Iterator[StepBatch]:
    """Decode steps one behind the other, as the engine makes them: what stays is the same array, and each sequence begins its pages in
    other steps than its neighbours.
    """
    size, one = np.int32(plan.page_size), np.int32(1)
    whole = decode_batch(plan, batch, CONTEXT + NUM_STEPS + 1)
    rows = np.arange(batch)
    positions = np.int32(CONTEXT - 1) - (rows % size).astype(np.int32)
    coming, tables = np.int32(-1) - rows.astype(np.int32), np.zeros((batch, 0), np.int32)
    for nth in range(NUM_STEPS + 1):
        width = int(positions.max() // size) + 1
        if nth == 0 or (positions % size == 0).any():
            is_used = np.arange(width) <= (positions // size)[:, None]
            tables = np.where(is_used, whole.block_tables[:, :width], np.int32(0))
        context_lens = positions + one
        yield replace(
            whole, step=nth, token_ids=coming if nth else whole.token_ids, positions=positions, context_lens=context_lens,
            slot_mapping=tables[rows, positions // size] * size + positions % size, block_tables=tables,
            sampling=replace(whole.sampling, cursors=positions),
        )  # fmt: skip
        positions = context_lens


def measure(device: CudaDevice, batch: int) -> dict[str, list[float]]:
    """Seconds of each part. Steps handed over one behind the other, as in service; the device is waited for outside of what is timed."""
    parts: dict[str, list[float]] = {}
    owners: tuple[tuple[Any, str], ...] = (
        (cuda, "check_batch"), (device, "_run"), (device, "_fill_decode"), (device._graphs, "replay"), (device, "_finish"),
    )  # fmt: skip
    kept = [(owner, name, owner.__dict__.get(name)) for owner, name in owners]
    for owner, name in owners:
        timed(owner, name, parts)
    first, *others = steps(device._plan, batch)
    for _ in range(NUM_STEPS):
        begin = time.perf_counter()
        device._queue(first, lambda: None)
        parts.setdefault("contexts", []).append(time.perf_counter() - begin)
    handles = [device.submit(first)]
    for step in others:
        begin = time.perf_counter()
        handles.append(device.submit(step))
        parts.setdefault("submit", []).append(time.perf_counter() - begin)
        begin = time.perf_counter()
        handles.pop(0).result()
        parts.setdefault("wait and result", []).append(time.perf_counter() - begin)
    handles.pop().result()
    for owner, name, whole in kept:
        if whole is None:
            delattr(owner, name)  # the method is there again
        else:
            setattr(owner, name, whole)
    return parts


def submit_result(model: str, batch: int, parts: dict[str, list[float]], *, early: bool) -> Result:
    """Microseconds of `submit`, with its parts in the note."""
    seconds = parts["submit"]
    size = -(-len(seconds) // NUM_SAMPLES)
    samples = [1e6 * statistics.median(seconds[at : at + size]) for at in range(0, len(seconds), size)]
    words = ", ".join(f"{name.strip('_')} {1e6 * statistics.median(own):.0f}" for name, own in parts.items())
    case = f"{model}-b{batch}{'-early' if early else ''}"
    note = f"kernels {'start early' if early else 'one after the other'}, medians in us: {words}"
    return result("submit", case, "microseconds", "us", samples, predicted=PREDICTED_US, note=note)


def _num_blocks(plan: Plan) -> int:
    """That the largest batch has in its last step."""
    return BATCHES[-1] * -(-(CONTEXT + NUM_STEPS + 1) // plan.page_size)


def main() -> None:
    """Every batch by both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="qwen3-0.6b")
    parser.add_argument("--out", type=Path, help="a JSON file for the raw results, written anew with each batch")
    options = parser.parse_args()
    source = open_model(f"random:{options.model}", Path())
    profile, _ = profile_device(usable_gpu(), CACHE)
    plan, _ = plan_for(profile, source.config, LIMITS, Switches())
    plan = replace(
        plan, graph_batch_sizes=BATCHES, mixed_graph_tokens=(), num_blocks=min(plan.num_blocks, 1 + _num_blocks(plan))
    )
    loaded = Loaded(source)
    results: list[Result] = []
    for early in (0, BATCHES[-1]):
        device = loaded.device(replace(plan, dependent_max_batch=early))
        for batch in BATCHES:
            one = submit_result(options.model, batch, measure(device, batch), early=bool(early))
            results.append(one)
            print(f"batch {batch}, {one['note']}", flush=True)
            keep(options.out, "", profile.device.index, results, command="python -m benchmarks.submit_gpu")
        device.close()


if __name__ == "__main__":
    main()
