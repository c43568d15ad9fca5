"""Steps that the loaded device timed: the step model is made anew from them, and stays so when the limits change."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dragoman_agent.agent import Agent
from dragoman_agent.device.base import StepBatch
from dragoman_agent.device.checks import check_batch
from dragoman_agent.device.warm_up import decode_batch, in_null_block, timed_steps, timing
from dragoman_agent.engine.messages import Warmed
from dragoman_agent.hardware_watch import HardwareWatch
from dragoman_agent.metrics import AgentMetrics
from dragoman_agent.model.source import open_model
from dragoman_agent.pal.decisions import DecisionLog
from dragoman_agent.pal.kernel_times import step_key
from dragoman_agent.pal.library import load_library
from dragoman_agent.pal.observed import Observations
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


def test_steps_timed_after_registration_reach_the_controllers(capsys: pytest.CaptureFixture[str]) -> None:
    watch, _, log = watch_of(Switches())
    for decision in plan_for(CARD, CONFIG, Limits(), Switches())[1]:
        log.record(decision)
    described: list[float] = []
    agent = object.__new__(Agent)  # of an agent that registered with the plan as it was
    agent._watch, agent._settings = watch, SimpleNamespace(announce=True)  # type: ignore[assignment]
    agent._observations = Observations(watch.plan, log)
    agent._engine = SimpleNamespace(tune=lambda limits: None)  # type: ignore[assignment]
    agent._membership = SimpleNamespace(  # type: ignore[assignment]
        describe_again=lambda: described.append(agent._watch.plan.step_model.decode_step_seconds(8, 1024))
    )
    watch._host = agent
    before = watch.plan.step_model.decode_step_seconds(8, 1024)
    steps = [[b, c, 1.5 * watch.plan.step_model.decode_step_seconds(b, c)] for b, c in timed_steps(watch.plan)]
    agent._take_timed({"decode_steps": [], "mixed_step_seconds": None})  # what is known when it is ready
    assert not described
    agent.engine_warmed(Warmed({"decode_steps": steps, "mixed_step_seconds": 0.004}, "no room for 2 graphs"))
    assert described == [pytest.approx(1.5 * before, rel=0.05)]
    measured = {decision.subject: decision.measured for decision in log.all()}
    assert measured["mixed-graphs"] == 0.004
    announced = json.loads(capsys.readouterr().out)
    assert announced["event"] == "warmed" and announced["problem"] == "no room for 2 graphs"


def test_a_shape_is_timed_in_pairs_between_which_nothing_is_under_way() -> None:
    plan, _ = plan_for(CARD, CONFIG, Limits(), Switches())
    seconds = iter([9.0, 0.003, 9.0, 0.001, 9.0, 0.002, 9.0, 0.1, 9.0, 0.3])
    under_way: list[object] = []

    def queue(step: StepBatch) -> Any:
        handle = SimpleNamespace()
        under_way.append(handle)
        handle.result = lambda: (under_way.remove(handle), SimpleNamespace(seconds=next(seconds)))[1]
        return handle

    def timed() -> tuple[int, float]:
        timer, num_pauses = timing(queue, step), 0
        while True:
            try:
                next(timer)
            except StopIteration as ended:
                return num_pauses, ended.value
            assert not under_way
            num_pauses += 1

    step = in_null_block(decode_batch(plan, 4, 128), plan.page_size)
    assert timed() == (2, 0.002), "the median of those that are queued behind another"
    assert timed() == (1, 0.2), "long ones once less"
    assert step.slot_mapping.tolist() == [0, 1, 2, 3] and step.block_tables.min() > 0, "writes alone go elsewhere"
    assert max(in_null_block(decode_batch(plan, 128, 128), plan.page_size).slot_mapping) < plan.page_size


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
