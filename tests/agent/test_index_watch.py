"""Indices from frames and counters: each from the best source there is, and named by it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dragoman_agent.device.null_model import NullModel, default_null_plan
from dragoman_agent.engine.index_actions import IndexActions, Limits
from dragoman_agent.engine.messages import Load, Step
from dragoman_agent.engine.traffic import traffic_model
from dragoman_agent.index_watch import IndexWatch
from dragoman_agent.model.config import ModelConfig
from dragoman_agent.pal.counters import Reading
from dragoman_agent.pal.live import Sample
from dragoman_agent.pal.plan import MemoryLine
from dragoman_agent.pal.profile import DeviceFacts, Profile, Value

MODEL = ModelConfig("q", "qwen3", 28, 1024, 3072, 16, 8, 128, 151936, 40960, 1e6, 1e-6, True)
WEIGHTS = 2 * MODEL.num_parameters
PLAN = replace(
    default_null_plan(NullModel(), num_blocks=101), device_kind="cuda", memory=(MemoryLine("weights", WEIGHTS),)
)
PROFILE = Profile(
    "p",
    DeviceFacts("cuda", 0, "", "sm_90", 0, "u"),
    "f",
    "2026-11-29T00:00:00+00:00",
    {
        "memory.l2_size": Value(60 << 20, "bytes", "reported"),
        "link.h2d_pinned": Value(55e9, "bytes/s", "measured"),
        "link.d2h_pinned": Value(50e9, "bytes/s", "measured"),
    },
)
SAMPLE = Sample(source="nvml", receive_bytes_per_second=5e9, send_bytes_per_second=1e9, total_memory_bytes=10**11)
TRAFFIC = traffic_model(MODEL, WEIGHTS, 60 << 20)


class Lab:
    def __init__(self, model: ModelConfig | None = MODEL, profile: Profile = PROFILE) -> None:
        self.now = 100.0
        self.profile = profile
        self.watch = IndexWatch(PLAN, profile, model, IndexActions(Limits(512, 100)), lambda: self.now)

    def run(self, steps: int = 10, seconds: float = 0.1, prefill: int = 0) -> None:
        """Steps of a second in all, by default."""
        for number in range(steps):
            load = Load(8, 0, 90, 50, 100, 0, 8000, 0, number, prefill, 8, 40, 0.0, 512)
            assert self.watch.take_step(Step(number, [], load, seconds, 0.0)) is None
            self.now += seconds

    def look(self, sample: Sample = SAMPLE, reading: Reading | None = None) -> dict[str, tuple[float, str]]:
        self.watch.take_sample(sample, reading, self.profile)
        return {index.name: (round(index.value, 4), index.source) for index in self.watch.current()}


def test_without_counters_the_model_speaks_and_says_so() -> None:
    lab = Lab()
    lab.run()
    seen = lab.look()
    assert seen["mpi"] == (0.6, "model"), "60 of 100 blocks are in use"
    assert seen["csl"][1] == "model"
    assert seen["pbs"] == (0.1, "nvml"), "5 of the slower direction's 50 GB/s"
    assert list(lab.watch.hit_ratios) == ["model"]


def test_an_observed_hit_rate_is_what_was_asked_for_less_what_memory_served() -> None:
    lab = Lab()
    lab.run()
    step = TRAFFIC.step(8, 0, 8000)
    reading = Reading(
        "gpm", 1.0, dram_bytes_per_second=10 * step.dram_bytes, sm_ratio=0.7, receive_bytes_per_second=40e9
    )
    seen = lab.look(reading=reading)
    assert lab.watch.hit_ratios["gpm"] == pytest.approx(lab.watch.hit_ratios["model"], rel=1e-6)
    assert seen["pbs"] == (0.8, "gpm") and lab.watch.sm_ratio == 0.7
    lab.run()
    assert lab.look()["mpi"] == (0.6, "gpm"), "as predicted: the factor is 1"


def test_reads_beyond_the_prediction_raise_the_pressure_and_name_their_source() -> None:
    lab = Lab()
    lab.run(prefill=2000)
    step = TRAFFIC.step(8, 2000, 8000)
    lab.look(reading=Reading("cupti", 0.065, dram_bytes_per_second=10 * 0.9 * step.asked_bytes))
    assert lab.watch.hit_ratios["cupti"] == pytest.approx(0.1) and lab.watch.hit_ratios["model"] > 0.5
    lab.run()
    value, source = lab.look()["mpi"]
    assert source == "cupti" and value > 3.0


def test_counters_that_may_count_a_neighbours_work_or_an_idle_time_are_not_used() -> None:
    reading = Reading("gpm", 1.0, dram_bytes_per_second=1e15)
    lab = Lab()
    lab.run()
    lab.look(replace(SAMPLE, foreign_memory_bytes=10**10), reading)
    assert list(lab.watch.hit_ratios) == ["model"]
    lab.run(2, 0.01)
    lab.now += 0.9
    lab.look(reading=reading)
    assert list(lab.watch.hit_ratios) == ["model"]


def test_without_any_traffic_counter_the_link_goes_by_the_bytes_of_the_steps() -> None:
    lab = Lab()
    lab.run()
    value, source = lab.look(Sample())["pbs"]
    assert source == "model" and 0 <= value < 0.01


def test_a_device_without_link_or_cache_model_has_neither_index_nor_ratio() -> None:
    lab = Lab(None, replace(PROFILE, values={}))
    lab.run()
    seen = lab.look(Sample(receive_bytes_per_second=1e9))
    assert set(seen) == {"mpi", "csl"} and lab.watch.hit_ratios == {}


def test_idle_ticks_change_nothing() -> None:
    lab = Lab()
    lab.watch.take_step(Step(0, [], Load(0, 0, 100, 0, 100, 0, 0, 0, 0), 0.0, 0.0))
    assert list(lab.look()) == ["pbs"]
