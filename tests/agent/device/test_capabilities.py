"""What backends provide as data: figures with their source, launches that hold every thread, plans that cannot run."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman_agent.device.base import DeviceError
from dragoman_agent.device.capabilities import Capabilities, LaunchLimits, capabilities_of, check_plan_fits
from dragoman_agent.device.null_model import NullModel, default_null_plan
from dragoman_agent.model.random_source import RandomSource
from dragoman_agent.pal.attributes import take_inventory
from dragoman_agent.pal.library import load_library
from dragoman_agent.pal.plan import PrefillAttention
from dragoman_agent.pal.planner import Limits, Switches, plan_for
from dragoman_agent.pal.profile import Profile, Value

CARD = load_library("h100-sxm")
MEASURED = {
    "memory.latency": Value(0.6e-6, "s", "measured"),
    "memory.l2_latency": Value(0.2e-6, "s", "measured"),
    "memory.latency_by_region": Value((6e-7, 6.1e-7), "s", "measured", note="no significant difference", labels=("0", "1")),
    "scheduling.event_wait": Value(1e-6, "s", "measured"),
    "scheduling.grid_barrier": Value(0.95e-6, "s", "measured"),
    "scheduling.atomics": Value((3e11, 2e11, 1e11), "operations/s", "measured", labels=("32", "64", "128")),
    "scheduling.throughput_by_block_size": Value(
        (1.0e12, 3.9e12, 4.0e12, 3.95e12), "bytes/s", "measured", labels=("32", "64", "256", "1024")
    ),
}  # fmt: skip


def card(**changes: Value | None) -> Capabilities:
    values: dict[str, Any] = {**CARD.values, **MEASURED, **{k.replace("__", "."): v for k, v in changes.items()}}
    return capabilities_of("cuda", {name: value for name, value in values.items() if value is not None})


def test_a_measured_card_answers_everything_with_the_source() -> None:
    held = card()
    device, shared = held.region("device"), held.region("shared")
    assert device is not None and device.latency == MEASURED["memory.latency"]
    assert device.note == "by region: no significant difference"
    assert shared is not None and shared.size is not None and shared.size.value == 232448
    assert [(a.width_bits, a.alignment_bytes, a.rate) for a in held.atomics] == [(32, 4, 3e11), (64, 8, 2e11), (128, 16, 1e11)]  # fmt: skip
    assert {each.name: each.cost.value for each in held.sync if each.cost}["grid barrier"] == 0.95e-6
    assert held.is_tested and held.has_dependent_launch and not held.missing
    assert held.launch.block_threads == 256 and "98%" in held.launch.reason


def test_what_was_not_measured_is_named_and_never_made_up() -> None:
    held = capabilities_of("cuda", CARD.values)
    region = held.region("device")
    assert region is not None and region.latency is None
    assert "memory.latency: not measured yet by `dragoman probe --full`" in held.missing
    assert all(atomic.rate is None for atomic in held.atomics)
    assert held.launch.block_threads == 128 and "dragoman probe --full" in held.launch.reason


def test_older_cards_have_no_128_bit_atomics_and_no_dependent_launch() -> None:
    older = capabilities_of("cuda", load_library("a100-sxm-80gb").values)
    assert [atomic.width_bits for atomic in older.atomics] == [32, 64]
    assert not older.has_dependent_launch


@pytest.mark.parametrize("kind", ["hip", "xpu"])
def test_untested_backends_say_so_and_claim_nothing_of_another_makers(kind: str) -> None:
    held = capabilities_of(kind, CARD.values)  # even where the values speak of it
    assert not held.is_tested and not held.has_dependent_launch
    assert held.to_json()["tested"] is False


def test_this_machines_cpu_answers_from_its_own_facts() -> None:
    device = next(found for found in take_inventory().devices if found.facts.kind == "cpu")
    held = capabilities_of("cpu", device.values)
    cores = device.values["compute.cores"].value
    assert held.launch.configure(10**6).num_blocks == cores
    main = held.region("main")
    assert main is not None and main.size == device.values["memory.total"]
    assert any("memory.read_bandwidth" in line for line in held.missing)
    json.dumps(held.to_json())


def test_the_null_device_runs_one_thread() -> None:
    held = capabilities_of("null", {})
    assert held.launch.configure(99).num_threads == 1 and held.atomics == ()


def test_a_kind_without_backend_and_a_driver_that_says_nothing_are_refused() -> None:
    with pytest.raises(DeviceError, match="no tpu backend"):
        capabilities_of("tpu", {})
    for bad in (None, Value(0, "", "reported"), Value("32", "", "reported")):
        with pytest.raises(DeviceError, match=r"nothing can be launched on this cuda device.*compute\.warp_size"):
            card(compute__warp_size=bad)


@given(st.integers(1, 2**33), st.sampled_from([32, 64]), st.sampled_from([64, 128, 192, 1024]), st.booleans())
def test_every_launch_holds_the_threads_and_no_block_more(wanted: int, group: int, block: int, shares: bool) -> None:
    limits = LaunchLimits(group, block, 1024, 40 if shares else 2**31 - 1, None, "", shares)
    made = limits.configure(wanted)
    assert made.num_threads * made.items_a_thread >= wanted
    if shares:
        assert made.num_blocks <= 40 and made.num_blocks * (made.items_a_thread - 1) < wanted
    else:
        assert made.block_threads % group == 0 and made.block_threads <= block
        assert (made.num_blocks - 1) * made.block_threads < wanted


def test_launches_that_cannot_be_are_refused() -> None:
    launch = card().launch
    for wanted in (0, -5):
        with pytest.raises(DeviceError, match="at least 1"):
            launch.configure(wanted)
    with pytest.raises(DeviceError, match="are possible, split it"):
        launch.configure(2**31 * launch.block_threads)


def planned() -> tuple[Any, Profile]:
    profile = CARD
    return plan_for(profile, RandomSource("qwen3-0.6b").config, Limits(), Switches())[0], profile


def test_a_plan_made_for_the_card_fits_it() -> None:
    plan, profile = planned()
    check_plan_fits(plan, capabilities_of("cuda", profile.values))
    check_plan_fits(default_null_plan(NullModel()), capabilities_of("null", {}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device_kind": "hip"}, "it is one for a hip device"),
        ({"shared_memory_bytes": 10**6}, "use 1000000 bytes of shared memory, 232448 are possible"),
        ({"prefill_attention": PrefillAttention("paged", 64, 64, 64, 3)}, "blocks of 2048 threads, 1024 are possible"),
    ],
)
def test_a_plan_that_cannot_run_is_refused_with_the_numbers(changes: dict[str, Any], words: str) -> None:
    plan, profile = planned()
    with pytest.raises(DeviceError, match=rf"cannot run on this cuda device: .*{words}; plan again"):
        check_plan_fits(replace(plan, **changes), capabilities_of("cuda", profile.values))


def test_dependent_launch_needs_the_device() -> None:
    plan, profile = planned()
    plan = replace(plan, dependent_max_batch=8)
    check_plan_fits(plan, capabilities_of("cuda", profile.values))
    without = {**profile.values, "compute.dependent_launch": Value(False, "", "derived")}
    with pytest.raises(DeviceError, match="starts kernels before the one before them has ended"):
        check_plan_fits(plan, capabilities_of("cuda", without))
