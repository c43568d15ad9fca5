"""The hardware layer on against `--pal off`, in one run. Run by `benchmarks.pal_gpu`.

Tokens a second, p50 and p99 of a step through the engine, batches of 1, 8, 64 and 256, prompts of 128 tokens. The plans are loaded
at once and take turns in an order that changes each time, so that a drift of the clocks and what ran before meets all alike.
Another card's profile, forced, is one of them.
"""

from __future__ import annotations

import gc
import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.card import Result
from benchmarks.gpu_setup import Loaded, Setup

from dragoman_agent.device.cuda import CudaDevice
from dragoman_agent.device.precompile import start_compilers
from dragoman_agent.engine.core import EngineCore
from dragoman_agent.engine.local import build_core, run_all
from dragoman_agent.engine.messages import Sampling, Start, Step, Stop
from dragoman_agent.pal.forced import find_profile, take_forced
from dragoman_agent.pal.limits import PlanError
from dragoman_agent.pal.plan import Plan
from dragoman_agent.pal.planner import plan_for
from dragoman_agent.pal.switches import Switches

BATCHES = (1, 8, 64, 256)
PROMPT = 128
OUTPUT = {1: 256, 8: 192, 64: 128, 256: 96}  # enough steps for a p99
MIN_REPEATS, MAX_REPEATS, BATCH_SECONDS = 3, 9, 9.0  # short steps scatter more and are repeated more often
WRONG_CARD = "rtx4060-laptop"
KV_TOKENS = 80_000  # of each plan's arena: three are on the card at once, and 256 sequences take 57,344


@dataclass(frozen=True, slots=True)
class Run:
    """One repeat of one plan."""

    tokens_per_second: float
    p50: float  # seconds between two steps' tokens
    p99: float


def requests(batch: int, repeat: int) -> list[Start]:
    """Requests that run to their length."""
    rng = random.Random(repeat)
    stop = Stop(max_output_tokens=OUTPUT[batch])
    return [
        Start(f"{repeat}-{i}", [rng.randrange(10_000) for _ in range(PROMPT)], Sampling(0.0), stop, credit=1 << 30)
        for i in range(batch)
    ]


def run(core: EngineCore, batch: int, repeat: int) -> Run:
    """The steps in which no prompt is computed."""
    frames: list[tuple[float, int]] = []

    def note(step: Step) -> None:
        if step.load.decode_tokens and not step.load.prefill_tokens:
            frames.append((time.perf_counter(), step.load.decode_tokens))

    run_all(core, requests(batch, repeat), on_step=note)
    return judge(frames)


def judge(frames: Sequence[tuple[float, int]]) -> Run:
    """(moment, tokens) of each step to what is compared: the steps that are at least half as full as the fullest."""
    most = max(tokens for _, tokens in frames)  # a plan may run fewer at once than are asked for
    full = [(at, tokens) for at, tokens in frames if 2 * tokens > most]
    gaps = sorted(b - a for (a, _), (b, _) in itertools.pairwise(full))
    rate = sum(tokens for _, tokens in full[1:]) / (full[-1][0] - full[0][0])
    return Run(rate, statistics.median(gaps), gaps[math.ceil(0.99 * len(gaps)) - 1])


def order_of(labels: Sequence[str], repeat: int) -> list[str]:
    """Who runs when: each repeat begins with another, and every second goes backwards."""
    turned = [*labels[repeat % len(labels) :], *labels[: repeat % len(labels)]]
    return turned[::-1] if repeat % 2 else turned


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


def ablation(
    here: Setup,
    loaded: Loaded,
    deadline: float = math.inf,
    until: float = math.inf,
    keep: Callable[[Sequence[Result]], None] = lambda _: None,
) -> list[Result]:
    """Results of each batch; of those before `deadline` (time.monotonic). `keep` gets them after each.

    `until` is this model's part of the time: it takes from the repeats above `MIN_REPEATS`, never from the batches.
    """
    plans = plans_of(here)
    devices: dict[str, CudaDevice] = {}
    results: list[Result] = []
    capability = str(here.found.values["compute.capability"].value)
    for label in plans.keys() - {"on"}:  # whose kernels tuning has compiled
        start_compilers(here.source.config, plans[label], capability).wait()
    try:
        for label, plan in plans.items():
            devices[label] = loaded.device(plan)
        cores = {label: build_core(devices[label], here.source, plan) for label, plan in plans.items()}
        for number, batch in enumerate(BATCHES):
            if time.monotonic() > deadline:
                print(f"  b{batch}: left out, no time is left", flush=True)
                continue
            share = (until - time.monotonic()) / (len(BATCHES) - number)
            results += results_of(batch, plans, measure(cores, batch, min(BATCH_SECONDS, share)))
            keep(results)
    finally:
        for device in devices.values():
            device.close()
    return results


def measure(cores: Mapping[str, EngineCore], batch: int, seconds: float = BATCH_SECONDS) -> dict[str, list[Run]]:
    """Repeats by plan, the first of each not counted: `MIN_REPEATS`, and as many more as `seconds` have room for."""
    found: dict[str, list[Run]] = {label: [] for label in cores}
    end = time.monotonic() + seconds
    for repeat in range(MAX_REPEATS + 1):
        if repeat > MIN_REPEATS and time.monotonic() > end:
            break
        for label in order_of(list(cores), repeat):
            gc.collect()
            gc.freeze()  # as the engine process does once it has loaded
            figures = run(cores[label], batch, repeat * 1000 + batch)
            if repeat:
                found[label].append(figures)
    return found


def results_of(batch: int, plans: Mapping[str, Plan], found: Mapping[str, Sequence[Run]]) -> list[Result]:
    """On over off in tokens a second and in the gaps between tokens; another card's profile over this one's."""
    medians = {
        label: [statistics.median(getattr(one, name) for one in runs) for name in ("tokens_per_second", "p50", "p99")]
        for label, runs in found.items()
    }
    note = "; ".join(
        f"{label} {rate:.0f} tokens/s, p50 {1e3 * half:.3f} ms, p99 {1e3 * tail:.3f} ms"
        for label, (rate, half, tail) in medians.items()
    )
    print(f"  b{batch}: {medians['on'][0] / medians['off'][0]:.3f} ({note})", flush=True)
    context = PROMPT + OUTPUT[batch] / 2
    off, on = (plans[label].step_model.decode_step_seconds(batch, context) for label in ("off", "on"))
    pairs = list(zip(found["on"], found["off"], strict=True))
    results: list[Result] = [
        {"bench": "ablation", "case": f"b{batch}", "metric": "pal_on_over_off", "predicted": off / on, "note": note,
         "samples": [a.tokens_per_second / b.tokens_per_second for a, b in pairs]},
        {"bench": "ablation", "case": f"b{batch}", "metric": "p50_on_over_off", "predicted": on / off, "note": note,
         "samples": [a.p50 / b.p50 for a, b in pairs]},
        {"bench": "ablation", "case": f"b{batch}", "metric": "p99_on_over_off", "predicted": on / off, "note": note,
         "samples": [a.p99 / b.p99 for a, b in pairs]},
    ]  # fmt: skip
    if WRONG_CARD in found:
        results.append(
            {"bench": "ablation", "case": f"b{batch}", "metric": "wrong_profile_over_own", "predicted": None, "note": note,
             "samples": [a.tokens_per_second / b.tokens_per_second for a, b in zip(found[WRONG_CARD], found["on"], strict=True)]}
        )  # fmt: skip
    return results
