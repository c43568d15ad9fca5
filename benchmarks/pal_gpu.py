"""The hardware layer's figures on a GPU: step model, ablation and plan quality of several models in one go.

    python -m benchmarks.pal_gpu MODEL... --out FOLDER [--only step_model,ablation,plan_quality] [--seconds 280]

The kernels of all models are compiled and timed together first. Results are written as they come; what would begin after
--seconds is left out and named.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.ablation import ablation
from benchmarks.gpu_setup import Loaded, Result, Setup, environment, tuned
from benchmarks.plan_quality import attention_shapes, plan_quality
from benchmarks.step_model import step_model

from dragoman_agent.pal.tuning import compile_kernels


def save(folder: Path, bench: str, here: Setup, results: list[Result]) -> None:
    """The raw results of one bench and model, for `benchmarks.record_gpu`."""
    body: dict[str, Any] = {"model": here.source.config.name, "device": here.profile.device.name, "results": results}
    body.update(environment(here.profile.device.index))
    (folder / f"{bench}-{here.source.config.name}.json").write_text(json.dumps(body, indent=1))


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="step_model,ablation,plan_quality")
    parser.add_argument("--seconds", type=float, default=280.0, help="nothing begins after it")
    options = parser.parse_args()
    only = options.only.split(",")
    options.out.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    deadline = begin + options.seconds

    def say(text: str) -> None:
        print(f"== {text} after {time.monotonic() - begin:.0f} s", flush=True)

    setups = tuned(options.models)
    first = next(iter(setups.values()))
    (options.out / "timings.json").write_text(first.timings.to_json())
    say("kernels timed")
    weights = {name: Loaded(here.source) for name, here in setups.items()}
    gains: list[float] = []
    for name, here in setups.items():
        if "step_model" in only and time.monotonic() < deadline:
            device = weights[name].device(here.plan)
            save(options.out, "step_model", here, step_model(here, device))
            device.close()
        if "ablation" in only:
            say(f"ablation of {name}")
            results = ablation(here, weights[name], deadline)
            save(options.out, "ablation", here, results)
            gains += [statistics.median(r["samples"]) for r in results if r["metric"] == "pal_on_over_off"]  # type: ignore[arg-type]
    if gains:
        mean = math.exp(statistics.fmean(map(math.log, gains)))
        say(f"ablation: geometric mean of {len(gains)} cells {mean:.3f}, least {min(gains):.3f},")
    if "plan_quality" in only and time.monotonic() < deadline:
        compile_kernels([case for here in setups.values() for shape in attention_shapes(here) for case in shape.cases], first.plan.device_index)  # fmt: skip
        for name, here in setups.items():
            say(f"plan quality of {name}")
            save(options.out, "plan_quality", here, plan_quality(here, weights[name], deadline))
    say("done")


if __name__ == "__main__":
    main()
