"""What a warm start does between the import of PyTorch and the first step, function by function, on a GPU.

    python -m benchmarks.start_profile_gpu [MODEL] [--lines 45]

Three processes load the model one after another: the first fills the caches, the second tells how long each phase takes, the third
runs under Python's profiler, which makes all of it slower. For whoever wants to know where the time of `start_gpu` goes.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.card import usable_gpu

CACHE = Path("/tmp/dragoman-check")
HOW = ("fill", "phases", "profile")


def load(model: str, how: str, num_lines: int) -> None:
    """Load as an engine does that leaves graphs for later; print what `how` says."""
    from dragoman_agent.device.base import LoadProgress
    from dragoman_agent.device.cuda_context import open_context
    from dragoman_agent.engine.native import TorchLibraries
    from dragoman_agent.model.source import open_model
    from dragoman_agent.pal.planner import Limits, Switches, plan_for
    from dragoman_agent.pal.probe import profile_device

    begun = last = time.perf_counter()

    def told(what: str) -> None:
        nonlocal last
        now = time.perf_counter()
        if how == "phases":
            print(f"  {now - begun:6.3f} s  +{now - last:.3f}  {what}", flush=True)
        last = now

    def report(progress: LoadProgress) -> None:
        if progress.unit == "steps":
            told(f"before {progress.phase} {progress.done} of {progress.total}")

    profile, _ = profile_device(usable_gpu(), CACHE)
    source = open_model(f"random:{model}", CACHE)
    plan, _ = plan_for(profile, source.config, Limits(max_context_tokens=8192), Switches())
    told("plan")
    libraries = TorchLibraries(note=told)
    libraries.wait()
    open_context(plan.device_index)
    told("context")
    from dragoman_agent.device.cuda import CudaDevice
    from dragoman_agent.engine.ahead import DeviceImport

    told("PyTorch and the device's modules")
    library = DeviceImport("cuda", libraries, told)
    library.wait()
    library.wait_for_launches()
    gc.freeze()
    device = CudaDevice(plan.device_index)
    device.prepares_later = True
    told("look-ups")
    profiler = cProfile.Profile() if how == "profile" else None
    if profiler is not None:
        profiler.enable()
    device.load(source, plan, report)
    if profiler is not None:
        profiler.disable()
        pstats.Stats(profiler).sort_stats("cumulative").print_stats(num_lines)
    told("the end")
    device.close()


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="qwen3-0.6b")
    parser.add_argument("--lines", type=int, default=45, help="of the profile")
    parser.add_argument("--how", choices=HOW, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.how is not None:
        load(options.model, options.how, options.lines)
        return
    for how in HOW:
        print(f"== {how}", flush=True)
        command = [sys.executable, "-m", "benchmarks.start_profile_gpu", options.model, "--lines", str(options.lines)]
        if code := subprocess.run([*command, "--how", how], check=False).returncode:
            sys.exit(code)


if __name__ == "__main__":
    main()
