"""Plans of cards on which nothing was ever timed: launches fixed, nothing of NVIDIA's own, and each decision says so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.cuda_driver import FakeDriver
from tests.fakes.machines import AMD_CARD, AMD_LISTED, Machine

from dragoman_agent.device.capabilities import capabilities_of, check_plan_fits
from dragoman_agent.model.random_source import RandomSource
from dragoman_agent.pal.attributes import take_inventory
from dragoman_agent.pal.found import Inventory
from dragoman_agent.pal.needs import needs_of
from dragoman_agent.pal.plan import DecodeAttention, PrefillAttention
from dragoman_agent.pal.planner import Limits, PlanError, Switches, plan_for
from dragoman_agent.pal.profile import Profile, Value, now
from dragoman_agent.pal.profile_schema import missing_values
from dragoman_agent.pal.runtime import Runtime
from dragoman_agent.pal.select import choose_device

ROCM = Runtime("", hip="6.4")
MODEL = RandomSource("qwen3-0.6b")
MEASURED = {
    "memory.read_bandwidth": Value(4e12, "bytes/s", "measured"),
    "compute.matmul_bfloat16": Value(6e14, "flop/s", "measured"),
    "scheduling.graph_node": Value(2e-6, "s", "measured"),
    "link.h2d_pinned": Value(5e10, "bytes/s", "measured"),
}


def look(folder: Path, *listed: dict[str, Any]) -> Inventory:
    machine = Machine(FakeDriver(has_library=False), pci=(AMD_CARD,), torch=list(listed))
    return take_inventory(machine.host(folder), ROCM)


@pytest.fixture
def profile(tmp_path: Path) -> Profile:
    device = look(tmp_path, AMD_LISTED).devices[0]
    return Profile("hip-test", device.facts, device.fingerprint, now(), {**device.values, **MEASURED})


def test_a_listed_card_is_chosen_and_called_untested(tmp_path: Path) -> None:
    inventory = look(tmp_path, AMD_LISTED)
    assert [device.facts.kind for device in inventory.devices] == ["hip", "cpu"], "the card of the bus is this one"
    selection = choose_device(inventory, "auto", needs_of(MODEL))
    card = selection.chosen.device
    assert (card.facts.name, card.facts.architecture, card.address) == ("AMD Instinct MI300X", "gfx942", "0000:c1:00.0")
    assert "untested: the hip backend has never run on such a device" in selection.chosen.reason
    assert card.fingerprint and any("untested" in note for note in card.notes)


def test_the_fingerprint_follows_what_measurements_depend_on(tmp_path: Path) -> None:
    first = look(tmp_path / "a", AMD_LISTED).devices[0]
    renamed = look(tmp_path / "b", {**AMD_LISTED, "name": "another name"}).devices[0]
    fewer = {**AMD_LISTED["values"], "compute.multiprocessors": {"value": 38, "unit": "", "provenance": "reported"}}
    smaller = look(tmp_path / "c", {**AMD_LISTED, "values": fewer}).devices[0]
    assert first.fingerprint == renamed.fingerprint != smaller.fingerprint


def test_a_list_of_another_form_is_a_reason_and_no_traceback(tmp_path: Path) -> None:
    inventory = look(tmp_path, {"index": 0})
    card = next(device for device in inventory.devices if device.facts.kind == "hip")
    assert "torch's list has another form than expected: KeyError" in card.problem


@pytest.mark.parametrize(
    ("group", "decode", "prefill"),
    [(64, (64, 4, 3), (64, 64, 4, 3)), (32, (16, 4, 3), (64, 16, 8, 3))],
)
def test_launches_are_those_that_were_compiled(
    profile: Profile, group: int, decode: tuple[int, ...], prefill: tuple[int, ...]
) -> None:
    held = profile.with_values({"compute.warp_size": Value(group, "", "reported")})
    plan, decisions = plan_for(held, MODEL.config, Limits(), Switches())
    assert plan.device_kind == "hip" and not plan.dependent_launch and plan.gemm_decode == ()
    block_n, num_warps, num_stages = decode
    for bucket in plan.decode_attention:
        assert bucket == DecodeAttention(bucket.max_batch, bucket.num_splits, block_n, num_warps, num_stages)
    assert plan.prefill_attention == PrefillAttention("paged", *prefill)
    check_plan_fits(plan, capabilities_of("hip", held.values))
    told = {decision.subject: decision for decision in decisions}
    assert told["decode-attention"].reason == "fixed: no kernel was ever timed on a hip device"
    assert f"n{block_n}-w{num_warps}-g{num_stages}" in told["decode-attention"].chosen
    assert told["dependent-launch"].reason == "NVIDIA's own"
    assert "never run on such a device" in told["untested-backend"].reason
    assert not any("--pal" in decision.reason for decision in decisions), "nobody asked for a switch"


def test_switches_are_still_told(profile: Profile) -> None:
    plan, decisions = plan_for(profile, MODEL.config, Limits(), Switches.off())
    assert plan.switches_off == ("pal",) and plan.page_size == 16
    assert decisions[-1].subject == "switches"


def test_what_cannot_be_planned_says_why(profile: Profile) -> None:
    with pytest.raises(
        PlanError, match=r"16 threads of a hip device run in step .* compiled for 64, 32; use --device cpu"
    ):
        plan_for(
            profile.with_values({"compute.warp_size": Value(16, "", "reported")}), MODEL.config, Limits(), Switches()
        )
    bare = replace(profile, values={k: v for k, v in profile.values.items() if k != "memory.read_bandwidth"})
    with pytest.raises(PlanError, match=r"lacks memory\.read_bandwidth"):
        plan_for(bare, MODEL.config, Limits(), Switches())
    assert missing_values("hip", profile.values) == ()
    assert missing_values("xpu", bare.values) == ("memory.read_bandwidth",)
