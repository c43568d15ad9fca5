"""Embeddings on a GPU, through the engine core in this process: prompt tokens a second until the last vector is there.

python -m benchmarks.embed_gpu [MODEL] [--repeats N] [--out FILE]      MODEL: a random-weight model, qwen3-0.6b by default
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from pathlib import Path

from benchmarks.card import Result, keep
from benchmarks.gpu_setup import setup

from dragoman_agent.device.cuda import CudaDevice
from dragoman_agent.engine.core import EngineCore
from dragoman_agent.engine.local import build_core, run_all
from dragoman_agent.engine.messages import Embedded, StartEmbed, Step
from dragoman_agent.pal.plan import Plan

CASES = ((512, 128), (64, 512), (1, 128), (4, 8192))  # inputs, tokens of each


def predict(plan: Plan, num_inputs: int, length: int) -> float:
    """Tokens a second by the step model alone: the steps that the plan's chunk cuts all tokens into."""
    left, seconds = num_inputs * length, 0.0
    while left > 0:
        count = min(left, plan.max_batch_tokens)
        seconds += plan.step_model.prefill_seconds(count)
        left -= count
    return num_inputs * length / seconds


def embed(core: EngineCore, vocab_size: int, num_inputs: int, length: int, repeats: int) -> Result:
    """One warm-up and `repeats` samples, each of texts of its own: the prefix cache must not serve them."""
    samples, notes = [], []
    for repeat in range(repeats + 1):
        rng = random.Random(f"{num_inputs} {length} {repeat}")
        inputs = [
            StartEmbed(f"{repeat}/{i}", [rng.randrange(vocab_size) for _ in range(length)]) for i in range(num_inputs)
        ]
        steps: list[Step] = []
        begin = time.perf_counter()
        events = run_all(core, inputs, on_step=steps.append)
        seconds = time.perf_counter() - begin
        if sum(isinstance(event, Embedded) for event in events) != num_inputs:
            raise RuntimeError(f"not every input has a vector: {events[-1]}")
        if repeat:
            samples.append(num_inputs * length / seconds)
            device, host = (sum(getattr(s, name) for s in steps) for name in ("step_seconds", "host_seconds"))
            notes.append((seconds * 1e3, device * 1e3, host * 1e3, len(steps)))
    wall, device, host, frames = (statistics.median(column) for column in zip(*notes, strict=True))
    note = f"median wall {wall:.1f} ms, device {device:.1f} ms, host {host:.1f} ms in {frames:.0f} frames"
    return {
        "bench": "embed", "case": f"{num_inputs}x{length}", "metric": "tokens_per_second", "samples": samples, "note": note,
    }  # fmt: skip


def main() -> None:
    """Predict, run and print; `--out` gets the raw results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="qwen3-0.6b")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    here = setup(options.model)
    source, plan = here.source, here.plan
    predicted = {case: predict(plan, *case) for case in CASES}
    for (num_inputs, length), rate in predicted.items():
        print(f"  predicted {num_inputs} x {length}: {rate:.0f} tokens/s", flush=True)
    device = CudaDevice()
    device.load(source, plan, lambda _: None)
    core = build_core(device, source, plan)
    results: list[Result] = []
    for case in CASES:
        result = embed(core, source.config.vocab_size, *case, options.repeats)
        result["predicted"] = predicted[case]
        results.append(result)
        keep(options.out, options.model, here.profile.device.index, results, info=device.info)
        print(f"  {result['case']}: median {statistics.median(result['samples']):.0f} tokens/s; {result}", flush=True)  # type: ignore[arg-type]
    device.close()


if __name__ == "__main__":
    main()
