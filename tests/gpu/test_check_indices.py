"""check_indices.py on counters that are made up: its verdicts, its samples, and what is recorded of them."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import record_gpu

from dragoman_agent.pal.counters import Reading


def load() -> Any:
    spec = importlib.util.spec_from_file_location("check_indices", Path(__file__).with_name("check_indices.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for their own
    spec.loader.exec_module(module)
    return module


check = load()
COPY = check.Load(
    "copy", lambda: None, 2e9, {"dram_ratio": (0.8, 1.0), "sm_ratio": (0.0, 1.0), "derived_l2_hit_ratio": (0.0, 0.15)}
)


class Running:
    """In place of the load: 1,000 calls a second were counted."""

    def __init__(self, *_: object) -> None:
        pass

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def calls_per_second(self) -> float:
        return 1000.0


class Gpm:
    """Counters that have answered three times after a first look; the multiprocessors' they may not read."""

    def __init__(self) -> None:
        self.left = [None, *(Reading("gpm", 0.7, dram_bytes_per_second=rate, dram_ratio=rate / 2.2e12) for rate in (1.9e12, 2.0e12, 1.95e12))]  # fmt: skip

    def read(self) -> Reading | None:
        return self.left.pop(0)


def test_readings_under_a_load_are_judged_and_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "Runner", Running)
    monkeypatch.setattr(check.time, "sleep", lambda _: None)
    measured = check.measure(COPY, {"gpm": Gpm(), "peak": 2.2e12}, torch.device("cpu"))
    assert measured["gpm"]["verdict"] == {
        "dram_ratio": "ok: 0.8864 expected 0.8..1", "sm_ratio": "missing: None expected 0..1",
        "derived_l2_hit_ratio": "ok: 0.025 expected 0..0.15",
    }  # fmt: skip
    body = {"loads": {"copy": measured}, "missing": {}, "seconds": 1.0}
    assert check.show(body) == 0
    card = {"device": "a card", "driver": "1", "clocks_mhz": [1, 2], "versions": {"torch": "2"}}
    (tmp_path / "indices.json").write_text(json.dumps({**card, **body}))
    (kept,) = record_gpu.bodies_of([tmp_path / "indices.json"])
    capsys.readouterr()
    made = {one["metric"]: one for one in record_gpu.records_in(kept)}
    assert set(made) == {"dram_ratio", "derived_l2_hit_ratio"}
    assert "left out: indices copy sm_ratio: missing" in capsys.readouterr().out
    assert made["derived_l2_hit_ratio"]["samples"] == pytest.approx([0.05, 0.0, 0.025])
    assert (made["dram_ratio"]["bench"], made["dram_ratio"]["case"], made["dram_ratio"]["unit"]) == (
        "indices",
        "copy-gpm",
        "share",
    )
    assert made["dram_ratio"]["note"] == "ok: 0.8864 expected 0.8..1" and made["dram_ratio"]["driver"] == "1"


def test_a_value_out_of_its_range_is_off(capsys: pytest.CaptureFixture[str]) -> None:
    verdict = check.judge({"dram_ratio": 0.5}, {"dram_ratio": (0.8, 1.0)})
    assert check.show({"loads": {"copy": {"gpm": {"verdict": verdict}}}, "missing": {}, "seconds": 1.0}) == 1
    assert capsys.readouterr().out.startswith("OFF copy gpm dram_ratio OUT OF RANGE")
