"""What the GPU benchmarks share: the card's profile, a model's plan from it with timed kernels, and steps made by hand."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.card import usable_gpu

from dragoman_agent.device import cuda, cuda_weights
from dragoman_agent.device.base import StepBatch
from dragoman_agent.device.cuda import CudaDevice
from dragoman_agent.device.warm_up import decode_batch
from dragoman_agent.model.source import ModelSource, open_model
from dragoman_agent.pal import tuned as tuned_module
from dragoman_agent.pal.found import FoundDevice
from dragoman_agent.pal.kernel_times import step_key
from dragoman_agent.pal.plan import Plan
from dragoman_agent.pal.planner import Limits, plan_for
from dragoman_agent.pal.probe import profile_device
from dragoman_agent.pal.profile import Profile
from dragoman_agent.pal.switches import Switches
from dragoman_agent.pal.timings import Timings
from dragoman_agent.pal.tuned import tune_all
from dragoman_agent.pal.tuning import Case, load_timings, tune

CACHE = Path("/tmp/dragoman-bench")
MAX_CONTEXT = 9216


@dataclass(frozen=True, slots=True)
class Setup:
    """A model on the card of this machine."""

    source: ModelSource
    found: FoundDevice
    profile: Profile
    timings: Timings
    plan: Plan
    untuned: Plan  # from the profile alone
    tuning_seconds: float  # this model's share of them
    limits: Limits
    tuned_cases: tuple[Case, ...] = ()  # what was timed in this process, for all models
    all_tuning_seconds: float = 0.0

    def step_keys(self, device: CudaDevice) -> dict[str, float]:
        """The decode steps that `device` timed when it loaded, by their keys in Timings."""
        return {step_key(self.source.config.name, b, c): seconds for b, c, seconds in device.info["decode_steps"]}


LIMITS = Limits(max_context_tokens=MAX_CONTEXT, max_num_seqs=256)


def tuned(names: Sequence[str], limits: Limits = LIMITS) -> dict[str, Setup]:
    """Profile, timed kernels and plan of random-weight models; the kernels of all are timed together. Exits without a GPU."""
    found = usable_gpu()
    profile, _ = profile_device(found, CACHE)
    sources = {name: open_model(f"random:{name}", Path()) for name in names}
    untuned = {name: plan_for(profile, s.config, limits, Switches())[0] for name, s in sources.items()}
    index, begin = profile.device.index, time.perf_counter()
    held = load_timings(CACHE, profile.fingerprint)
    configs = [source.config for source in sources.values()]
    asked: list[Case] = []
    with mock.patch.object(tuned_module, "tune", _noting(asked)):
        timings = tune_all(profile, configs, limits, Switches(), held, CACHE, index, _say)
    seconds = time.perf_counter() - begin
    cases = tuple({case.key: case for case in asked}.values())
    made = {}
    for name, source in sources.items():
        plan, decisions = plan_for(profile, source.config, limits, Switches(), timings)
        _say(f"{name}: page {plan.page_size}, chunk {plan.max_batch_tokens}, blocks {plan.num_blocks}")
        for decision in decisions:
            print(f"    {decision.subject}: {decision.chosen} ({decision.reason})")
        own = seconds / len(sources)
        made[name] = Setup(source, found, profile, timings, plan, untuned[name], own, limits, cases, seconds)
    return made


def _noting(asked: list[Case]) -> Callable[..., Timings]:
    """`pal.tuning.tune`, which also notes the cases that it has to time."""

    def tune_and_note(cases: Sequence[Case], held: Timings, *others: Any) -> Timings:
        asked.extend(case for case in cases if not held.knows(case.key))
        return tune(cases, held, *others)

    return tune_and_note


def setup(name: str, limits: Limits = LIMITS) -> Setup:
    """Profile, timed kernels and plan of one random-weight model."""
    return tuned([name], limits)[name]


def _say(text: str) -> None:
    print(f"  {text}", flush=True)


class Loaded:
    """Loads one model's weights once and plans on them one after another."""

    def __init__(self, source: ModelSource) -> None:
        self._source = source
        self._weights: Any = None

    def device(self, plan: Plan, *, prepares_later: bool = False) -> CudaDevice:
        """A device with `plan`; close the one before first. `prepares_later`: as in an engine, see PreparingDevice."""
        device = CudaDevice(plan.device_index)
        device.prepares_later = prepares_later
        with mock.patch.object(cuda, "load_weights", self._hold):
            device.load(self._source, plan, lambda _: None)
        return device

    def _hold(self, *arguments: Any) -> Any:
        if self._weights is None:
            self._weights = cuda_weights.load_weights(*arguments)
        return self._weights


def step_seconds(device: CudaDevice, batch: StepBatch, steps: int = 12) -> list[float]:
    """Device seconds of each of `steps` equal steps, kept busy two at a time; the first two are left out."""
    handles = []
    seconds = []
    for number in range(steps + 2):
        handles.append(device.submit(replace(batch, step=number + 1)))
        if len(handles) > 1:
            seconds.append(handles.pop(0).result().seconds)
    seconds.append(handles.pop().result().seconds)
    return seconds[2:]


def median_step(device: CudaDevice, plan: Plan, batch: int, context: int) -> float:
    """Median device seconds of a decode step."""
    return statistics.median(step_seconds(device, decode_batch(plan, batch, context)))
