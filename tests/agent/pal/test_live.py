"""When a live sample is news, and what it does to the profile."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman_agent.pal.live import (
    CPU_THRESHOLDS,
    GPU_THRESHOLDS,
    LiveEvent,
    LiveState,
    Reference,
    Sample,
    judge,
    overlay,
)
from dragoman_agent.pal.profile import DeviceFacts, Profile, Value

GB = 10**9
WELL = Sample(
    source="nvml",
    temperature_celsius=45,
    slowdown_celsius=89,
    power_limit_watts=700,
    clock_hertz=1.98e9,
    memory_clock_hertz=3.2e9,
    link_generation=5,
    link_width=16,
    total_memory_bytes=141 * GB,
    foreign_memory_bytes=1 * GB,
    utilization_ratio=0.9,
    reasons=frozenset(),
)
PROFILE = Profile(
    "test",
    DeviceFacts("cuda", 0, "a card", "sm_90", 141 * GB, "u"),
    "f",
    "2026-11-29T00:00:00+00:00",
    {
        "compute.matmul_bfloat16": Value(8e14, "flop/s", "measured"),
        "memory.read_bandwidth": Value(4.6e12, "bytes/s", "measured"),
        "memory.read_by_size": Value((1e12, 2e12), "bytes/s", "measured", labels=("1", "2")),
        "memory.free": Value(140 * GB, "bytes", "reported"),
        "link.h2d_pinned": Value(5.5e10, "bytes/s", "measured"),
        "power.limit": Value(700.0, "W", "reported"),
        "compute.capability": Value("9.0", "", "reported"),
    },
)


def play(*samples: Sample, thresholds=GPU_THRESHOLDS, state: LiveState | None = None):
    """The state and all events after these samples."""
    state = state or LiveState()
    events: list[LiveEvent] = []
    for sample in samples:
        state, news = judge(state, sample, thresholds)
        events += news
    return state, events


def number(profile: Profile, name: str) -> float:
    return profile.number(name)


def overlaid(state: LiveState) -> Profile:
    return overlay(PROFILE, state, GPU_THRESHOLDS, 141 * GB)


HOT = replace(WELL, clock_hertz=0.99e9, reasons=frozenset({"hw-thermal-slowdown"}))


def test_nothing_new_leaves_the_profile_itself() -> None:
    state, events = play(*[WELL] * 10)
    assert events == [] and overlaid(state) is PROFILE


def test_a_throttle_counts_after_three_samples_scales_the_matrix_rate_and_is_undone() -> None:
    state, events = play(WELL, HOT, HOT)
    assert events == []
    state, events = play(HOT, state=state)
    assert [(e.quantity, e.after, e.recovered) for e in events] == [("clock", 0.5, False)]
    assert "990 MHz" in events[0].text and "hw-thermal-slowdown" in events[0].text
    held = overlaid(state)
    assert number(held, "compute.matmul_bfloat16") == pytest.approx(4e14)
    assert number(held, "memory.read_bandwidth") == 4.6e12, "the memory's clock did not change"
    assert held.values["compute.matmul_bfloat16"].provenance == "derived"
    assert "0.50" in held.values["compute.matmul_bfloat16"].note
    state, events = play(WELL, WELL, WELL, state=state)
    assert [(e.quantity, e.recovered) for e in events] == [("clock", True)]
    assert overlaid(state) is PROFILE


def test_one_bad_second_in_between_is_no_news() -> None:
    _, events = play(WELL, *[HOT, HOT, WELL] * 5)
    assert events == []


def test_a_power_cap_at_full_load_is_how_the_profile_was_measured() -> None:
    capped = replace(WELL, clock_hertz=1.4e9, reasons=frozenset({"power-cap"}))
    _, events = play(WELL, *[capped] * 10)
    assert events == []


def test_a_lowered_power_limit_makes_the_lower_clock_count() -> None:
    capped = replace(WELL, clock_hertz=1.188e9, power_limit_watts=350, reasons=frozenset({"power-cap"}))
    state, events = play(WELL, *[capped] * 3)
    assert [(e.quantity, round(e.after, 2)) for e in events] == [("power-limit", 0.5), ("clock", 0.6)]
    assert number(overlaid(state), "power.limit") == 350
    assert number(overlaid(state), "compute.matmul_bfloat16") == pytest.approx(4.8e14)


@pytest.mark.parametrize("low", [{"clock_hertz": 0.2e9, "link_generation": 1}, {"memory_clock_hertz": 0.4e9}])
def test_an_idle_device_that_saves_power_is_no_news(low: dict[str, float]) -> None:
    idle = replace(WELL, reasons=frozenset({"idle"}), utilization_ratio=0.0, **low)
    _, events = play(WELL, *[idle] * 20)
    assert events == []


def test_a_device_held_down_from_the_start_is_seen_by_its_maximum_clock() -> None:
    state = LiveState(Reference(max_clock_hertz=1.98e9))
    _, events = play(*[HOT] * 3, state=state)
    assert [(e.quantity, e.after) for e in events] == [("clock", 0.5)]


def test_the_link_from_x16_to_x4_quarters_the_copies() -> None:
    narrow = replace(WELL, link_width=4)
    state, events = play(WELL, *[narrow] * 3)
    assert [(e.quantity, e.after) for e in events] == [("link", 0.25)] and "x4" in events[0].text
    assert number(overlaid(state), "link.h2d_pinned") == pytest.approx(5.5e10 / 4)


def test_a_neighbour_taking_20_gb_leaves_less_free() -> None:
    crowded = replace(WELL, foreign_memory_bytes=21 * GB)
    state, events = play(WELL, crowded, crowded)
    assert [e.quantity for e in events] == ["foreign-memory"] and "21.0 GB" in events[0].text
    assert number(overlaid(state), "memory.free") == pytest.approx(120 * GB, abs=2)
    state, events = play(WELL, WELL, state=state)
    assert events[0].recovered and overlaid(state) is PROFILE


def test_the_memory_clock_scales_every_bandwidth_lists_too() -> None:
    slow = replace(WELL, memory_clock_hertz=1.6e9)
    state, _ = play(WELL, *[slow] * 3)
    assert number(overlaid(state), "memory.read_bandwidth") == pytest.approx(2.3e12)
    assert overlaid(state).values["memory.read_by_size"].value == (0.5e12, 1e12)


def test_temperature_near_the_slowdown_is_told_and_its_end_too() -> None:
    hot = replace(WELL, temperature_celsius=88)
    state, events = play(WELL, *[hot] * 3)
    assert [e.quantity for e in events] == ["temperature"] and "88 C" in events[0].text
    _, events = play(*[WELL] * 3, state=state)
    assert events[0].recovered


def test_what_cannot_be_read_says_nothing() -> None:
    blind = Sample(source="nvml")
    state, events = play(WELL, *[HOT] * 3, *[blind] * 50)
    assert len(events) == 1 and state.in_force == {"clock": 0.5}


def test_the_hosts_cores_and_memory_are_judged_slower() -> None:
    calm = Sample(total_memory_bytes=32 * GB, foreign_memory_bytes=2 * GB, cpu_share_ratio=0.95, memory_stall_ratio=0.0)
    busy = replace(calm, cpu_share_ratio=0.4)
    state, events = play(calm, *[busy] * 9, thresholds=CPU_THRESHOLDS)
    assert events == []
    state, events = play(busy, thresholds=CPU_THRESHOLDS, state=state)
    assert [e.quantity for e in events] == ["cpu-share"]
    stalled = replace(busy, memory_stall_ratio=0.5)
    _, events = play(*[stalled] * 3, thresholds=CPU_THRESHOLDS, state=state)
    assert [e.quantity for e in events] == ["memory-stall"] and "50%" in events[0].text


share = st.floats(0.0, 1.5)


@given(st.lists(st.tuples(share, share, st.integers(0, 140), st.booleans()), max_size=60))
def test_whatever_comes_values_stay_shares_and_rest_brings_the_profile_back(seen) -> None:
    state = LiveState()
    state, _ = judge(state, WELL, GPU_THRESHOLDS)
    for clock, memory, foreign, held in seen:
        sample = replace(
            WELL,
            clock_hertz=clock * 1.98e9,
            memory_clock_hertz=memory * 3.2e9,
            foreign_memory_bytes=foreign * GB,
            reasons=frozenset({"hw-slowdown"} if held else ()),
        )
        before = dict(state.in_force)
        state, events = judge(state, sample, GPU_THRESHOLDS)
        assert {e.quantity for e in events} == {
            q for q in state.in_force if state.in_force[q] != before.get(q, GPU_THRESHOLDS[q].rest)
        }
        for quantity, value in state.in_force.items():
            assert math.isfinite(value) and 0 <= value <= 1, quantity
        profile = overlaid(state)
        assert 0 <= number(profile, "memory.free") <= 140 * GB
    best = replace(WELL, clock_hertz=9e9, memory_clock_hertz=9e9, foreign_memory_bytes=0)
    state, _ = play(*[best] * 10, state=state)
    assert overlaid(state) is PROFILE
