"""A small card cut out of a large one: its own plan against the whole card's, on the small one.

    DRAGOMAN_SM_LIMIT=24 DRAGOMAN_MEMORY_LIMIT=8000000000 python -m benchmarks.small_card MODEL [--profile h200]
        [--whole-timings OUT/timings.json] [--out FOLDER]

Each plan is made as its card would make it: from its own profile and from kernels timed on it (--whole-timings, as
`benchmarks.pal_gpu` writes them). Both get the same small arena, are loaded at once and take turns; decode steps and a chunk of
prompts are timed on the device, tokens a second.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.card import Result, keep
from benchmarks.gpu_setup import LIMITS, Loaded, Setup, step_seconds, tuned
from benchmarks.plan_quality import prefill_batch

from dragoman_agent.device.base import StepBatch
from dragoman_agent.device.cuda import CudaDevice
from dragoman_agent.device.warm_up import decode_batch
from dragoman_agent.pal.forced import find_profile, take_forced
from dragoman_agent.pal.plan import DecodeAttention, Plan
from dragoman_agent.pal.planner import plan_for
from dragoman_agent.pal.switches import Switches
from dragoman_agent.pal.timings import Timings

CELLS = ((1, 256), (8, 512), (32, 512))
PROMPT_TOKENS = 4096
KV_TOKENS = 20_000  # of each plan's arena: 32 x 512 and both plans at once in 8 GB
TURNS = 4


def whole_plan(here: Setup, profile: str, timings: Path | None) -> Plan:
    """What the whole card's profile plans, forced as `--profile-force` does, with what was timed on the whole card."""
    found = here.found
    whole, _ = take_forced(find_profile(profile), found.facts, found.fingerprint, found.values, force=True)
    # The whole card's plan believes in all of its multiprocessors.
    whole = replace(whole, values={k: v for k, v in whole.values.items() if k != "partition.multiprocessors"})
    held = None
    if timings is not None:
        taken = Timings.from_json(timings.read_text(encoding="utf-8"), str(timings))
        held = replace(taken, fingerprint=whole.fingerprint)  # of that very card, not of the shipped profile's
    return plan_for(whole, here.source.config, LIMITS, Switches(), held)[0]


def changed_fields(own: Plan, whole: Plan) -> dict[str, tuple[object, object]]:
    """What the two plans have otherwise: (own, whole) by field, without what follows from the rest."""
    pairs = {field.name: (getattr(own, field.name), getattr(whole, field.name)) for field in dataclasses.fields(own)}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1] and name not in ("memory", "step_model")}


def show(here: Setup, whole: Plan) -> None:
    """What the small card measured and what its plan changes."""
    for name in ("partition.multiprocessors", "memory.read_bandwidth", "compute.matmul_bfloat16", "memory.free"):
        print(f"  {name}: {here.profile.values[name].value}")
    for name, (own, other) in changed_fields(here.plan, whole).items():
        print(f"  {name}: own {str(own)[:160]}, whole {str(other)[:160]}")


def plan_result(here: Setup, whole: Plan, profile: str) -> Result:
    """How many fields of the plan the small card changes: as timed on both, as predicted from both profiles, and against the plan
    of the whole card where nothing bounds it.
    """
    predicted = changed_fields(here.untuned, whole_plan(here, profile, None))
    there = changed_fields(
        here.plan, plan_for(find_profile(profile).profile, here.source.config, LIMITS, Switches())[0]
    )
    timed = changed_fields(here.plan, whole)
    words = [f"{name} {_short(own)} for {_short(other)}" for name, (own, other) in timed.items()]
    seen = ", ".join(
        f"{name} {float(here.profile.number(name)):.4g}"
        for name in ("partition.multiprocessors", "memory.free", "memory.read_bandwidth")
        if name in here.profile.values
    )
    return {
        "bench": "small_card", "case": "plan", "metric": "changed_fields", "predicted": None,
        "samples": [float(len(each)) for each in (timed, predicted, there)],
        "note": f"the small card ({seen}) plans {'; '.join(words) or 'the same'}",
    }  # fmt: skip


def _short(value: object) -> str:
    """A field's value in few letters: of launches by batch how many parts each has."""
    if isinstance(value, tuple) and all(isinstance(one, DecodeAttention) for one in value):
        return f"parts {[one.num_splits for one in value]}"
    text = str(value)
    return text if len(text) <= 50 else f"{text[:47]}..."


def rates(
    loaded: Loaded, here: Setup, plans: dict[str, Plan], *, in_graphs: bool = False
) -> Iterator[dict[str, dict[str, list[float]]]]:
    """Tokens a second by case and plan, after each turn: a sample a turn, every second one goes backwards.

    Prompts are computed in steps of at most `PROMPT_TOKENS`, kernel by kernel; `in_graphs`: in each plan's own full steps, in a
    graph where it has one.
    """
    small = {
        label: replace(
            plan,
            num_blocks=KV_TOKENS // plan.page_size + 1,
            max_context_tokens=4096,
            mixed_graph_tokens=(),
            chunk_graph=in_graphs and plan.chunk_graph,
        )
        for label, plan in plans.items()
    }
    most = KV_TOKENS if in_graphs else PROMPT_TOKENS
    devices: dict[str, CudaDevice] = {}
    found: dict[str, dict[str, list[float]]] = {}

    def time(case: str, label: str, tokens: int, batch: StepBatch, steps: int) -> None:
        seconds = statistics.median(step_seconds(devices[label], batch, steps))
        found.setdefault(case, {name: [] for name in plans})[label].append(tokens / seconds)

    try:
        for label, plan in small.items():
            devices[label] = loaded.device(plan)
        for turn in range(TURNS):
            for label in list(plans)[::-1] if turn % 2 else plans:
                for batch, context in CELLS:
                    step = decode_batch(small[label], batch, context)
                    time(f"decode-b{batch}-c{context}", label, batch, step, 8)
                chunk = min(small[label].max_batch_tokens, most)
                time("prefill", label, chunk, prefill_batch(small[label], here.source.config, chunk), 4)
            yield found
    finally:
        for device in devices.values():
            device.close()


def results_of(found: dict[str, dict[str, list[float]]]) -> list[Result]:
    """The small card's own plan over the whole card's, by case."""
    results: list[Result] = []
    for case, by_plan in found.items():
        own, base = (statistics.median(by_plan[label]) for label in ("own", "whole"))
        results.append(
            {"bench": "small_card", "case": case, "metric": "own_plan_over_whole", "predicted": 1.05,
             "note": f"{own / base:.3f}: own plan {own:.0f}, whole card's plan {base:.0f} tokens/s",
             "samples": [a / b for a, b in zip(by_plan["own"], by_plan["whole"], strict=True)]}
        )  # fmt: skip
    return results


def main() -> None:
    """Print a line a case; `--out` gets the raw results, anew with each turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--profile", default="h200", help="of the whole card")
    parser.add_argument("--whole-timings", type=Path, help="kernels as timed on the whole card")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    here = tuned([options.model])[options.model]
    whole = whole_plan(here, options.profile, options.whole_timings)
    show(here, whole)
    path = None if options.out is None else options.out / f"small_card-{options.model}.json"
    plan_changed = plan_result(here, whole, options.profile)
    results = [plan_changed]
    keep(path, options.model, here.profile.device.index, results)
    for found in rates(Loaded(here.source), here, {"own": here.plan, "whole": whole}):
        results = [plan_changed, *results_of(found)]
        keep(path, options.model, here.profile.device.index, results)
    for result in results:
        print(f"  {result['case']}: {result['note']}", flush=True)


if __name__ == "__main__":
    main()
