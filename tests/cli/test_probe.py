"""`dragoman probe` and `doctor` on machines that a test plays: every device with its reason, values by dimension."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tests.cli.command import Dragoman
from tests.fakes.cuda_driver import H200, RTX_4060_LAPTOP, CUresult, FakeDriver
from tests.fakes.machines import (
    AMD_CARD,
    AMD_LISTED,
    CUDA_13,
    INTEL_GRAPHICS,
    NVIDIA_CARD,
    Machine,
    with_cards,
    without_cards,
)

from dragoman_agent.pal import attributes
from dragoman_agent.pal import probe as probe_module
from dragoman_agent.pal.matrix import SCHEMA_FILE
from dragoman_agent.pal.profile import ProfileError, Value
from dragoman_agent.pal.runtime import Runtime

MEASURED = {
    "memory.read_bandwidth": Value(4.614e12, "bytes/s", "measured", spread=0.012, note="read-only stream"),
    "memory.read_by_size": Value((6.97e11, 4.5e12), "bytes/s", "measured", labels=("2097152", "536870912")),
    "scheduling.graph_node": Value(5.5e-7, "s", "measured", spread=0.02),
    "scheduling.atomics": Value((1.2e9,), "operations/s", "measured", labels=("32",)),
}


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """This process' machine is the given one; measuring gives the figures above, or an error."""

    def on(machine: Machine, error: str = "") -> list[dict[str, Any]]:
        asked: list[dict[str, Any]] = []

        def measure_cuda(index: int, *_: Any, **options: Any) -> dict[str, Value]:
            asked.append({"index": index, **options})
            if error:
                raise ProfileError(error)
            return MEASURED

        host = machine.host(tmp_path / "machine")
        monkeypatch.setattr(attributes, "this_host", lambda: host)
        monkeypatch.setattr(attributes, "installed_runtime", lambda: CUDA_13)
        monkeypatch.setattr(probe_module, "measure_cuda", measure_cuda)
        monkeypatch.setattr(probe_module, "measure_cpu", lambda *_, **__: {})
        return asked

    return on


def test_table_by_dimension_with_every_device(dragoman: Dragoman, play: Any, tmp_path: Path) -> None:
    play(with_cards(RTX_4060_LAPTOP.but(link=(1, 4, 4, 8)), pci=(INTEL_GRAPHICS, NVIDIA_CARD)))
    text = dragoman("probe", "--cache-dir", str(tmp_path)).stdout
    assert "Intel integrated GPU [8086:a7a0]" in text
    assert "the installed torch was built for CUDA 13.0, this card needs one for Intel GPUs (XPU)" in " ".join(
        text.split()
    )
    assert "the PCIe link runs at x4 of x8" in text
    profile = text.split("profile of NVIDIA GeForce RTX 4060 Laptop GPU")[1].split("\nprofile of")[0]
    places = [profile.index(f"\n{title} ") for title in ("compute", "memory", "scheduling", "limits")]
    assert places == sorted(places)
    lines = {line.split()[0]: line.split() for line in profile.splitlines() if line.startswith("  ") and line.strip()}
    assert lines["memory.read_bandwidth"][1:5] == ["4.61", "TB/s", "measured", "1.2%"]
    assert lines["scheduling.graph_node"][1:4] == ["550", "ns", "measured"]
    assert lines["compute.max_clock"][1:4] == ["2.37", "GHz", "reported"]
    assert lines["compute.dependent_launch"][1:3] == ["no", "derived"]
    assert "536870912: 4.5 TB/s" in profile
    assert "32: 1.2 Goperations/s" in profile
    assert profile.index("link.max_width") < profile.index("\nscheduling "), "links belong to the memory dimension"


def test_json_keeps_to_the_schema(dragoman: Dragoman, play: Any, tmp_path: Path) -> None:
    play(with_cards(H200))
    matrix = json.loads(dragoman("probe", "--json", "--cache-dir", str(tmp_path)).stdout)
    jsonschema.Draft202012Validator(json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))).validate(matrix)
    profile = matrix["profiles"][0]
    assert profile["values"]["memory.read_bandwidth"]["provenance"] == "measured"
    assert profile["fingerprint"] == matrix["devices"][0]["fingerprint"]


def test_full_and_fresh_reach_the_measurement(dragoman: Dragoman, play: Any, tmp_path: Path) -> None:
    asked = play(with_cards(H200))
    dragoman("probe", "--cache-dir", str(tmp_path))
    dragoman("probe", "--cache-dir", str(tmp_path))
    assert [entry["full"] for entry in asked] == [False], "the second was read from the cache"
    dragoman("probe", "--full", "--cache-dir", str(tmp_path))
    dragoman("probe", "--fresh", "--cache-dir", str(tmp_path))
    assert [entry["full"] for entry in asked] == [False, True, False]


def test_a_card_that_cannot_be_measured_is_listed_and_the_rest_goes_on(
    dragoman: Dragoman, play: Any, tmp_path: Path
) -> None:
    play(with_cards(H200), error="GPU 0 could not be measured (out of memory); run `dragoman doctor`")
    done = dragoman("probe", "--cache-dir", str(tmp_path))
    assert done.returncode == 0
    assert "could not be measured (out of memory)" in " ".join(done.stdout.split())


def test_an_old_driver_is_never_measured(dragoman: Dragoman, play: Any, tmp_path: Path) -> None:
    asked = play(with_cards(H200, driver=FakeDriver(H200, version=12040)))
    text = " ".join(dragoman("probe", "--cache-dir", str(tmp_path)).stdout.split())
    assert asked == []
    assert "update the NVIDIA driver" in text


def test_debug_log_has_a_line_a_step_on_stderr_and_none_on_stdout(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "dragoman_cli.main", "probe", "--json", "--cache-dir", str(tmp_path)]
    done = subprocess.run([*command, "--log-level", "debug"], capture_output=True, text=True, timeout=60, check=True)
    json.loads(done.stdout)
    for step in ("pci", "driver", "cpu", "measure cpu 0"):
        assert f"step {step}: start" in done.stderr
    assert "step measure cpu 0: end, " in done.stderr


def test_a_wrong_level_names_the_right_ones(dragoman: Dragoman) -> None:
    done = dragoman("probe", "--log-level", "loud")
    assert done.returncode == 2
    assert "'debug'" in done.stderr


def test_doctor_names_what_is_wrong_with_the_remedy(dragoman: Dragoman, play: Any, tmp_path: Path) -> None:
    play(without_cards(CUresult.CUDA_ERROR_SYSTEM_DRIVER_MISMATCH))
    checks = json.loads(dragoman("doctor", "--json", "--cache-dir", str(tmp_path)).stdout)
    gpu = next(check for check in checks if check["name"] == "gpu")
    assert (gpu["level"], gpu["fix"]) == ("warn", "reboot after a driver update")
    assert gpu["finding"] == "the NVIDIA driver answered CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803)"


def test_doctor_takes_a_remark_apart_and_no_backend_for_no_fault(dragoman: Dragoman, play: Any, tmp_path: Path) -> None:
    play(with_cards(RTX_4060_LAPTOP.but(link=(1, 4, 4, 8)), pci=(INTEL_GRAPHICS, NVIDIA_CARD)))
    checks = json.loads(dragoman("doctor", "--json", "--cache-dir", str(tmp_path)).stdout)
    found = {(check["name"], check["level"]): check for check in checks if check["name"].startswith("device")}
    assert found["device cuda", "warn"]["finding"] == "the PCIe link runs at x4 of x8"
    assert found["device cuda", "warn"]["fix"].startswith("put the card into a wider slot")
    assert found["device xpu", "ok"]["finding"].endswith(
        "the installed torch was built for CUDA 13.0, this card needs one for Intel GPUs (XPU)"
    )
    assert not any(check["name"] == "gpu" for check in checks)


def test_an_untested_backend_is_called_so_everywhere(
    dragoman: Dragoman, play: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(Machine(FakeDriver(has_library=False), pci=(AMD_CARD,), torch=[AMD_LISTED]))
    monkeypatch.setattr(attributes, "installed_runtime", lambda: Runtime("", hip="6.4"))
    monkeypatch.setattr(probe_module, "measure_torch", lambda kind, index: MEASURED)
    text = " ".join(dragoman("probe", "--cache-dir", str(tmp_path)).stdout.split())
    assert "hip (untested)" in text
    assert "AMD Instinct MI300X: the hip backend is untested" in text
    matrix = json.loads(dragoman("probe", "--json", "--cache-dir", str(tmp_path)).stdout)
    jsonschema.Draft202012Validator(json.loads(SCHEMA_FILE.read_text())).validate(matrix)
    card = matrix["devices"][0]
    assert card["kind"] == "hip" and card["chosen"] and "untested" in card["reason"]
    assert card["capabilities"]["tested"] is False and card["capabilities"]["launch"]["group_threads"] == 64
    bandwidth = next(each["bandwidth"] for each in card["capabilities"]["memory"] if each["name"] == "device")
    assert bandwidth == {"value": 4.614e12, "unit": "bytes/s", "provenance": "measured"}
    checks = json.loads(dragoman("doctor", "--json", "--cache-dir", str(tmp_path)).stdout)
    found = [check for check in checks if check["name"] == "device hip"]
    assert found and all(check["level"] == "warn" and "untested" in check["finding"] for check in found)
