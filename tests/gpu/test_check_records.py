"""What the checks and benchmarks of a card find becomes records: cases, units, samples, the worst where each must hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks import card, record_gpu, sampling_gpu, submit_gpu
from benchmarks.card import Result, keep, result
from tests.gpu import check_determinism, check_kv_fp8
from tests.gpu.check_kv_fp8 import Read

FOUND = {"device": "a card", "driver": "1", "clocks_mhz": [1, 2], "versions": {"torch": "2"}}
Made = dict[tuple[str, str], dict[str, Any]]


def recorded(results: list[Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str = "python x") -> Made:
    """As records by (case, metric), through a file."""
    monkeypatch.setattr(card, "environment", lambda index: FOUND)
    keep(tmp_path / "new" / "x.json", "", 0, results, command=command)
    (body,) = record_gpu.bodies_of([tmp_path / "new" / "x.json"])
    made = record_gpu.records_of(body)
    assert all(one["command"] == command and one["device"] == "a card" and one["driver"] == "1" for one in made)
    return {(one["case"], one["metric"]): one for one in made}


def test_rows_have_a_sample_a_model_and_the_worst_is_the_value(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    models = ("a", "b", "c")
    values: dict[str, Any] = {f"{m} load seconds": 1.0 for m in models}
    for label in check_determinism.ROW_CASES:
        values |= {f"{m} {label}": {"identical_rows": 1.0, "rows": 56} for m in models}
    values["b 64 together"] = {"identical_rows": 0.75, "rows": 448, "first": "sequence 3"}
    made = recorded(check_determinism.row_results(values, models), monkeypatch, tmp_path)
    assert [case for case, _ in made] == ["1", "8", "64", "256", "512", "chunks", "re-entry"]
    worst = made["64", "identical_rows"]
    assert worst["value"] == 0.75 and worst["samples"] == [1.0, 0.75, 1.0] and worst["unit"] == "share"
    assert "value: the min of the samples" in worst["note"] and "56 of a, 448 of b" in worst["note"]
    assert (worst["bench"], worst["predicted"]) == ("deterministic", 1.0)


def test_rows_of_too_few_models_are_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {"a 8 together": {"identical_rows": 1.0, "rows": 56}, "c 8 together": {"identical_rows": 1.0, "rows": 56}}
    assert recorded(check_determinism.row_results(values, ("a", "b", "c")), monkeypatch, tmp_path) == {}
    assert "deterministic 8 has 2 samples of 3" in capsys.readouterr().out


def test_cost_has_the_milliseconds_of_both(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    usual = {"decode-1x200": [1.0, 1.0, 2.0], "decode-256x1024": [5.0, 5.0, 5.0]}
    fixed = {"decode-1x200": [1.2, 1.1, 2.6]}
    made = recorded(check_determinism.cost_results("qwen3-0.6b", 28, usual, fixed), monkeypatch, tmp_path)
    (one,) = made.values()
    assert (one["case"], one["metric"], one["value"]) == ("qwen3-0.6b-decode-1x200", "cost", 1.2)
    assert one["samples"] == [1.2, 1.1, 1.3] and one["predicted"] == 1.12
    assert "usual 1.000, 1.000, 2.000 ms; deterministic 1.200, 1.100, 2.600 ms" in one["note"]
    assert "28 layers" in one["note"]


def one_read(rng: np.random.Generator, places: int) -> Read:
    best = np.stack([rng.integers(0, 9, places), rng.integers(9, 20, places)], axis=1)
    leads = np.where(np.arange(places) % 2, -2.0, -0.6)
    return Read(rng.normal(-1.0, 0.1, places), best, np.stack([np.full(places, -0.5), leads], axis=1))


def test_eight_bits_have_a_sample_a_text(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng, report = np.random.default_rng(0), check_determinism.Report()
    wide = [one_read(rng, places) for places in (40, 60, 100)]
    moved = [Read(one.logprobs - 0.01 * at, one.best.copy(), one.best_logprobs) for at, one in enumerate(wide)]
    moved[2].best[0, 0] = 10  # not a clear place
    check_kv_fp8.compare(report, check_kv_fp8.EMBEDDED, wide, moved, trained=True)
    assert report.num_off == 0 and "ok  smollm2-135m: best token the same in 99.50% of 200" in capsys.readouterr().out
    made = recorded(report.results, monkeypatch, tmp_path)
    assert {metric for _, metric in made} == set(check_kv_fp8.UNITS)
    top = made["smollm2-135m", "top1_agreement"]
    assert top["samples"] == [1.0, 1.0, 0.99] and "0.995 of all 200 places of 3 texts" in top["note"]
    assert made["smollm2-135m", "clear_agreement"]["samples"] == [1.0, 1.0, 1.0]
    assert made["smollm2-135m", "mean_logprob_moved"]["samples"] == pytest.approx([0.0, 0.01, 0.02])
    assert made["smollm2-135m", "nll_fp8"]["unit"] == "nats"
    moved[0].best[1::2, 0] = 10
    check_kv_fp8.compare(report, check_kv_fp8.EMBEDDED, wide, moved, trained=True)
    assert report.num_off == 1


def test_speed_of_eight_bits_stands_beside_its_prediction(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    times = {"bf16": {"32x1024": [2.2, 2.4, 2.6], "256x1024": [9.0] * 3}, "fp8": {"32x1024": [2.0, 2.0, 2.0]}}
    predicted = {"bf16": {"32x1024": 2.5e-3}, "fp8": {"32x1024": 2e-3}}
    made = recorded(check_kv_fp8.speed_results("qwen3-0.6b", 28, times, predicted), monkeypatch, tmp_path)
    (one,) = made.values()
    assert (one["case"], one["metric"]) == ("qwen3-0.6b-decode-32x1024", "speedup")
    assert one["value"] == 1.2 and one["predicted"] == 1.25 and "fp8 2.000, 2.000, 2.000 ms" in one["note"]


def test_drawing_has_torch_as_its_peer_where_that_was_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = sampling_gpu.results_of(
        "top-k 40, top-p",
        32,
        {"device": [1.0, 2.0, 3.0], "host": [7.0, 8.0, 9.0]},
        {"device": 829.0, "host": 2046.0},
        "n",
    )
    found += sampling_gpu.results_of("plain", 1, {"device": [4.0, 4.0, 4.0]}, {}, "in the step's graph")
    made = recorded(found, monkeypatch, tmp_path)
    device, host = (made["top-k-40-top-p-b32", f"{where}_microseconds"] for where in ("device", "host"))
    assert device["value"] == 2.0 and device["peer"]["value"] == 829.0 and device["peer"]["name"].startswith("torch-")
    assert (device["predicted"], host["predicted"], host["peer"]["value"]) == (55.0, 130.0, 2046.0)
    assert "peer" not in made["plain-b1", "device_microseconds"] and len(made) == 3
    assert all(one["bench"] == "sampling" and one["unit"] == "us" for one in made.values())


def test_submit_has_a_sample_a_third_of_the_steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    parts = {"_run": [5e-5] * 300, "submit": [1e-4] * 100 + [2e-4] * 100 + [3e-4] * 100}
    (one,) = recorded([submit_gpu.submit_result("m", 256, parts, early=True)], monkeypatch, tmp_path).values()
    assert (one["bench"], one["case"], one["samples"]) == ("submit", "m-b256-early", [100.0, 200.0, 300.0])
    assert "kernels start early" in one["note"] and "run 50" in one["note"]


def test_the_value_is_the_worst_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    results = [
        result("b", "c", "low", "share", [3.0, 1.0, 2.0], value="min"),
        result("b", "c", "high", "ratio", [3.0, 1.0, 2.0], value="max"),
        result("b", "c", "middle", "1", [3.0, 1.0, 2.0]),
    ]
    made = recorded(results, monkeypatch, tmp_path)
    assert [made["c", metric]["value"] for metric in ("low", "high", "middle")] == [1.0, 3.0, 2.0]
    assert made["c", "high"]["note"] == "value: the max of the samples" and "note" not in made["c", "middle"]


def test_what_no_card_measured_is_not_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keep(tmp_path / "x.json", "", None, [result("b", "c", "m", "us", [1, 2, 3])], command="python x")
    assert json.loads((tmp_path / "x.json").read_text())["results"][0]["samples"] == [1.0, 2.0, 3.0]
    assert record_gpu.bodies_of([tmp_path / "x.json"]) == []
    assert "not of a card" in capsys.readouterr().out


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe{}"])
def test_a_damaged_file_is_named_in_one_line_and_nothing_is_recorded(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "good.json").write_text(json.dumps({"results": [], "clocks_mhz": [1], **FOUND}))
    (tmp_path / "bad.json").write_bytes(text)
    with pytest.raises(SystemExit, match=r"bad\.json: is damaged .*nothing is recorded"):
        record_gpu.bodies_of([tmp_path / "good.json", tmp_path / "bad.json"])
    with pytest.raises(SystemExit, match=r"none\.json: cannot be read"):
        record_gpu.bodies_of([tmp_path / "none.json"])


@pytest.mark.parametrize("text", ["null", "[1, 2]", '"results"'])
def test_what_is_no_object_is_left(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other.json").write_text(text)
    assert record_gpu.bodies_of([tmp_path / "other.json"]) == []
    assert "holds no raw results" in capsys.readouterr().out
