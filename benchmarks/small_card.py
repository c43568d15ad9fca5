"""A small card cut out of a large one: its own plan against the whole card's, on the small one.

    DRAGOMAN_SM_LIMIT=24 DRAGOMAN_MEMORY_LIMIT=8000000000 python -m benchmarks.small_card MODEL [--profile h200] [--out FOLDER]

Both plans get the small card's memory; decode steps and a chunk of prompts are timed on the device, tokens a second.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from dataclasses import replace
from pathlib import Path

from benchmarks.gpu_setup import CACHE, LIMITS, Loaded, Result, environment, step_seconds
from benchmarks.plan_quality import prefill_batch

from dragoman_agent.device.warm_up import decode_batch
from dragoman_agent.model.config import ModelConfig
from dragoman_agent.model.source import open_model
from dragoman_agent.pal.attributes import take_inventory
from dragoman_agent.pal.forced import find_profile, take_forced
from dragoman_agent.pal.plan import Plan
from dragoman_agent.pal.planner import plan_for
from dragoman_agent.pal.probe import profile_device
from dragoman_agent.pal.switches import Switches

CELLS = ((1, 256), (8, 512), (32, 512))
PROMPT_TOKENS = 4096


def rates(loaded: Loaded, model: ModelConfig, plan: Plan) -> dict[str, list[float]]:
    """Tokens a second by case, a sample a step."""
    device = loaded.device(replace(plan, max_batch_tokens=max(plan.max_batch_tokens, 512)))
    found = {}
    for batch, context in CELLS:
        seconds = step_seconds(device, decode_batch(plan, batch, context))
        found[f"decode-b{batch}-c{context}"] = [batch / second for second in seconds]
    chunk = min(plan.max_batch_tokens, PROMPT_TOKENS)
    steps = step_seconds(device, prefill_batch(plan, model, chunk), 5)
    found["prefill"] = [chunk / seconds for seconds in steps]
    device.close()
    return found


def main() -> None:
    """Print a line a case; `--out` gets the raw results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--profile", default="h200", help="of the whole card")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    source = open_model(f"random:{options.model}", Path())
    found = next(d for d in take_inventory().devices if d.facts.kind == "cuda")
    own, _ = profile_device(found, CACHE)
    whole, _ = take_forced(find_profile(options.profile), found.facts, found.fingerprint, found.values, force=True)
    # The whole card's plan believes in all of its multiprocessors. Neither has timed kernels.
    whole = replace(whole, values={k: v for k, v in whole.values.items() if k != "partition.multiprocessors"})
    plan, unchanged = (plan_for(profile, source.config, LIMITS, Switches())[0] for profile in (own, whole))
    for name in ("partition.multiprocessors", "memory.read_bandwidth", "compute.matmul_bfloat16", "memory.free"):
        print(
            f"  {name}: small {own.values[name].value}, whole {whole.values[name].value if name in whole.values else None}"
        )
    for field in dataclasses.fields(plan):
        if getattr(plan, field.name) != getattr(unchanged, field.name) and field.name not in ("memory", "step_model"):
            print(
                f"  {field.name}: own {str(getattr(plan, field.name))[:160]}, whole {str(getattr(unchanged, field.name))[:160]}"
            )
    loaded = Loaded(source)
    changed = rates(loaded, source.config, plan)
    kept = rates(loaded, source.config, unchanged)
    results: list[Result] = []
    for case, samples in changed.items():
        base = statistics.median(kept[case])
        gain = statistics.median(samples) / base
        note = f"own plan {statistics.median(samples):.0f}, whole card's plan {base:.0f} tokens/s"
        print(f"  {case}: {gain:.3f} ({note})", flush=True)
        results.append(
            {"bench": "small_card", "case": case, "metric": "own_plan_over_whole", "note": note, "predicted": 1.05,
             "samples": [sample / base for sample in samples]}
        )  # fmt: skip
    if options.out:
        body = {"model": options.model, "device": own.device.name, "results": results}
        body.update(environment(own.device.index))
        (options.out / f"small_card-{options.model}.json").write_text(json.dumps(body, indent=1))


if __name__ == "__main__":
    main()
