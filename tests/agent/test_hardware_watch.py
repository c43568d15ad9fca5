"""The watch with the real planner and a fake NVML played second by second: event, overlay, plan, metric, and the way back."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from prometheus_client import generate_latest
from tests.fakes.nvml import GB, UUID, FakeNvml

from dragoman_agent.engine.index_actions import SUSTAINED_STEPS, TRIAL_STEPS
from dragoman_agent.engine.messages import Load, Step, Tune
from dragoman_agent.hardware_watch import HardwareWatch, open_counters
from dragoman_agent.metrics import AgentMetrics
from dragoman_agent.model.config import ModelConfig
from dragoman_agent.pal.counters import CountersError
from dragoman_agent.pal.decisions import Decision, DecisionLog
from dragoman_agent.pal.live_nvml import NvmlSource
from dragoman_agent.pal.live_source import DeviceLostError, SourceGoneError
from dragoman_agent.pal.live_thread import Look
from dragoman_agent.pal.plan import Plan, ShortGroups
from dragoman_agent.pal.planner import Limits, Road, Switches, plan_for
from dragoman_agent.pal.profile import DeviceFacts, Profile, Value
from dragoman_agent.pal.view import HardwareView

MODEL = ModelConfig("m", "llama", 16, 1024, 2816, 16, 8, 64, 32000, 8192, 1e4, 1e-5, True)
MAKE = partial(
    plan_for,
    model=MODEL,
    limits=Limits(memory_utilization=0.5),
    switches=Switches(),
    road=Road("native-int8", "fast", MODEL.num_parameters, "float32", 4.0),
)
PROFILE = Profile(
    "test",
    DeviceFacts("cpu", 0, "a device", "x86_64-avx2", 141 * GB, UUID),
    "f",
    "2026-11-29T00:00:00+00:00",
    {
        "compute.cores": Value(8, "", "reported"),
        "compute.instruction_set": Value("avx2", "", "reported"),
        "compute.matmul_float32": Value(1.6e11, "flop/s", "measured"),
        "memory.read_bandwidth": Value(4e10, "bytes/s", "measured"),
        "memory.total": Value(141 * GB, "bytes", "reported"),
        "memory.free": Value(24 * GB, "bytes", "reported"),
        "scheduling.thread_handover": Value(5e-6, "s", "measured"),
        "link.h2d_pinned": Value(5.5e10, "bytes/s", "measured"),
    },
)


class Host:
    """The agent, as the watch sees it."""

    def __init__(self) -> None:
        self.tuned: list[Tune] = []
        self.plans: list[Plan] = []
        self.cordons: list[str] = []
        self.losses: list[str] = []
        self.tune = self.tuned.append
        self.plan_changed = self.plans.append
        self.cordon = self.cordons.append
        self.device_lost = self.losses.append


class Lab:
    """A watch, and NVML in front of it; `second` is what the thread does in one second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, profile: Profile = PROFILE, planned: bool = True) -> None:
        monkeypatch.setenv("DRAGOMAN_NVML_MODULE", "tests.fakes.nvml")
        self.fake = FakeNvml()
        self.host = Host()
        plan, _ = MAKE(PROFILE)
        self.log = DecisionLog()
        self.view = HardwareView(profile, None, plan, self.log)
        self.events: list[str] = []
        self.view.feed.announce = self.events.append  # type: ignore[method-assign]
        pal: Any = SimpleNamespace(
            plan=plan, view=self.view, log=self.log, profile=profile, make_plan=MAKE if planned else None
        )
        self.agent_metrics = AgentMetrics(device_kind="cpu", waiting_by_class=lambda: (0, 0, 0))
        self.watch = HardwareWatch(pal, MODEL, self.agent_metrics, self.host, lambda: ())
        self.source = NvmlSource(lambda: self.fake, UUID, lambda: ())
        self.source.open()
        self.counters = open_counters(self.source, profile)
        self.start = plan
        self.second(3)

    def second(self, count: int = 1, **changes: Any) -> None:
        """So many seconds after these changes."""
        if changes:
            self.fake.change(**changes)
        for _ in range(count):
            try:
                sample = self.source.sample()
                self.watch.take(Look(sample, self.counters[0].read() if self.counters else None))
            except SourceGoneError as error:
                self.watch.take(Look(gone=str(error)))
            except DeviceLostError as error:
                self.watch.take(Look(lost=str(error)))
            if xids := self.source.wait(0.0):
                self.watch.take(Look(xids=tuple(xids)))

    def metric(self, name: str) -> float | None:
        for line in generate_latest(self.agent_metrics.registry).decode().splitlines():
            if line.startswith((name + " ", name + "{")):
                return float(line.rsplit(" ", 1)[1])
        return None

    def decisions(self, subject: str) -> list[Decision]:
        return [decision for decision in self.log.all() if decision.subject == subject]


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> Lab:
    return Lab(monkeypatch)


def test_a_quiet_device_is_published_and_changes_nothing(lab: Lab) -> None:
    lab.second(20)
    assert lab.events == [] == lab.host.plans and lab.watch.plan is lab.start
    assert lab.metric("dragoman_device_temperature_celsius") == 45
    assert lab.metric("dragoman_device_power_watts") == 300
    assert lab.metric("dragoman_device_clock_hertz") == 1.98e9
    assert lab.metric("dragoman_link_width") == 16
    assert lab.metric("dragoman_gpu_utilization_ratio") == 0.8, "GPM's, which is finer than the driver's 0.9"
    assert lab.view.feed.limits().power_watts == 300


def test_throttle_slows_the_model_shrinks_the_step_and_is_undone(lab: Lab) -> None:
    lab.second(3, sm_mhz=495, reasons=FakeNvml.HW_THERMAL, celsius=70)
    (event,) = lab.events
    assert "495 MHz" in event and "hw-thermal-slowdown" in event and "max_batch_tokens" in event
    (plan,) = lab.host.plans
    assert plan.max_batch_tokens < lab.start.max_batch_tokens
    rate = lab.start.step_model.prefill_tokens_per_second
    assert plan.step_model.prefill_tokens_per_second == pytest.approx(rate / 4)
    assert lab.host.tuned[-1].max_step_tokens == lab.host.tuned[-1].max_lone_tokens == plan.max_batch_tokens
    assert lab.view.plan().digest == plan.digest() and "x 0.25" in str(lab.view.profile())
    (decision,) = lab.decisions("replan")
    assert decision.predicted and decision.inputs[0].name == "clock" and "495 MHz" in decision.reason
    assert lab.metric('dragoman_live_events_total{quantity="clock"}') == 1
    lab.second(3, sm_mhz=1980, reasons=0)
    assert lab.watch.plan == lab.start and lab.host.plans[-1] == lab.start
    assert lab.host.tuned[-1].max_step_tokens == lab.host.tuned[-1].max_lone_tokens == lab.start.max_batch_tokens
    assert len(lab.events) == len(lab.decisions("replan")) == 2 and "25% to 100%" in lab.events[1]
    assert lab.watch.profile is PROFILE


def test_the_log_says_what_changed_from_what_to_what(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    """Of the limit and of the plan, both ways."""
    start, rate = lab.start.max_batch_tokens, lab.start.step_model.prefill_tokens_per_second
    with caplog.at_level("INFO", logger="dragoman_agent.hardware_watch"):
        lab.second(3, sm_mhz=495, reasons=FakeNvml.HW_THERMAL)
        smaller = lab.watch.plan.max_batch_tokens
        lab.second(3, sm_mhz=1980, reasons=0)
    told = [(record.levelname, record.message) for record in caplog.records]
    assert [level for level, _ in told] == ["WARNING", "INFO"]
    slowed, recovered = (message for _, message in told)
    assert smaller < start
    assert slowed.startswith("live limits: ") and "100% to 25%" in slowed and "495 MHz" in slowed
    assert f"max_batch_tokens {start} -> {smaller} tokens" in slowed
    assert f"prefill {rate:,.0f} -> {rate / 4:,.0f} tokens/s" in slowed
    assert "25% to 100%" in recovered and f"max_batch_tokens {smaller} -> {start} tokens" in recovered


def test_the_log_says_so_when_the_plan_stays(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="dragoman_agent.hardware_watch"):
        lab.second(3, width=4)
    (message,) = (record.message for record in caplog.records)
    assert "link from 100% to 25% (generation 5 x4)" in message and message.endswith("; the plan in force stays")


def test_a_lowered_power_cap_is_an_event_and_its_clock_counts(lab: Lab) -> None:
    lab.second(3, limit_mw=350_000, sm_mhz=990, reasons=FakeNvml.POWER_CAP)
    assert ["power limit" in lab.events[0], "clock" in lab.events[1]] == [True, True]
    assert lab.host.plans[-1].step_model.prefill_tokens_per_second < lab.start.step_model.prefill_tokens_per_second
    assert lab.metric("dragoman_device_power_limit_watts") == 350


def test_a_narrower_link_overlays_the_copies_and_the_metric_says_so(lab: Lab) -> None:
    lab.second(3, width=4)
    assert "x4" in lab.events[0] and lab.metric("dragoman_link_width") == 4
    assert lab.watch.profile.number("link.h2d_pinned") == pytest.approx(5.5e10 / 4)
    assert lab.host.plans == [], "this plan takes nothing from the link"
    assert "stays" in lab.decisions("replan")[0].chosen
    lab.second(3, width=16)
    assert lab.watch.profile is PROFILE


def test_a_neighbour_taking_20_gb_leaves_fewer_blocks_to_use(lab: Lab) -> None:
    lab.second(2, used=80 * GB)
    assert "20.0 GB held by others" in lab.events[0]
    assert lab.metric("dragoman_device_foreign_memory_bytes") == 20 * GB
    assert lab.host.tuned[-1].num_usable_blocks < lab.start.num_blocks - 1
    lab.second(2, used=60 * GB)
    assert lab.host.tuned[-1].num_usable_blocks == lab.start.num_blocks - 1


def test_limits_that_fit_nothing_leave_the_plan_and_say_why(lab: Lab) -> None:
    lab.second(2, used=90 * GB)
    assert lab.host.plans == [] and "refused" in lab.decisions("replan")[0].reason
    assert lab.metric('dragoman_replans_total{result="refused"}') == 1


@pytest.mark.parametrize(
    ("xid", "cordons", "losses"), [(48, 1, 0), (94, 1, 0), (79, 0, 1), (95, 0, 1), (31, 0, 0), (4711, 0, 0)]
)
def test_f11_a_fault_cordons_or_ends_by_its_class(lab: Lab, xid: int, cordons: int, losses: int) -> None:
    lab.second(1, xids=[xid])
    assert (len(lab.host.cordons), len(lab.host.losses)) == (cordons, losses)
    (decision,) = lab.decisions("device-fault")
    assert f"Xid {xid}:" in decision.reason and f"Xid {xid}:" in lab.events[0]
    label = xid if xid != 4711 else "other"
    assert lab.metric(f'dragoman_device_faults_total{{xid="{label}"}}') == 1


def test_a_gpu_that_is_lost_ends_the_agent(lab: Lab) -> None:
    lab.second(1, errors={"nvmlDeviceGetTemperature": pynvml.NVML_ERROR_GPU_IS_LOST})
    assert len(lab.host.losses) == 1 and "GPU is lost" in lab.host.losses[0]


def test_nvml_vanishing_keeps_the_plan_and_forgets_the_readings(lab: Lab) -> None:
    lab.second(3, sm_mhz=495, reasons=FakeNvml.HW_THERMAL)
    throttled = lab.watch.plan
    lab.second(1, errors={"*": pynvml.NVML_ERROR_DRIVER_NOT_LOADED})
    assert lab.watch.plan is throttled and "cannot be read" in lab.events[-1]
    assert lab.metric("dragoman_device_temperature_celsius") is None
    assert lab.decisions("live-limits")
    lab.second(1, errors={})
    assert "read again" in lab.events[-1] and lab.metric("dragoman_device_temperature_celsius") == 45


def test_a_counter_without_permission_is_absent_everywhere(lab: Lab) -> None:
    lab.second(2, errors={"nvmlDeviceGetPowerUsage": pynvml.NVML_ERROR_NO_PERMISSION})
    assert lab.metric("dragoman_device_power_watts") is None
    assert not lab.view.feed.limits().HasField("power_watts")
    assert lab.metric("dragoman_device_temperature_celsius") == 45 and lab.events == []


def test_gpm_that_may_not_be_read_is_left_out_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake = FakeNvml()
    fake.change(errors={"nvmlGpmQueryDeviceSupport": pynvml.NVML_ERROR_NO_PERMISSION})
    source = NvmlSource(lambda: fake, UUID, lambda: ())
    source.open()
    with caplog.at_level("INFO"):
        assert open_counters(source, PROFILE) == []
    assert "Insufficient Permissions" in caplog.text
    assert isinstance(CountersError("x"), Exception)


def test_a_given_plan_stays_and_the_event_is_still_told(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(monkeypatch, planned=False)
    lab.second(3, sm_mhz=495, reasons=FakeNvml.HW_THERMAL)
    assert "given and stays" in lab.events[0] and lab.host.plans == [] == lab.host.tuned
    assert lab.decisions("replan")


def frame(number: int, tokens: int, seconds: float, pending: int = 100_000) -> Step:
    load = Load(8, 9, 50, 0, 100, pending, 4000, 0, number, tokens, 8, 50, 0.0, tokens + 8)
    return Step(number, [], load, seconds, 0.0)


def test_low_saturation_raises_the_budget_in_the_engine_and_the_decision_says_what_came(lab: Lab) -> None:
    """The engine answers as one whose steps have a large fixed cost: the trial's gain comes, and is kept."""
    lab.second(3, sm_mhz=495, reasons=FakeNvml.HW_THERMAL)  # leaves room up to the plan at start
    budget = lab.watch.plan.max_batch_tokens
    model = lab.watch.plan.step_model
    for number in range(150):
        tokens = lab.watch.indices.knobs.max_step_tokens - 8
        lab.watch.take_step(frame(number, tokens, 0.5 + model.prefill_seconds(tokens)))
    assert lab.host.tuned[-1].max_step_tokens == 2 * budget
    trial, end = lab.decisions("raise-prefill-budget") + lab.decisions("raise-prefill-budget-end")
    assert trial.unit == "x speed" and trial.predicted == pytest.approx(trial.measured, rel=0.1)
    assert "csl" in trial.inputs[0].name and end.chosen.startswith("kept")
    assert lab.metric('dragoman_index_actions_total{action="raise-prefill-budget",outcome="kept"}') == 1
    lab.second(3, sm_mhz=1980, reasons=0)
    assert lab.host.tuned[-1].max_step_tokens == lab.start.max_batch_tokens, "a new plan begins anew"


def test_an_action_without_gain_is_undone_in_the_engine(lab: Lab) -> None:
    lab.second(3, sm_mhz=495, reasons=FakeNvml.HW_THERMAL)
    budget = lab.watch.plan.max_batch_tokens
    for number in range(150):
        tokens = lab.watch.indices.knobs.max_step_tokens - 8
        lab.watch.take_step(frame(number, tokens, 0.05 * tokens))
    assert [tune.max_step_tokens for tune in lab.host.tuned[-2:]] == [2 * budget, budget]
    assert lab.decisions("raise-prefill-budget-end")[0].chosen.startswith("undone")


def test_short_sequences_are_grouped_in_the_engine_where_the_plan_timed_a_gain(lab: Lab) -> None:
    """Their steps take 5 ms less once the engine is told to, as the decision predicts."""
    layers = MODEL.num_layers
    groups = (ShortGroups(4, 8, 4, 128, 1e-3, 1e-3 - 5e-3 / layers),)
    plan = replace(lab.start, short_groups=groups)
    pal: Any = SimpleNamespace(plan=plan, view=lab.view, log=lab.log, profile=PROFILE, make_plan=None)
    lab.agent_metrics = AgentMetrics(device_kind="cpu", waiting_by_class=lambda: (0, 0, 0))
    watch = HardwareWatch(pal, MODEL, lab.agent_metrics, lab.host, lambda: ())
    slow = 0.02 + plan.step_model.decode_step_seconds(8, 100)
    for number in range(SUSTAINED_STEPS + 1 + TRIAL_STEPS):
        seconds = slow - (5e-3 if watch.indices.knobs.attention_rows > 1 else 0.0)
        load = Load(8, 0, 50, 0, 100, 0, 800, 0, number, 0, 8, 50, 0.0, 512)
        watch.take_step(Step(number, [], load, seconds, 0.0))
    assert lab.host.tuned[-1].attention_rows == 4 and lab.host.tuned[-1].max_step_tokens == plan.max_company_tokens
    trial, end = lab.decisions("group-short-sequences") + lab.decisions("group-short-sequences-end")
    assert f"{plan.max_company_tokens} tokens a step beside streams, " in trial.chosen
    assert "up to 4 short sequences a program of decode attention" in trial.chosen and end.chosen.startswith("kept")
    assert trial.predicted == pytest.approx(1 + 5e-3 / slow) and trial.measured == pytest.approx(slow / (slow - 5e-3))
    (declined,) = lab.decisions("raise-prefill-budget")
    assert declined.chosen == "not done"
    assert lab.metric('dragoman_index_actions_total{action="group-short-sequences",outcome="kept"}') == 1


def test_indices_are_published_with_their_sources(lab: Lab) -> None:
    for number in range(5):
        lab.watch.take_step(frame(number, 100, 0.1))
    lab.second()
    assert lab.metric('dragoman_index{name="mpi",source="model"}') == 0.5
    assert lab.metric('dragoman_index{name="csl",source="model"}') is not None
    assert lab.metric('dragoman_index{name="pbs",source="gpm"}') == pytest.approx(200 * (1 << 20) / 5.5e10)


def test_the_profile_is_never_changed_in_place(lab: Lab) -> None:
    before = replace(PROFILE)
    lab.second(3, sm_mhz=495, reasons=FakeNvml.HW_THERMAL, width=4, used=80 * GB)
    assert before == PROFILE and lab.watch.profile != PROFILE
