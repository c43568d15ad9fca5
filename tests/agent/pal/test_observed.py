"""Predictions get the measured value beside them, in their own unit, and not more often than once a second."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from dragoman_agent.device.null_model import default_null_plan, open_null_model
from dragoman_agent.pal.decisions import Decision
from dragoman_agent.pal.observed import Observations
from dragoman_agent.pal.startup import PalResult, start_on_null


class Clock:
    """Seconds that pass when told to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def pal() -> PalResult:
    return start_on_null(default_null_plan(open_null_model("null")))


@pytest.fixture
def clock() -> Clock:
    return Clock()


def load(decode: int = 0, prefill: int = 0, context: int = 64) -> SimpleNamespace:
    return SimpleNamespace(
        decode_tokens=decode, prefill_tokens=prefill, running_context_tokens=context, total_blocks=8191
    )


def of(pal: PalResult, subject: str) -> Decision:
    return next(decision for decision in pal.log.all() if decision.subject == subject)


def test_decode_is_measured_at_its_own_context_and_told_in_the_decisions_terms(pal: PalResult, clock: Clock) -> None:
    observed = Observations(pal.plan, pal.log, clock=clock)
    for context in (10, 5000, 20_000, 30_000):
        observed.take_step(load(decode=1, context=context), 3 * pal.plan.step_model.decode_step_seconds(1, context))
    decision = of(pal, "step-model")
    assert decision.predicted is not None
    assert decision.measured == pytest.approx(3 * decision.predicted)


def test_steps_that_say_nothing_about_one_stream_or_a_full_chunk_do_not_count(pal: PalResult, clock: Clock) -> None:
    observed = Observations(pal.plan, pal.log, clock=clock)
    for step in (load(decode=2), load(decode=1, prefill=64), load(prefill=5)):
        for _ in range(8):
            observed.take_step(step, 1.0)
            clock.now += 1
    assert of(pal, "step-model").measured is None
    assert of(pal, "prefill-rate").measured is None


def test_prefill_is_a_median_rate(pal: PalResult, clock: Clock) -> None:
    observed = Observations(pal.plan, pal.log, clock=clock)
    for seconds in (0.01, 0.02, 5.0):
        clock.now += 1
        observed.take_step(load(prefill=1000), seconds)
    assert of(pal, "prefill-rate").measured == pytest.approx(50_000)


def test_blocks_and_weights_are_taken_over_once(pal: PalResult, clock: Clock) -> None:
    told: list[Decision] = []
    pal.log.record(Decision("load", "1 GB", "because", predicted=1e9, unit="bytes/s"))
    observed = Observations(pal.plan, pal.log, told.append, clock)
    observed.loaded({"weights_gb_per_second": 2.5})
    for _ in range(3):
        observed.take_step(load(), 0.0)
    assert [(d.subject, d.measured) for d in told] == [("load", 2.5e9), ("kv-blocks", 8192 * 64 * 12)]


def test_it_speaks_once_a_second_and_not_without_news(pal: PalResult, clock: Clock) -> None:
    told: list[Decision] = []
    observed = Observations(pal.plan, pal.log, told.append, clock)
    for _ in range(100):
        observed.take_step(load(decode=1), 0.001)
        clock.now += 0.1
    for _ in range(10):
        observed.take_step(load(), 0.0)
        clock.now += 1
    assert 9 <= sum(decision.subject == "step-model" for decision in told) <= 11


def test_tiers_are_measured_beside_their_plan(clock: Clock) -> None:
    plan = replace(default_null_plan(open_null_model("null")), kv_host_bytes=100 * 768, kv_link_bytes_per_second=1e9)
    pal = start_on_null(plan)
    pal.log.record(Decision("prefetch", "yes", "", predicted=2e-6, unit="s"))
    observed = Observations(plan, pal.log, clock=clock)
    tier = SimpleNamespace(name="host", capacity_blocks=60, read_bytes=0, read_seconds=0.0, problem="")
    observed.take_tiers([tier])
    assert of(pal, "host-tier").predicted == 76_800 and of(pal, "host-tier").measured == pytest.approx(60 * 768)
    assert of(pal, "prefetch").measured is None
    tier.capacity_blocks, tier.read_bytes, tier.read_seconds = 100, 1_000_000, 0.002
    observed.take_tiers([tier])
    assert of(pal, "host-tier").measured == pytest.approx(76_800)
    assert of(pal, "prefetch").measured == pytest.approx(4e-6), "half the link's rate: a token takes twice as long"


def test_a_tier_that_goes_off_is_told_beside_its_plan(clock: Clock) -> None:
    pal = start_on_null(replace(default_null_plan(open_null_model("null")), kv_disk_bytes=100 * 768))
    observed = Observations(pal.plan, pal.log, clock=clock)
    tier = SimpleNamespace(name="disk", capacity_blocks=100, read_bytes=0, read_seconds=0.0, problem="")
    observed.take_tiers([tier])
    assert of(pal, "disk-tier").measured == pytest.approx(76_800)
    tier.capacity_blocks, tier.problem = 0, "the disk tier is off: it is full"
    for _ in range(2):
        observed.take_tiers([tier])
    told = [decision for decision in pal.log.all() if decision.subject == "disk-tier"]
    assert [(d.chosen, d.measured) for d in told] == [(told[0].chosen, pytest.approx(76_800)), ("off", 0)]
    assert told[1].reason == tier.problem and told[1].predicted == 76_800
