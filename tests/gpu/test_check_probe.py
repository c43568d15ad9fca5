"""The arithmetic of check_probe.py: differences between runs, verdicts beside anchors, the profile of several runs."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

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


def test_counters_are_compared_with_the_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    table = (
        '==PROF== Connected\n"ID","Kernel Name","dram__bytes_read.sum","dram__bytes_write.sum","lts__t_sector_hit_rate.pct"\n'
        '"","","byte","byte","%"\n"0","copy_8","1,080,000,000","1,050,000,000","51.5"\n'
    )
    monkeypatch.setattr(check, "NCU", "/bin/true")
    monkeypatch.setattr(check.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, table, ""))
    body = check.against_contract("copy")
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
