"""The hardware layer on against `--pal off`, in one run: python -m benchmarks.ablation MODEL... [--out FOLDER]

Tokens a second and p99 of a token's time through the engine, batches of 1, 8, 64 and 256, prompts of 128 tokens. The two
take turns, so that a drift of the clocks meets both. Another card's profile, forced, is timed for comparison.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import statistics
import time
from pathlib import Path

from benchmarks.gpu_setup import LIMITS, Loaded, Result, Setup, environment, setup

from dragoman_agent.engine.core import EngineCore
from dragoman_agent.engine.local import build_core, run_all
from dragoman_agent.engine.messages import Sampling, Start, Step, Stop
from dragoman_agent.pal.forced import find_profile, take_forced
from dragoman_agent.pal.plan import Plan
from dragoman_agent.pal.planner import plan_for
from dragoman_agent.pal.switches import Switches

BATCHES = (1, 8, 64, 256)
PROMPT, OUTPUT = 128, 128
WRONG_CARD = "rtx4060-laptop"


def requests(batch: int, repeat: int) -> list[Start]:
    """Requests that run to their length."""
    rng = random.Random(repeat)
    stop = Stop(max_output_tokens=OUTPUT)
    return [
        Start(f"{repeat}-{i}", [rng.randrange(10_000) for _ in range(PROMPT)], Sampling(0.0), stop, credit=1 << 30)
        for i in range(batch)
    ]


def run(core: EngineCore, batch: int, repeat: int) -> tuple[float, float]:
    """(output tokens a second while no prompt is computed, p99 seconds between two frames of a step)."""
    frames: list[tuple[float, int]] = []

    def note(step: Step) -> None:
        if step.load.decode_tokens and not step.load.prefill_tokens:
            frames.append((time.perf_counter(), step.load.decode_tokens))

    run_all(core, requests(batch, repeat), on_step=note)
    most = max(tokens for _, tokens in frames)  # a plan may run fewer at once than are asked for
    full = [(at, tokens) for at, tokens in frames if tokens == most]
    gaps = sorted(b - a for (a, _), (b, _) in itertools.pairwise(full))
    return sum(tokens for _, tokens in full[1:]) / (full[-1][0] - full[0][0]), gaps[math.ceil(0.99 * len(gaps)) - 1]


def time_plan(loaded: Loaded, here: Setup, plan: Plan, repeats: int) -> dict[int, list[tuple[float, float]]]:
    """Both figures by batch."""
    device = loaded.device(plan)
    core = build_core(device, here.source, plan)
    found: dict[int, list[tuple[float, float]]] = {}
    for batch in BATCHES:
        run(core, batch, 10_000 + batch)
        found[batch] = [run(core, batch, repeat * 1000 + batch) for repeat in range(repeats)]
    device.close()
    return found


def wrong_card(here: Setup) -> Plan:
    """The plan that another card's profile gives, as `--profile-force` takes it: with this card's memory."""
    device = here.found
    profile, _ = take_forced(find_profile(WRONG_CARD), device.facts, device.fingerprint, device.values, force=True)
    return plan_for(profile, here.source.config, LIMITS, Switches())[0]


def main() -> None:
    """Print a line a cell; `--out` gets the raw results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    gains = []
    for name in options.models:
        print(f"== {name}", flush=True)
        here = setup(name)
        loaded = Loaded(here.source)
        plans = {"on": here.plan, "off": here.plan_with(Switches.off()), "wrong card": wrong_card(here)}
        found = {label: time_plan(loaded, here, plan, options.repeats) for label, plan in plans.items()}
        results: list[Result] = []
        for batch in BATCHES:
            on, off, wrong = (statistics.median(t for t, _ in found[label][batch]) for label in plans)
            tails = [statistics.median(p for _, p in found[label][batch]) for label in plans]
            samples = [a / b for (a, _), (b, _) in zip(found["on"][batch], found["off"][batch], strict=True)]
            gains.append(on / off)
            note = (
                f"on {on:.0f}, off {off:.0f}, profile of {WRONG_CARD} {wrong:.0f} tokens/s; p99 of a step "
                f"{1e3 * tails[0]:.2f}, {1e3 * tails[1]:.2f}, {1e3 * tails[2]:.2f} ms"
            )
            print(f"  b{batch}: {on / off:.3f} ({note})", flush=True)
            results.append(
                {"bench": "ablation", "case": f"b{batch}", "metric": "pal_on_over_off", "samples": samples,
                 "predicted": predicted_gain(here.plan, plans["off"], batch), "note": note}
            )  # fmt: skip
        if options.out:
            body = {"model": name, "device": here.profile.device.name, "results": results}
            body.update(environment(here.profile.device.index))
            (options.out / f"ablation-{name}.json").write_text(json.dumps(body, indent=1))
    print(f"geometric mean {math.exp(statistics.fmean(map(math.log, gains))):.3f}, least {min(gains):.3f}")


def predicted_gain(on: Plan, off: Plan, batch: int) -> float:
    """The gain that the step models predict."""
    context = PROMPT + OUTPUT / 2
    return off.step_model.decode_step_seconds(batch, context) / on.step_model.decode_step_seconds(batch, context)


if __name__ == "__main__":
    main()
