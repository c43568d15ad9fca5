"""Steps that the loaded device timed: the step model is made anew from them, and stays so when the limits change."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dragoman_agent.device.base import StepBatch
from dragoman_agent.device.checks import check_batch
from dragoman_agent.device.warm_up import decode_batch, timed_steps
from dragoman_agent.hardware_watch import HardwareWatch
from dragoman_agent.metrics import AgentMetrics
from dragoman_agent.model.source import open_model
from dragoman_agent.pal.decisions import DecisionLog
from dragoman_agent.pal.kernel_times import step_key
from dragoman_agent.pal.library import load_library
from dragoman_agent.pal.plan import Plan
from dragoman_agent.pal.planner import Limits, Switches, plan_for
from dragoman_agent.pal.timings import Timings
from dragoman_agent.pal.view import HardwareView

CONFIG = open_model("random:qwen3-0.6b", Path()).config
CARD = load_library("h200")


def watch_of(switches: Switches) -> tuple[HardwareWatch, list[Plan], DecisionLog]:
    """A watch as `start_on_device` prepares it, and the plans that it told of."""
    make = partial(plan_for, model=CONFIG, limits=Limits(), switches=switches)
    plan, _ = make(CARD)
    log, told = DecisionLog(), []
    host: Any = SimpleNamespace(tune=lambda limits: None, plan_changed=told.append)

    def with_steps(steps: Any) -> Any:
        named = {step_key(CONFIG.name, batch, context): seconds for batch, context, seconds in steps}
        return partial(make, timings=Timings(CARD.fingerprint, "", named))

    pal: Any = SimpleNamespace(
        plan=plan,
        view=HardwareView(CARD, None, plan, log),
        log=log,
        profile=CARD,
        make_plan=make,
        with_steps=with_steps,
    )
    metrics = AgentMetrics(device_kind="cpu", waiting_by_class=lambda: (0, 0, 0))
    return HardwareWatch(pal, CONFIG, metrics, host, lambda: ()), told, log


def test_the_step_model_says_what_was_timed_and_controllers_hear_of_it() -> None:
    watch, told, log = watch_of(Switches())
    predicted = watch.plan.step_model.decode_step_seconds
    steps = [(b, c, (1.2 + 0.001 * b) * predicted(b, c)) for b, c in timed_steps(watch.plan)]
    watch.steps_timed(steps)
    assert told == [watch.plan]
    for batch, context, seconds in steps:
        assert watch.plan.step_model.decode_step_seconds(batch, context) == pytest.approx(seconds, rel=0.02)
    (decision,) = [decision for decision in log.all() if decision.subject == "replan"]
    assert f"{len(steps)} decode steps timed on the loaded device" in decision.reason
    assert "step of one sequence" in decision.chosen


def test_nothing_changes_without_steps_or_with_the_layer_off() -> None:
    for switches, steps in ((Switches(), []), (Switches.off(), [(1, 128, 0.5)])):
        watch, told, _ = watch_of(switches)
        before = watch.plan
        watch.steps_timed(steps)
        assert watch.plan is before and not told


def test_a_device_times_steps_that_it_can_run() -> None:
    plan, _ = plan_for(CARD, CONFIG, Limits(), Switches())
    steps = timed_steps(plan)
    assert {batch for batch, _ in steps} >= {1, 8, 32, 128} and max(batch for batch, _ in steps) == plan.max_num_seqs
    for batch, context in steps:
        step = decode_batch(plan, batch, context)
        assert isinstance(step, StepBatch) and step.context_lens.tolist() == [context] * batch
        check_batch(step, CONFIG, plan)
    with pytest.raises(ValueError, match="blocks, the plan has"):
        decode_batch(plan, plan.num_blocks, 64)
