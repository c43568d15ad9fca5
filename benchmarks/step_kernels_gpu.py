"""Where a step's time goes on a GPU, kernel by kernel, as torch's profiler sees it.

python -m benchmarks.step_kernels_gpu MODEL [--steps prompt-8192,prompts-1024,...]      a table a step, longest kernels first
Times under the profiler are some percent longer than without it: the shares count, and what lies between kernels.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict

import torch
from benchmarks.gpu_setup import Loaded, setup
from benchmarks.plan_quality import prefill_batch
from torch.profiler import ProfilerActivity, profile

from dragoman_agent.device.base import StepBatch
from dragoman_agent.device.cuda import CudaDevice
from dragoman_agent.device.warm_up import decode_batch
from dragoman_agent.model.config import ModelConfig
from dragoman_agent.pal.plan import Plan

STEPS = ("prompt-8192", "prompts-512", "prompt-128", "prompt-512", "decode-1", "decode-256")
NUM_STEPS = 4
LINES = 14  # of a table


def step_named(name: str, plan: Plan, model: ModelConfig) -> StepBatch:
    """`prompt-N`: one prompt of N tokens, as many of them as a step may have; `prompts-N`: a full step of prompts of N tokens;
    `decode-N`: N sequences.
    """
    kind, number = name.split("-")
    if kind == "decode":
        return decode_batch(plan, int(number), 512)
    size, chunk = int(number), plan.max_batch_tokens
    return prefill_batch(plan, model, chunk if kind == "prompts" else min(size, chunk), min(size, chunk))


def kernels(device: CudaDevice, step: StepBatch) -> tuple[dict[str, list[float]], float]:
    """Microseconds of each call by kernel, over `NUM_STEPS` steps one behind the other, and the seconds of a step."""
    for _ in range(2):
        device.submit(step).result()
    seconds = []
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        handles = [device.submit(step) for _ in range(2)]
        for _ in range(NUM_STEPS - 2):
            seconds.append(handles.pop(0).result().seconds)
            handles.append(device.submit(step))
        seconds += [handle.result().seconds for handle in handles]
        torch.cuda.synchronize()
    found: dict[str, list[float]] = defaultdict(list)
    for event in seen.events():
        found[event.name].append(event.device_time)
    return found, statistics.median(seconds)


def main() -> None:
    """Every step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--steps", default=",".join(STEPS))
    options = parser.parse_args()
    here = setup(options.model)
    plan, loaded = here.plan, Loaded(here.source)
    device = loaded.device(plan)
    for name in options.steps.split(","):
        found, seconds = kernels(device, step_named(name, plan, here.source.config))
        total = sum(map(sum, found.values())) / NUM_STEPS
        print(f"{options.model} {name}: step {1e3 * seconds:.3f} ms, kernels {total / 1e3:.3f} ms", flush=True)
        for kernel, calls in sorted(found.items(), key=lambda each: -sum(each[1]))[:LINES]:
            mine = sum(calls) / NUM_STEPS
            print(
                f"  {mine / total:6.1%} {mine:9.1f} us in {len(calls) / NUM_STEPS:6.1f} calls of {statistics.median(calls):7.2f}  {kernel[:110]}",
                flush=True,
            )
    device.close()


if __name__ == "__main__":
    main()
