"""The check of the overlap on the null device: it passes, and tells of a device that is waited for."""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from benchmarks import record_gpu

from dragoman_agent.device.null import NullDevice

QUICK = ["--device", "null", "--batch", "8", "--tokens", "16"]


@pytest.fixture(scope="module")
def check() -> ModuleType:
    path = Path(__file__).with_name("check_overlap.py")
    spec = importlib.util.spec_from_file_location("check_overlap", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    module.MIN_EARLY = 0.5  # this machine may be busy
    module.MAX_GAP = 0.5
    return module


def test_the_null_device_passes_whatever_the_bar_of_host_work(
    check: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--host-limit", "1e-9", "--out", str(tmp_path / "overlap.json"), "--traces", str(tmp_path / "traces")]
    assert check.main([*QUICK, *arguments]) == 0
    said = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("ok ") for line in said) == 2 * len(check.KINDS)
    assert [line.split(":")[0] for line in said if "the bar of 0 us is missed" in line] == ["ok plain"]
    seen = json.loads((tmp_path / "overlap.json").read_text())
    assert [one["kind"] for one in seen["overlap"]] == list(check.KINDS) and seen["answers_off"] == 0
    assert seen["overlap"][0]["host_seconds"] > seen["overlap"][0]["host_limit_seconds"] == 1e-9
    found = {(one["case"], one["metric"]): one for one in seen["results"]}
    metrics = ("gap_microseconds", "handed_over_early", "host_microseconds")
    assert set(found) == {
        ("answers", "identical_answers"),
        *((kind, metric) for kind in check.KINDS for metric in metrics),
    }
    assert all(len(one["samples"]) == 3 for (case, _), one in found.items() if case != "answers")
    assert found["answers", "identical_answers"]["samples"] == [1.0] * len(check.KINDS)
    assert (
        min(found["plain", "host_microseconds"]["samples"]) > 1
        and "bar 300 us" in found["plain", "host_microseconds"]["note"]
    )
    assert len(list((tmp_path / "traces").glob("*/*.json"))) == len(check.KINDS)
    card = {"driver": "1", "clocks_mhz": [1, 2], "device": "a card"}
    assert record_gpu.bodies_of([tmp_path / "overlap.json"]) == [], "no card was measured"
    assert len(record_gpu.records_of({**seen, **card})) == 3 * len(check.KINDS) + 1


def test_each_part_of_the_steps_is_a_sample(check: ModuleType) -> None:
    def step(number: int, begun: float, handed_over: float) -> dict[str, Any]:
        return {"ts": begun, "dur": 100.0, "args": {"step": number, "handed_over": handed_over}}

    gaps = [2.0] * 4 + [30.0] * 4 + [4.0] * 4
    steps = [step(0, 0.0, -1.0)]
    for number, gap in enumerate(gaps):
        end = steps[-1]["ts"] + 100.0
        steps.append(step(number, end + gap, end - 50.0 if gap < 30 else end + 1.0))
    pairs = list(itertools.pairwise(steps))
    gap, early, host = check.results_of("m", "filters", 32, pairs, [1e-4] * 4 + [3e-4] * 4 + [2e-4] * 4)
    assert gap["samples"] == pytest.approx([2.0, 30.0, 4.0]) and early["samples"] == [1.0, 0.0, 1.0]
    assert host["samples"] == pytest.approx([100.0, 300.0, 200.0]) and "bar" not in host["note"]
    assert f"m, batch 32: 12 steps of 0.100 ms in 3 parts; bar {100 * check.MAX_GAP:.0f} us" in gap["note"]


@pytest.mark.parametrize(
    ("early", "gap", "host", "is_late", "verdict"),
    [
        (0.99, 3e-6, 1.8e-3, False, "ok"),
        (0.99, 3e-6, 5e-3, True, "ok"),
        (0.0, 770e-6, 4.8e-3, True, "SLOW"),  # as on an H200
        (0.0, 770e-6, 4.8e-3, False, "OFF"),  # nothing in the text is waited for
        (0.0, 770e-6, 1.0e-3, True, "OFF"),
        (0.99, 770e-6, 1.0e-3, True, "OFF"),
    ],
)
def test_a_device_may_wait_only_for_a_host_without_time(
    check: ModuleType,
    early: float,
    gap: float,
    host: float,
    is_late: bool,
    verdict: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(check, "MAX_GAP", 0.03)
    assert check.judge(check.Overlap(120, early, gap, 4.1e-3), host, is_late=is_late) == verdict


def test_an_answer_that_differs_is_told(check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([{"a": [1, 2], "b": [3]}, {"a": [1, 4], "b": [3]}])
    monkeypatch.setattr(check, "play", lambda core, starts: next(answers))
    assert check.check_answers(lambda **_: None, "grammar", 2, 2) == 1


def test_a_device_that_is_waited_for_is_told(
    check: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NullDevice, "samples_late", False)
    assert check.main([*QUICK, "--traces", str(tmp_path)]) == 1
    off = {line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("OFF")}
    assert off == {"penalties:", "grammar:", "bad-words:"}


def test_a_run_that_is_ended_has_what_it_found(
    check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([1, 0])
    monkeypatch.setattr(check, "check_answers", lambda *_: next(answers))
    with pytest.raises(StopIteration):
        check.main([*QUICK, "--out", str(tmp_path / "new" / "overlap.json"), "--traces", str(tmp_path)])
    kept = json.loads((tmp_path / "new" / "overlap.json").read_text())
    assert (kept["overlap"], kept["answers_off"]) == ([], 1)
    assert kept["results"][0]["samples"] == [0.0, 1.0] and kept["results"][0]["note"].endswith("differing: plain")
