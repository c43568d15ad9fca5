"""The hardware layer's figures on a GPU: step model, ablation and plan quality of several models in one go.

    python -m benchmarks.pal_gpu MODEL... --out FOLDER [--only step_model,ablation,plan_quality]

The kernels of all models are timed together first. Results are written as they come: what a time limit cuts off is only the rest.
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
from benchmarks.plan_quality import plan_quality
from benchmarks.step_model import step_model


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
    options = parser.parse_args()
    only = options.only.split(",")
    begin = time.perf_counter()
    setups = tuned(options.models)
    (options.out / "timings.json").write_text(next(iter(setups.values())).timings.to_json())
    gains: list[float] = []
    weights = {name: Loaded(here.source) for name, here in setups.items()}
    for name, here in setups.items():
        print(f"== {name} after {time.perf_counter() - begin:.0f} s", flush=True)
        if "step_model" in only:
            device = weights[name].device(here.plan)
            save(options.out, "step_model", here, step_model(here, device))
            device.close()
        if "ablation" in only:
            results = ablation(here, weights[name])
            save(options.out, "ablation", here, results)
            gains += [statistics.median(result["samples"]) for result in results]  # type: ignore[arg-type]
    if gains:
        mean = math.exp(statistics.fmean(map(math.log, gains)))
        print(f"ablation: geometric mean of {len(gains)} cells {mean:.3f}, least {min(gains):.3f}", flush=True)
    for name, here in setups.items() if "plan_quality" in only else ():
        print(f"== {name} after {time.perf_counter() - begin:.0f} s", flush=True)
        save(options.out, "plan_quality", here, plan_quality(here, weights[name]))


if __name__ == "__main__":
    main()
