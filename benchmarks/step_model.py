"""Predicted beside measured device time of decode steps. Run by `benchmarks.pal_gpu`."""

from __future__ import annotations

from benchmarks.card import Result
from benchmarks.gpu_setup import Setup, step_seconds

from dragoman_agent.device.cuda import CudaDevice
from dragoman_agent.device.warm_up import decode_batch
from dragoman_agent.pal.planner import plan_for
from dragoman_agent.pal.switches import Switches

BATCHES = (1, 8, 64, 256)
CONTEXTS = (256, 1024, 4096)  # the device times itself at others when it loads, see device/warm_up.py


def step_model(here: Setup, device: CudaDevice) -> list[Result]:
    """A result a cell; cells that do not fit are named and left out."""
    timings = here.timings.with_seconds(here.step_keys(device))
    known = plan_for(here.profile, here.source.config, here.limits, Switches(), timings)[0].step_model
    results: list[Result] = []
    for batch in BATCHES:
        for context in CONTEXTS:
            case = f"b{batch}-c{context}"
            try:
                step = decode_batch(here.plan, batch, context)
            except ValueError as error:
                print(f"  {case}: left out, {error}")
                continue
            measured = step_seconds(device, step)
            middle = sorted(measured)[len(measured) // 2]
            predicted = known.decode_step_seconds(batch, context)
            kernels, alone = (
                plan.step_model.decode_step_seconds(batch, context) / middle for plan in (here.plan, here.untuned)
            )
            note = f"measured {1e3 * middle:.3f} ms; from timed kernels alone {kernels:.3f}, from the profile alone {alone:.3f}"
            print(f"  {case}: {predicted / middle:.3f} ({note})", flush=True)
            results.append(
                {"bench": "step_model", "case": case, "metric": "predicted_over_measured", "predicted": 1.0, "note": note,
                 "samples": [predicted / seconds for seconds in measured]}
            )  # fmt: skip
    return results
