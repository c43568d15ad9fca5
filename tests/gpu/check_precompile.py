"""Kernels compiled ahead are all that a start and its first requests need: Triton compiles nothing on the device's way.

python tests/gpu/check_precompile.py [qwen3-0.6b]      prints a line a check; exit 1 when one is off
"""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MODEL = sys.argv[1] if len(sys.argv) > 1 else "qwen3-0.6b"
MAX_AHEAD_SECONDS = 20.0  # beside other checks; alone a few seconds


def plans(model: Any) -> tuple[dict[str, Any], str]:
    """The plan from the profile alone, one with every product of few rows our own and dependent launch, one that keeps K and V in
    eight bits, whose scales are found over sixteen; the capability.
    """
    from benchmarks.card import usable_gpu

    from dragoman_agent.pal.plan import GemmDecode
    from dragoman_agent.pal.planner import Limits, Switches, plan_for
    from dragoman_agent.pal.probe import profile_device
    from dragoman_agent.pal.step_cost import matrices
    from dragoman_kernels.triton.launches import GEMM_LAUNCHES

    found = usable_gpu()
    profile, _ = profile_device(found, Path("/tmp/dragoman-check"))
    limits = Limits(max_context_tokens=4096, max_num_seqs=32, memory_utilization=0.15)
    plan, _ = plan_for(profile, model, limits, Switches())
    few = tuple(
        GemmDecode(n, k, rows, **dataclasses.asdict(GEMM_LAUNCHES[0]))
        for n, k in dict.fromkeys((*matrices(model), (model.vocab_size, model.hidden_size)))
        for rows in (8, 32)
    )
    narrow, _ = plan_for(profile, model, dataclasses.replace(limits, kv_dtype="fp8"), Switches())
    made = {
        "planned": plan, "few rows": dataclasses.replace(plan, gemm_decode=few, dependent_max_batch=8), "eight bits": narrow,
    }  # fmt: skip
    return made, str(found.values["compute.capability"].value)


def serve(source: Any, plan: Any) -> None:
    """Load, then prompts and decode of several sizes beside each other, sampled and greedy."""
    from dragoman_agent.device.cuda import CudaDevice
    from dragoman_agent.engine.local import build_core, run_all
    from dragoman_agent.engine.messages import Failed, Sampling, Start, Stop

    device = CudaDevice()
    device.load(source, plan, lambda _: None)
    core = build_core(device, source, plan)
    for count in (1, 3, 32):
        starts = [
            Start(f"{count}-{i}", list(range(1, 3 + 40 * i)), Sampling(temperature=0.5 * (i % 3), seed=i),
                  Stop(max_output_tokens=12), credit=1 << 20)
            for i in range(count)
        ]  # fmt: skip
        failed = [event for event in run_all(core, starts) if isinstance(event, Failed)]
        assert not failed, failed[0].message
    device.close()


def main() -> int:
    """Compile ahead into an empty cache, then count what the device still compiles."""
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        from dragoman_agent.device.precompile import start_compilers
        from dragoman_agent.model.source import open_model

        source = open_model(f"random:{MODEL}", Path())
        variants, capability = plans(source.config)
        for label, plan in variants.items():
            begin = time.monotonic()
            start_compilers(source.config, plan, capability).wait()
            seconds = time.monotonic() - begin
            bad += report(f"{label}: compiled ahead in {seconds:.1f} s", seconds <= MAX_AHEAD_SECONDS)
            misses, built = counted(lambda plan=plan: serve(source, plan))
            bad += report(
                f"{label}: {len(misses)} kernels compiled on the device's way {sorted(set(misses))}", not misses
            )
            bad += report(f"{label}: {len(built)} launchers built on the device's way {built}", not built)
    return 1 if bad else 0


def counted(work: Any) -> tuple[list[str], list[str]]:
    """Names of the kernels that Triton did not find in its cache, and of the C functions it built, during `work`."""
    import triton.runtime.build as build
    from triton import knobs

    misses: list[str] = []
    built: list[str] = []
    real = build._build

    def listen(src: Any, *, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            misses.append(src.name)

    def note(name: str, *arguments: Any, **options: Any) -> Any:
        built.append(name)
        return real(name, *arguments, **options)

    knobs.compilation.listener, build._build = listen, note
    try:
        work()
    finally:
        knobs.compilation.listener, build._build = None, real
    return misses, built


def report(text: str, good: bool) -> int:
    """1 when it is off."""
    print(f"{'ok' if good else 'OFF'} {text}", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
