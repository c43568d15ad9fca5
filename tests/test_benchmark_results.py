"""Every recorded measurement fits the schema, and the recorder refuses what does not."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def record() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmarks_record", BENCHMARKS / "record.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def good() -> dict[str, Any]:
    return {
        "bench": "cpu_peer",
        "case": "prefill",
        "metric": "ratio_to_llamacpp",
        "value": 2.0,
        "unit": "ratio",
        "samples": [1.9, 2.0, 2.1],
        "spread": 0.1,
        "predicted": 3.0,
        "peer": {"name": "llama.cpp", "value": 1.0},
        "commit": "0" * 40,
        "date": "2026-12-01",
        "device": "a CPU",
        "versions": {"numpy": "2.3.5"},
        "command": "dragoman bench cpu-peer --record",
    }


@pytest.mark.parametrize("path", sorted(BENCHMARKS.glob("results/*.json")), ids=lambda p: p.stem)
def test_recorded_results_fit_the_schema(path: Path, record: ModuleType) -> None:
    records = json.loads(path.read_text(encoding="utf-8"))
    assert records
    for one in records:
        record.validate(one)
    keys = [record.key(one) for one in records]
    assert len(keys) == len(set(keys)), "one record a (bench, case, metric)"


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("samples", [1.0, 2.0], "samples"),
        ("samples", [2.0, float("nan"), 2.0], "samples"),
        ("value", 5.0, "outside its samples"),
        ("value", "2", "field value"),
        ("commit", "abc", "commit"),
        ("date", "yesterday", "date"),
        ("device", "", "device is empty"),
        ("spread", -1, "spread"),
        ("peer", {"name": "x"}, "peer"),
        ("versions", {"numpy": 2}, "versions"),
        ("raw_trace", [], "unknown field raw_trace"),
    ],
)
def test_a_bad_record_is_refused(
    field: str, value: Any, message: str, good: dict[str, Any], record: ModuleType
) -> None:
    with pytest.raises(record.RecordError, match=message):
        record.validate(good | {field: value})


def test_a_missing_field_is_refused(good: dict[str, Any], record: ModuleType) -> None:
    del good["command"]
    with pytest.raises(record.RecordError, match="command is missing"):
        record.validate(good)


def test_saving_replaces_the_older_record_of_a_key(tmp_path: Path, good: dict[str, Any], record: ModuleType) -> None:
    record.save("cpu", [good, good | {"case": "decode-b1"}], tmp_path)
    record.save("cpu", [good | {"value": 2.1}], tmp_path)
    stored = json.loads((tmp_path / "cpu.json").read_text())
    assert [(r["case"], r["value"]) for r in stored] == [("decode-b1", 2.0), ("prefill", 2.1)]
    assert [p.name for p in tmp_path.iterdir()] == ["cpu.json"]


def test_a_made_record_carries_its_surroundings(record: ModuleType) -> None:
    made = record.make_record(
        bench="b",
        case="c",
        metric="m",
        unit="s",
        samples=[3.0, 1.0, 2.0],
        predicted=None,
        command="x",
        packages=("numpy",),
    )
    assert made["value"] == 2.0
    assert made["spread"] == 1.0
    assert set(made["versions"]) == {"python", "numpy"}
