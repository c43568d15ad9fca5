"""The probe's cache: quick and full, kept by fingerprint; and what becomes of a GPU that cannot be measured."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from dragoman_agent.pal import probe as probe_module
from dragoman_agent.pal.attributes import FoundDevice, Inventory, cpu_device
from dragoman_agent.pal.probe import EXTENT, measure_cuda, probe, profile_device
from dragoman_agent.pal.probe_process import ProbeRun
from dragoman_agent.pal.probe_steps import FULL_STEPS, NEEDED, QUICK_STEPS
from dragoman_agent.pal.profile import DeviceFacts, ProfileError, Value

DEVICE = FoundDevice(
    DeviceFacts("cuda", 0, "Some Card", "sm_90", 1 << 37, "uuid-1"),
    {"compute.multiprocessors": Value(132, "", "reported")},
    fingerprint="f" * 32,
)
NUMBERS = {
    name: Value(1e12, "s" if "node" in name else "flop/s" if "matmul" in name else "bytes/s", "measured")
    for name in NEEDED
}


class Card:
    """Stands in for the measuring process: counts, and tells a full measurement from a quick one."""

    def __init__(self) -> None:
        self.asked: list[bool] = []
        self.read = 1e12

    def measure(self, index: int, cache_dir: Path, *, full: bool) -> dict[str, Value]:
        self.asked.append(full)
        values = {**NUMBERS, "memory.read_bandwidth": Value(self.read, "bytes/s", "measured")}
        return {**values, "memory.latency": Value(6e-7, "s", "measured")} if full else values


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    """A card in place of the measuring process."""
    card = Card()
    monkeypatch.setattr(probe_module, "measure_cuda", card.measure)
    return card


def test_a_quick_result_does_not_answer_for_a_full_one(card: Card, tmp_path: Path) -> None:
    quick, cached = profile_device(DEVICE, tmp_path)
    assert not cached and quick.values[EXTENT].value == "quick" and "memory.latency" not in quick.values
    full, cached = profile_device(DEVICE, tmp_path, full=True)
    assert not cached and full.values[EXTENT].value == "full" and "memory.latency" in full.values
    assert card.asked == [False, True]
    assert profile_device(DEVICE, tmp_path, full=True)[1] and profile_device(DEVICE, tmp_path)[1]
    assert card.asked == [False, True]


def test_a_kept_0_that_was_called_measured_is_left_out(card: Card, tmp_path: Path) -> None:
    """As profiles of before have of what could not be resolved."""
    full, _ = profile_device(DEVICE, tmp_path, full=True)
    path = tmp_path / "profiles" / f"{DEVICE.fingerprint}.json"
    path.write_text(full.with_values({"scheduling.event_record": Value(0.0, "s", "measured")}).to_json())
    again, cached = profile_device(DEVICE, tmp_path, full=True)
    assert cached and again.values.keys() == full.values.keys()


def test_a_quick_refresh_keeps_what_only_a_full_one_measured(card: Card, tmp_path: Path) -> None:
    profile_device(DEVICE, tmp_path, full=True)
    card.read = 2e12
    profile, cached = profile_device(DEVICE, tmp_path, fresh=True)
    assert not cached and card.asked == [True, False]
    assert profile.number("memory.read_bandwidth") == 2e12
    assert profile.number("memory.latency") == 6e-7 and profile.values[EXTENT].value == "full"
    assert profile_device(DEVICE, tmp_path, full=True)[1]


def test_a_full_refresh_keeps_nothing(card: Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profile_device(DEVICE, tmp_path, full=True)
    monkeypatch.setattr(probe_module, "measure_cuda", lambda *_, **__: dict(NUMBERS))  # the latency failed this time
    profile, _ = profile_device(DEVICE, tmp_path, fresh=True, full=True)
    assert "memory.latency" not in profile.values


def test_another_fingerprint_is_measured_anew(card: Card, tmp_path: Path) -> None:
    profile_device(DEVICE, tmp_path, full=True)
    other, cached = profile_device(dataclasses.replace(DEVICE, fingerprint="e" * 32), tmp_path)
    assert not cached and other.values[EXTENT].value == "quick"


def test_reported_values_are_always_new(card: Card, tmp_path: Path) -> None:
    profile_device(DEVICE, tmp_path)
    changed = dataclasses.replace(DEVICE, values={"compute.multiprocessors": Value(66, "", "reported")})
    profile, cached = profile_device(changed, tmp_path)
    assert cached and profile.number("compute.multiprocessors") == 66


def test_a_gpu_that_cannot_be_measured_is_listed_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: Any, **__: Any) -> dict[str, Value]:
        raise ProfileError("GPU 0 could not be measured (it hung)")

    monkeypatch.setattr(probe_module, "measure_cuda", fail)
    monkeypatch.setattr(probe_module, "measure_cpu", lambda *_, **__: {})
    monkeypatch.setattr(probe_module, "take_inventory", lambda: Inventory((DEVICE, cpu_device())))
    report = probe(tmp_path)
    assert [device.problem for device in report.inventory.devices] == ["GPU 0 could not be measured (it hung)", ""]
    assert [profile.device.kind for profile in report.profiles] == ["cpu"]


def test_the_measuring_command_names_device_steps_and_extent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commands = []

    def run(command: Any, steps: Any) -> ProbeRun:
        commands.append(command(steps))
        return ProbeRun(values=dict(NUMBERS))

    monkeypatch.setattr(probe_module, "run_probe", run)
    measure_cuda(1, tmp_path, full=True)
    measure_cuda(1)
    full, quick = commands
    assert full[-6:] == ["1", "--full", "--cache", str(tmp_path), "--steps", ",".join(FULL_STEPS)]
    assert quick[-3:] == ["1", "--steps", ",".join(QUICK_STEPS)]


@pytest.mark.parametrize("name", sorted(NEEDED))
def test_without_what_a_plan_needs_there_is_no_profile(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    values = {key: value for key, value in NUMBERS.items() if key != name}
    run = ProbeRun(values=values, problems={NEEDED[name]: "the reason"})
    monkeypatch.setattr(probe_module, "run_probe", lambda *_: run)
    with pytest.raises(
        ProfileError, match=f"GPU 0 could not be measured: {name} is missing .the reason.; run `dragoman doctor`"
    ):
        measure_cuda(0)


def test_a_quick_set_is_part_of_the_full_one_and_every_step_exists() -> None:
    assert set(QUICK_STEPS) < set(FULL_STEPS) and set(NEEDED.values()) <= set(QUICK_STEPS)
    pytest.importorskip("cuda.bindings")
    from dragoman_agent.device.cuda_probe import STEPS

    assert set(FULL_STEPS) == set(STEPS)
