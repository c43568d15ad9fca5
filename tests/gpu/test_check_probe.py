"""The arithmetic of check_probe.py: differences between runs, verdicts beside anchors, the profile of several runs."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks import record_gpu

from dragoman_agent.pal.attributes import FoundDevice
from dragoman_agent.pal.probe_process import ProbeRun
from dragoman_agent.pal.profile import DeviceFacts, Profile, Value


def load() -> Any:
    path = Path(__file__).with_name("check_probe.py")
    spec = importlib.util.spec_from_file_location("check_probe", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


check = load()


def run(read: float, node: float, sizes: tuple[float, ...] = (7e11, 2e12)) -> ProbeRun:
    return ProbeRun(
        values={
            "memory.read_bandwidth": Value(read, "bytes/s", "measured", spread=0.001, note="best"),
            "scheduling.graph_node": Value(node, "s", "measured", spread=0.002),
            "memory.read_by_size": Value(sizes, "bytes/s", "measured", labels=(str(2 << 20), str(8 << 20))),
        }
    )


RUNS = [run(4.60e12, 0.55e-6), run(4.62e12, 0.60e-6, (7e11, 2.2e12)), run(4.61e12, 0.55e-6)]


def test_differences_are_by_entry() -> None:
    table = check.differences(RUNS)
    assert table["memory.read_bandwidth"]["difference"] == pytest.approx(0.02 / 4.61, abs=1e-4)
    assert table["scheduling.graph_node"]["difference"] == pytest.approx(0.05 / 0.55, abs=1e-4)
    assert table[f"memory.read_by_size[{8 << 20}]"]["difference"] == pytest.approx(0.1)


def test_verdicts_know_rates_from_times() -> None:
    table = check.anchored(run(4.0e12, 0.5e-6).values)
    assert table["memory.read_bandwidth"]["verdict"] == "short"
    assert table["scheduling.graph_node"]["verdict"] == "better"
    assert table["memory.copy_bandwidth"]["verdict"] == "not measured"
    assert check.anchored(run(4.6e12, 0.7e-6).values)["scheduling.graph_node"]["verdict"] == "short"
    assert check.anchored(run(4.6e12, 0.55e-6).values)["memory.read_by_size[2 MiB]"]["verdict"] == "within"


def test_the_profile_has_medians_and_the_wider_spread_and_names_no_single_card() -> None:
    values = check.median_values(RUNS)
    assert values["memory.read_bandwidth"].value == 4.61e12
    assert values["memory.read_bandwidth"].note == "best; median of 3 probes"
    assert values["scheduling.graph_node"].spread == pytest.approx(0.05 / 0.55)
    assert values["memory.read_by_size"].value == (7e11, 2e12)
    reported = {
        "compute.multiprocessors": Value(132, "", "reported"),
        "container.kind": Value("docker", "", "reported"),
    }
    device = FoundDevice(DeviceFacts("cuda", 1, "NVIDIA H200", "sm_90", 1 << 37, "uuid"), reported, fingerprint="f")
    own, shared = check.library_profile(device, values)
    assert own.fingerprint == "f" and own.device.uuid == "uuid"
    assert shared.fingerprint == "" and shared.device.uuid == "" and shared.device.index == 0
    assert "container.kind" not in shared.values and "compute.multiprocessors" in shared.values
    assert set(Profile.from_json(shared.to_json(), "h200.json").values) == set(shared.values)


NCU_TABLE = (
    '==PROF== Connected\n"ID","Kernel Name","dram__bytes_read.sum","dram__bytes_write.sum","lts__t_sector_hit_rate.pct"\n'
    '"","","byte","byte","%"\n"0","copy_8","1,080,000,000","1,050,000,000","51.5"\n'
    '"1","copy_8","1,090,000,000","1,050,000,000","51.4"\n"2","copy_8","1,070,000,000","1,050,000,000","51.6"\n'
)


def test_counters_are_compared_with_the_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "NCU", "/bin/true")
    monkeypatch.setattr(check.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, NCU_TABLE, ""))
    body = check.against_contract("copy")
    assert body["bytes_counted"] == [2_130_000_000, 2_140_000_000, 2_120_000_000] and body["hit_rates"] == [
        51.5,
        51.4,
        51.6,
    ]
    assert body["bytes_difference"] == pytest.approx(2_130_000_000 / (2 << 30) - 1, abs=1e-4)
    assert body["passed"] and json.dumps(body)
    read = check.against_contract("read")
    assert not read["passed"] and read["hit_rate_difference_points"] == 51.5


def test_ncu_without_a_table_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "NCU", "/bin/true")
    done = subprocess.CompletedProcess([], 1, "==ERROR== no permission", "")
    monkeypatch.setattr(check.subprocess, "run", lambda *_, **__: done)
    with pytest.raises(RuntimeError, match="no permission"):
        check.ncu_counters("read")


def test_a_part_that_fails_or_has_no_time_left_is_an_entry(tmp_path: Path) -> None:
    report = check.Report(tmp_path)

    def fail() -> None:
        raise ValueError("broken")

    assert report.attempt("a", 1, fail) is None
    assert report.attempt("b", 1e9, lambda: 1) is None
    assert report.attempt("c", 1, lambda: {"x": 1}) == {"x": 1}
    body = json.loads((tmp_path / "probe-check.json").read_text())
    assert body["a"] == "failed: ValueError: broken" and body["b"].startswith("left out") and body["c"] == {"x": 1}


REPORTED = {
    "driver.release": Value("580.1", "", "reported"),
    "compute.max_clock": Value(1.98e9, "Hz", "reported"),
    "memory.max_clock": Value(3.201e9, "Hz", "reported"),
    "memory.l2_size": Value(62_914_560, "bytes", "reported"),
}
BOUND = Value(6e-9, "s", "derived", note="an upper bound: below what was resolved (6 ns); on the device")


def fake_card(limits: dict[str, str]) -> FoundDevice:
    """As the inventory has it under the limits of the environment."""
    facts = DeviceFacts("cuda", 0, "NVIDIA H200", "sm_90", 1 << 37, "uuid")
    if not limits:
        return FoundDevice(facts, REPORTED, fingerprint="f")
    part = {
        "partition.multiprocessors": Value(int(limits[check.SM_LIMIT]), "", "derived"),
        "partition.memory": Value(int(limits[check.MEMORY_LIMIT_NAME]), "bytes", "derived"),
    }
    return FoundDevice(facts, {**REPORTED, **part}, fingerprint="another")


def fake_probe(index: int, steps: Any, cache: Path, *, full: bool, **environ: str) -> tuple[ProbeRun, float]:
    """A card with a fifth of the rates under limits; slower where nothing was compiled."""
    is_cold = not cache.exists()
    cache.mkdir(exist_ok=True)
    share = 0.2 if environ else 1.0
    values = {
        "memory.read_bandwidth": Value(4.6e12 * share, "bytes/s", "measured", spread=0.001, note="best"),
        "compute.matmul_bfloat16": Value(8e14 * share, "flop/s", "measured", spread=0.001, note="products"),
        "compute.dtypes": Value("bf16", "", "reported"),
    }
    if full:
        values |= {
            "scheduling.event_record": BOUND,
            "scheduling.event_wait": Value(0.0, "s", "measured", note="clamped"),
        }
    if environ:
        values["partition.multiprocessors"] = Value(int(environ[check.SM_LIMIT]), "", "reported")
    seconds = 15.0 if full else 2.9 if is_cold else 2.5
    return ProbeRun(values, seconds={"open": 1.0, "memory.read": 0.1, "compute.bfloat16": 0.4}), seconds


def records_of_a_run(folder: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> dict[tuple[str, str], Any]:
    """The whole script on the card above, and what is recorded of it."""

    def inventory() -> SimpleNamespace:
        limits = {name: os.environ[name] for name in (check.SM_LIMIT, check.MEMORY_LIMIT_NAME) if name in os.environ}
        return SimpleNamespace(devices=[fake_card(limits)], cuda_problem="")

    monkeypatch.setattr(check, "take_inventory", inventory)
    monkeypatch.setattr(check, "probe_once", fake_probe)
    monkeypatch.setattr(check, "NCU", "/bin/true")
    monkeypatch.setattr(check.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, NCU_TABLE, ""))
    monkeypatch.setattr(sys, "argv", ["check_probe", "--out", str(folder / "new"), *options])
    assert check.main() == 1, "this card lacks most of what has an anchor"
    monkeypatch.undo()
    (body,) = record_gpu.bodies_of([folder / "new" / "probe-check.json"])
    return {(one["case"], one["metric"]): one for one in record_gpu.records_in(body)}


def test_a_run_leaves_records_of_values_seconds_limits_and_counters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = records_of_a_run(tmp_path, monkeypatch)
    assert {bench["bench"] for bench in made.values()} == {"probe"}
    assert set(made) == {
        ("memory.read_bandwidth", "memory.read_bandwidth"), ("compute.matmul_bfloat16", "compute.matmul_bfloat16"),
        ("scheduling.event_record", "scheduling.event_record"),
        ("quick-cold", "seconds"), ("quick-warm", "seconds"), ("full", "seconds"),
        ("partition-24", "partition.multiprocessors"), ("partition-24", "memory.read_bandwidth"),
        ("partition-24", "compute.matmul_bfloat16"), ("partition-24", "partition.memory"),
        ("ncu-read", "bytes_over_model"), ("ncu-read", "l2_hit_rate"), ("ncu-copy", "bytes_over_model"), ("ncu-copy", "l2_hit_rate"),
    }  # fmt: skip
    assert (
        made["quick-cold", "seconds"]["samples"] == [2.9] * 3 and made["quick-warm", "seconds"]["samples"] == [2.5] * 3
    )
    assert made["quick-warm", "seconds"]["predicted"] == 3.0 and "open 1.00 s" in made["quick-warm", "seconds"]["note"]
    assert made["full", "seconds"]["value"] == 15.0
    assert made["memory.read_bandwidth", "memory.read_bandwidth"]["peer"]["value"] == 4613.6e9
    bound = made["scheduling.event_record", "scheduling.event_record"]
    assert bound["value"] == 6e-9 and bound["note"].startswith("an upper bound: below what was resolved (6 ns)")
    assert "scheduling.event_wait is 0.0, which nothing measures" in capsys.readouterr().out
    assert made["partition-24", "partition.multiprocessors"]["samples"] == [24.0] * 3
    assert "0.200 of the whole card's" in made["partition-24", "compute.matmul_bfloat16"]["note"]
    assert made["partition-24", "partition.memory"]["value"] == pytest.approx(8 << 30, rel=1e-5)
    assert made["partition-24", "partition.memory"]["note"].endswith("probed anew: another fingerprint")
    copied = made["ncu-copy", "bytes_over_model"]
    assert copied["value"] == pytest.approx(2_130_000_000 / (2 << 30), rel=1e-5) and "passed" in copied["note"]
    assert made["ncu-read", "l2_hit_rate"]["predicted"] == 0.0 and "FAILED" in made["ncu-read", "l2_hit_rate"]["note"]
    assert (made["ncu-copy", "l2_hit_rate"]["driver"], made["ncu-copy", "l2_hit_rate"]["clocks_mhz"]) == (
        "580.1",
        [1980, 3201],
    )


def test_what_had_no_time_or_one_run_is_told_and_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = records_of_a_run(tmp_path, monkeypatch, "--runs", "1", "--seconds", "20")
    assert {case for case, _ in made} == {"partition-24"}, "three looks at the inventory"
    said = capsys.readouterr().out
    assert "quick-cold seconds has 1 samples of 3" in said and "ncu-read: left out: 20 s left" in said
