"""Predicted beside measured device time of decode steps: python -m benchmarks.step_model MODEL... [--out FOLDER]"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks.gpu_setup import Loaded, Result, decode_batch, environment, setup, step_seconds

BATCHES = (1, 8, 64, 256)
CONTEXTS = (256, 1024, 4096)


def main() -> None:
    """Print a line a cell; `--out` gets the raw results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    for name in options.models:
        print(f"== {name}", flush=True)
        here = setup(name)
        device = Loaded(here.source).device(here.plan)
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
                predicted = here.plan.step_model.decode_step_seconds(batch, context)
                alone = here.untuned.step_model.decode_step_seconds(batch, context)
                ratios = [predicted / seconds for seconds in measured]
                middle = sorted(measured)[len(measured) // 2]
                note = f"measured {1e3 * middle:.3f} ms; from the profile alone {alone / middle:.3f}"
                print(f"  {case}: {predicted / middle:.3f} ({note})", flush=True)
                results.append(
                    {
                        "bench": "step_model", "case": case, "metric": "predicted_over_measured", "samples": ratios,
                        "predicted": 1.0, "note": note,
                    }
                )  # fmt: skip
        device.close()
        if options.out:
            body = {"model": name, "device": here.profile.device.name, "results": results}
            body.update(environment(here.profile.device.index))
            (options.out / f"step_model-{name}.json").write_text(json.dumps(body, indent=1))


if __name__ == "__main__":
    main()
