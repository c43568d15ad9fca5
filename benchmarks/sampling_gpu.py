"""What drawing the tokens of a step costs a GPU and its host beyond temperature: by our kernels, and by torch's operations.

python -m benchmarks.sampling_gpu [--batches 1,32,256] [--vocab 151936] [--kernels] [--out FILE]      a line a case; exit 1 where ids differ

Device: microseconds of a step's launches replayed as a graph, or for torch what its kernels take by the profiler. Host:
microseconds until a call returns, the device idle. `--kernels` adds the time of each kernel. FILE gets the raw results: a sample
is a median of several replays or calls, beside torch's as the peer.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.card import Result, keep, result, usable_gpu
from benchmarks.kernels_gpu import graph_seconds
from torch.profiler import ProfilerActivity, profile

from dragoman_agent.device.base import Penalties, SamplingBatch
from dragoman_agent.device.cuda_redraw import Redraw
from dragoman_agent.engine.host_sampler import HostSampler
from dragoman_agent.engine.philox import uniforms
from dragoman_agent.engine.sampler import sample
from dragoman_agent.engine.sampling_words import edited_rows, rows_to_draw
from dragoman_kernels.triton.edits import edit_rows
from dragoman_kernels.triton.filters import Drawn, draw_rows
from dragoman_kernels.triton.sampling import SamplingWorkspace, sample_rows

DEVICE = torch.device("cuda")
FLAT, PEAKED = 1.0, 6.0  # standard deviation of the logits
PROMPT, OUTPUT = 400, 200  # tokens that penalties look at
CASES: dict[str, tuple[float, dict[str, float]]] = {
    "plain": (FLAT, {}),
    "top-p, flat": (FLAT, {"top_p": 0.9}),
    "top-p, peaked": (PEAKED, {"top_p": 0.9}),
    "top-k 40, top-p": (FLAT, {"top_k": 40, "top_p": 0.95}),
    "min-p": (FLAT, {"min_p": 0.05}),
    "penalties": (FLAT, {}),
    "bias": (FLAT, {}),
    "mask": (FLAT, {}),
    "mask, top-p": (PEAKED, {"top_p": 0.9}),
}
# Microseconds on the device and of the host, where NOTES.md has them: "Sampling".
PREDICTED: dict[tuple[str, int], tuple[float, float | None]] = {
    ("top-p, flat", 32): (85.0, 130.0), ("top-p, peaked", 32): (55.0, 130.0), ("top-k 40, top-p", 32): (55.0, 130.0),
    ("min-p", 32): (18.0, 60.0), ("penalties", 32): (50.0, 330.0), ("bias", 32): (50.0, 330.0), ("mask", 32): (36.0, 260.0),
    ("top-p, flat", 256): (430.0, None), ("top-k 40, top-p", 256): (300.0, None),
}  # fmt: skip
NUM_SAMPLES = 3
NUM_COMPARED = 16  # rows of a case, with the host's sampler
MAX_DIFFERENT = 1  # of them: exp() is rounded otherwise on the host


def edits(name: str, num: int, vocab: int) -> dict[str, Any]:
    """The sparse parts of a case."""
    rng = np.random.default_rng(3)

    def ids(count: int) -> np.ndarray:
        return rng.integers(0, vocab, count, dtype=np.int32)

    if name == "penalties":
        return {"penalties": {row: Penalties(1.1, 0.1, 0.2, ids(PROMPT), ids(OUTPUT)) for row in range(num)}}
    if name == "bias":
        return {"logit_bias": {row: (ids(20), rng.normal(0, 5, 20).astype(np.float32)) for row in range(num)}}
    if name.startswith("mask"):
        masks = rng.integers(-(2**31), 2**31, (num, -(-vocab // 32)), dtype=np.int64).astype(np.int32)
        return {"masked_rows": np.arange(num, dtype=np.int32), "masks": masks}
    return {}


def batch_of(name: str, num: int, vocab: int) -> SamplingBatch:
    """The sampling of a case."""
    parameters = CASES[name][1]
    return SamplingBatch(
        temperatures=np.full(num, 0.8, np.float32),
        top_ks=np.full(num, parameters.get("top_k", 0), np.int32),
        top_ps=np.full(num, parameters.get("top_p", 1.0), np.float32),
        min_ps=np.full(num, parameters.get("min_p", 0.0), np.float32),
        seeds=np.arange(num, dtype=np.uint64),
        choices=np.zeros(num, np.int32),
        cursors=np.full(num, 7, np.int32),
        num_logprobs=np.full(num, -1, np.int32),
        **edits(name, num, vocab),
    )


def host_seconds(call: Callable[[], object], repeats: int = 9) -> float:
    """Median seconds until a call returns, nothing being queued before it."""
    seconds = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begun)
    torch.cuda.synchronize()
    return statistics.median(seconds)


def by_kernel(call: Callable[[], object]) -> dict[str, float]:
    """Seconds of each kernel of one call."""
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    found: dict[str, float] = defaultdict(float)
    for event in seen.events():
        found[event.name] += event.device_time * 1e-6
    return found


class Case:
    """One batch on the device, drawn in both ways."""

    def __init__(self, name: str, num: int, vocab: int) -> None:
        self.batch = batch_of(name, num, vocab)
        self.first = batch_of(name, min(num, NUM_COMPARED), vocab)  # the same rows
        generator = torch.Generator(DEVICE).manual_seed(num)
        self.logits = (torch.randn(num, vocab, device=DEVICE, generator=generator) * CASES[name][0]).bfloat16()
        drawn = uniforms(self.batch.seeds, self.batch.choices, self.batch.cursors)
        self.ids, self.finite = (torch.zeros(num, dtype=torch.int32, device=DEVICE) for _ in range(2))
        temperatures, numbers = (torch.from_numpy(part).to(DEVICE) for part in (self.batch.temperatures, drawn))
        self.drawn = Drawn(temperatures, numbers, self.ids, self.finite)
        self.workspace, self.redraw = SamplingWorkspace(num, vocab, DEVICE), Redraw(num, vocab, DEVICE)

    def plain(self) -> None:
        """What is in a step's graph already."""
        d = self.drawn
        sample_rows(self.logits, d.temperatures, d.uniforms, self.workspace, d.token_ids, d.finite)

    def draw(self) -> None:
        """By our kernels, as a step does."""
        self.redraw.draw(self.logits, self.batch, self.workspace, self.drawn)

    def launches(self) -> Callable[[], None]:
        """The kernels of `draw` alone."""
        sent, r = self.redraw._sent(self.batch), self.redraw

        def call() -> None:
            for words, on_device in sent:
                if words.num_edited:
                    edit_rows(
                        self.logits, on_device, words.base, words.num_edited, self.workspace, r._edits,
                        has_lists=words.has_lists,
                    )  # fmt: skip
                draw_rows(
                    self.logits, r._edits.logits, on_device, words.num_rows, self.workspace, r._filters, self.drawn,
                    has_filters=words.has_filters, has_random=words.has_random,
                )  # fmt: skip

        return call

    def torch_draw(self) -> torch.Tensor:
        """By torch's operations."""
        return sample(self.logits.float(), self.batch).token_ids

    def different(self) -> tuple[int, int]:
        """Of the ids that our kernels draw, those that torch and the host (of the first rows) draw otherwise."""
        self.plain()
        self.draw()
        ids = self.ids.cpu().numpy()
        by_torch = self.torch_draw().cpu().numpy()
        num = len(self.first.seeds)
        logits = self.logits[:num].float().cpu().numpy()
        by_host = HostSampler(logits.shape[1]).sample(logits, self.first).token_ids
        return int((ids != by_torch).sum()), int((ids[:num] != by_host).sum())


def look_at(name: str, num: int, vocab: int, *, with_kernels: bool) -> tuple[bool, list[Result]]:
    """Print a case; whether the ids agree, and the raw results."""
    case = Case(name, num, vocab)
    if not len(rows_to_draw(case.batch, edited_rows(case.batch))):
        plain = microseconds(lambda: graph_seconds(case.plain))
        print(f"batch {num:3} {name:16} device {statistics.median(plain):7.1f} us, in the step's graph", flush=True)
        return True, results_of(name, num, {"device": plain}, {}, "in the step's graph")
    by_torch, by_host = case.different()
    torch_us = {
        "device": 1e6 * sum(by_kernel(case.torch_draw).values()),
        "host": 1e6 * host_seconds(case.torch_draw, 3),
    }
    case.plain()
    launches = case.launches()
    device = microseconds(lambda: graph_seconds(launches))
    host = microseconds(lambda: host_seconds(case.draw))
    agrees = by_host <= MAX_DIFFERENT
    ids = f"ids: {by_torch} of {num} not torch's, {by_host} of {min(num, NUM_COMPARED)} not the host's"
    print(
        f"batch {num:3} {name:16} device {statistics.median(device):7.1f} us, host {statistics.median(host):6.0f} us; "
        f"torch {torch_us['device']:8.1f} us, {torch_us['host']:6.0f} us; {ids}{'' if agrees else ' OFF'}",
        flush=True,
    )
    if with_kernels:
        for kernel, seconds in by_kernel(launches).items():
            print(f"    {kernel.strip('_'):24} {seconds * 1e6:7.1f} us", flush=True)
    return agrees, results_of(name, num, {"device": device, "host": host}, torch_us, f"{vocab} logits a row; {ids}")


def microseconds(measure: Callable[[], float]) -> list[float]:
    """`NUM_SAMPLES` of what gives seconds."""
    return [1e6 * measure() for _ in range(NUM_SAMPLES)]


def results_of(name: str, num: int, samples: dict[str, list[float]], torch_us: dict[str, float], note: str) -> list[Result]:  # fmt: skip
    """Microseconds on the device and of the host, with torch's where they were measured."""
    case = f"{name.replace(',', '').replace(' ', '-')}-b{num}"
    predicted = dict(zip(("device", "host"), PREDICTED.get((name, num), (None, None)), strict=True))
    made = []
    for where, values in samples.items():
        peer = {"peer": {"name": f"torch-{torch.__version__}", "value": torch_us[where]}} if where in torch_us else {}
        one = result("sampling", case, f"{where}_microseconds", "us", values, predicted=predicted[where], note=note, **peer)  # fmt: skip
        made.append(one)
    return made


def main() -> int:
    """Every case of every batch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", default="1,32,256")
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--kernels", action="store_true", help="the time of each kernel too")
    parser.add_argument("--out", type=Path, help="a JSON file for the raw results, written anew with each case")
    options = parser.parse_args()
    usable_gpu()
    agree = True
    results: list[Result] = []
    with torch.inference_mode():
        for num in map(int, options.batches.split(",")):
            for name in CASES:
                agrees, found = look_at(name, num, options.vocab, with_kernels=options.kernels)
                agree &= agrees
                results += found
                keep(options.out, "", 0, results, command="python -m benchmarks.sampling_gpu")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
