"""The hardware layer on against `--pal off`, in one run. Run by `benchmarks.pal_gpu`.

Tokens a second and p99 of a step through the engine, batches of 1, 8, 64 and 256, prompts of 128 tokens. Both plans are
loaded at once and take turns, so that a drift of the clocks meets both. Another card's profile, forced, is timed too.
"""

from __future__ import annotations

import gc
import itertools
import math
import random
import statistics
import time
from dataclasses import replace

from benchmarks.gpu_setup import Loaded, Result, Setup

from dragoman_agent.device.cuda import CudaDevice
from dragoman_agent.engine.core import EngineCore
from dragoman_agent.engine.local import build_core, run_all
from dragoman_agent.engine.messages import Sampling, Start, Step, Stop
from dragoman_agent.pal.forced import find_profile, take_forced
from dragoman_agent.pal.limits import PlanError
from dragoman_agent.pal.plan import Plan
from dragoman_agent.pal.planner import plan_for
from dragoman_agent.pal.switches import Switches

BATCHES = (1, 8, 64, 256)
PROMPT, OUTPUT = 128, 96
WRONG_CARD = "rtx4060-laptop"
KV_TOKENS = 160_000  # of each plan's arena: several are on the card at once


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
    full = [(at, tokens) for at, tokens in frames if 2 * tokens > most]
    gaps = sorted(b - a for (a, _), (b, _) in itertools.pairwise(full))
    return sum(tokens for _, tokens in full[1:]) / (full[-1][0] - full[0][0]), gaps[math.ceil(0.99 * len(gaps)) - 1]


def plans_of(here: Setup) -> dict[str, Plan]:
    """On, off, and what another card's profile gives as `--profile-force` takes it; each with a small arena."""
    plans = {"on": here.plan, "off": plan_for(here.profile, here.source.config, here.limits, Switches.off())[0]}
    device = here.found
    other, _ = take_forced(find_profile(WRONG_CARD), device.facts, device.fingerprint, device.values, force=True)
    try:
        plans[WRONG_CARD] = plan_for(other, here.source.config, here.limits, Switches())[0]
    except PlanError as error:
        print(f"  the profile of {WRONG_CARD} is refused: {str(error).split(':')[0]}")
    return {
        label: replace(plan, num_blocks=KV_TOKENS // plan.page_size + 1, max_context_tokens=4096)
        for label, plan in plans.items()
    }


def ablation(here: Setup, loaded: Loaded, repeats: int = 3) -> list[Result]:
    """A result a batch."""
    plans = plans_of(here)
    devices: dict[str, CudaDevice] = {label: loaded.device(plan) for label, plan in plans.items()}
    cores = {label: build_core(devices[label], here.source, plan) for label, plan in plans.items()}
    results: list[Result] = []
    for batch in BATCHES:
        found: dict[str, list[tuple[float, float]]] = {label: [] for label in plans}
        for repeat in range(repeats + 1):
            for label, core in cores.items():
                gc.collect()
                gc.freeze()  # as the engine process does once it has loaded
                figures = run(core, batch, repeat * 1000 + batch)
                if repeat:
                    found[label].append(figures)
        rates = {label: statistics.median(rate for rate, _ in found[label]) for label in plans}
        tails = {label: statistics.median(tail for _, tail in found[label]) for label in plans}
        note = "; ".join(f"{label} {rates[label]:.0f} tokens/s, p99 {1e3 * tails[label]:.2f} ms" for label in plans)
        print(f"  b{batch}: {rates['on'] / rates['off']:.3f} ({note})", flush=True)
        context = PROMPT + OUTPUT / 2
        off, on = (plans[label].step_model.decode_step_seconds(batch, context) for label in ("off", "on"))
        results.append(
            {"bench": "ablation", "case": f"b{batch}", "metric": "pal_on_over_off", "predicted": off / on, "note": note,
             "samples": [a / b for (a, _), (b, _) in zip(found["on"], found["off"], strict=True)]}
        )  # fmt: skip
    for device in devices.values():
        device.close()
    return results
