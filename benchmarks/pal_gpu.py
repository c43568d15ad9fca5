"""The hardware layer's figures on a GPU: step model, ablation, plan quality and another card's profile, several models in one go.

    python -m benchmarks.pal_gpu MODEL... --out FOLDER [--only step_model,ablation,plan_quality,wrong_profile] [--seconds 280]

The kernels of all models are compiled and timed together first; what that cost is recorded by shape (`selection`). Results are
written as they come; what would begin after --seconds is left out and named. A model's ablation takes fewer repeats where the
time is short, but never fewer than three of each cell.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import wrong_profile
from benchmarks.ablation import ablation
from benchmarks.card import Result, environment
from benchmarks.gpu_setup import Loaded, Setup, tuned
from benchmarks.plan_quality import attention_shapes, plan_quality
from benchmarks.selection import selection
from benchmarks.step_model import step_model

from dragoman_agent.pal.tuning import compile_kernels

PARTS = ("step_model", "ablation", "plan_quality", "wrong_profile")
_SECONDS = {"step_model": 8.0, "plan_quality": 45.0, "wrong_profile": 15.0}  # of a model, left for them by its ablation


def save(folder: Path, bench: str, here: Setup, results: Sequence[Result]) -> None:
    """The raw results of one bench and model, for `benchmarks.record_gpu`."""
    body: dict[str, Any] = {
        "model": here.source.config.name,
        "device": here.profile.device.name,
        "results": list(results),
    }
    body.update(environment(here.profile.device.index))
    (folder / f"{bench}-{here.source.config.name}.json").write_text(json.dumps(body, indent=1))


class Run:
    """One run of the chosen parts: its folder, its time, and what it says."""

    def __init__(self, folder: Path, parts: Sequence[str], seconds: float) -> None:
        """`seconds`: from now; nothing begins after it."""
        self._folder = folder
        self._parts = parts
        self._begin = time.monotonic()
        self.deadline = self._begin + seconds
        self.has_failed = False

    def has(self, part: str) -> bool:
        """Whether a part is to be run, and there is time to begin it."""
        if part not in self._parts:
            return False
        if time.monotonic() < self.deadline:
            return True
        self.say(f"{part} left out, no time is left,")
        return False

    def say(self, text: str) -> None:
        """A line with the time."""
        print(f"== {text} after {time.monotonic() - self._begin:.0f} s", flush=True)

    def attempt(self, text: str, work: Callable[[], Sequence[Result]]) -> Sequence[Result]:
        """A part of a model. What it raises is told and costs no other part."""
        self.say(text)
        try:
            return work()
        except Exception as error:  # a device, a compiler or a plan: the other parts are worth their time
            self.has_failed = True
            self.say(f"FAILED: {text}: {type(error).__name__}: {error}")
            return []

    def keeper(self, bench: str, here: Setup) -> Callable[[Sequence[Result]], None]:
        """What takes the results of one bench and model so far."""
        return lambda results: save(self._folder, bench, here, results)

    def share_until(self, num_models: int) -> float:
        """When the first of `num_models` should be done with its ablation, so that the parts of all have their time."""
        others = num_models * sum(_SECONDS.get(part, 0.0) for part in self._parts)
        return time.monotonic() + max(self.deadline - time.monotonic() - others, 0.0) / num_models


def main() -> int:
    """Run and print; 1 when a part failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--seconds", type=float, default=280.0, help="nothing begins after it")
    options = parser.parse_args()
    parts = options.only.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    options.out.mkdir(parents=True, exist_ok=True)
    run = Run(options.out, parts, options.seconds)
    measure(run, options.models, options.out)
    return 1 if run.has_failed else 0


def measure(run: Run, models: Sequence[str], out: Path) -> None:
    """Every part of every model."""
    setups = tuned(models)
    first = next(iter(setups.values()))
    (out / "timings.json").write_text(first.timings.to_json())
    run.say("kernels timed")
    configs = [here.source.config for here in setups.values()]
    for here in setups.values():
        run.keeper("selection", here)(selection(here, configs))
    weights = {name: Loaded(here.source) for name, here in setups.items()}
    gains: list[float] = []
    for number, (name, here) in enumerate(setups.items()):
        if run.has("step_model"):
            run.attempt(f"step model of {name}", partial(steps, run, here, weights[name]))
        if run.has("ablation"):
            until, keep = run.share_until(len(setups) - number), run.keeper("ablation", here)
            results = run.attempt(
                f"ablation of {name}", partial(ablation, here, weights[name], run.deadline, until, keep)
            )
            gains += [statistics.median(r["samples"]) for r in results if r["metric"] == "pal_on_over_off"]  # type: ignore[arg-type]
    if gains:
        mean = math.exp(statistics.fmean(map(math.log, gains)))
        run.say(f"ablation: geometric mean of {len(gains)} cells {mean:.3f}, least {min(gains):.3f},")
    for name in (name for name in setups if name in wrong_profile.MODELS):
        if run.has("wrong_profile"):
            work = partial(wrong_profile.wrong_profile, setups[name], weights[name])
            results = run.attempt(f"another card's profile on {name}", work)
            run.keeper("wrong_profile", setups[name])(results)
    if run.has("plan_quality"):
        compile_kernels([case for here in setups.values() for shape in attention_shapes(here) for case in shape.cases], first.plan.device_index)  # fmt: skip
        for name, here in setups.items():
            keep = run.keeper("plan_quality", here)
            run.attempt(f"plan quality of {name}", partial(plan_quality, here, weights[name], run.deadline, keep))
    run.say("done")


def steps(run: Run, here: Setup, loaded: Loaded) -> list[Result]:
    """The step model beside a device that runs the plan."""
    device = loaded.device(here.plan)
    try:
        results = step_model(here, device)
    finally:
        device.close()
    run.keeper("step_model", here)(results)
    return results


if __name__ == "__main__":
    sys.exit(main())
