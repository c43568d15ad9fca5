"""A benchmark that is ended on a GPU machine has kept what it had measured, as `benchmarks.record_gpu` takes it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from benchmarks import card, embed_gpu, engine_gpu, gpu_checks, record_gpu, small_card, start_gpu

SAMPLES = [1.0, 1.1, 1.2]


class EndedError(Exception):
    """The time is over."""


class NoDevice:
    def __init__(self) -> None:
        self.info = {"road": "none"}

    def load(self, *_: object) -> None:
        pass


def until_over(values: Iterable[Any]) -> Iterator[Any]:
    yield from values
    raise EndedError


def giving(*values: Any) -> Callable[..., Any]:
    """Each call gives the next value, then the time is over."""
    left = until_over(values)
    return lambda *_: next(left)


Results = list[dict[str, Any]]
Kept = Callable[..., Results]


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Kept:
    """Runs a benchmark, whose parts are what is given, until the time is over; the results in `file` under --out."""
    found = {"device": "a card", "driver": "1", "clocks_mhz": [1, 2], "versions": {"torch": "2"}}
    monkeypatch.setattr(card, "environment", lambda index: found)
    steps = SimpleNamespace(decode_step_seconds=lambda *_: 1.0, prefill_seconds=lambda *_: 1.0)
    here = SimpleNamespace(
        source=SimpleNamespace(config=SimpleNamespace(vocab_size=9)),
        profile=SimpleNamespace(device=SimpleNamespace(index=0)),
        plan=SimpleNamespace(step_model=steps, max_batch_tokens=4096),
    )

    def run(module: ModuleType, parts: dict[str, Any], file: str, *arguments: str) -> Results:
        usual = {
            "setup": lambda *_: here,
            "tuned": lambda _: {"m": here},
            "CudaDevice": NoDevice,
            "run": lambda *_: None,
        }
        usual["build_core"] = lambda *_: None
        for name, part in {**{name: one for name, one in usual.items() if hasattr(module, name)}, **parts}.items():
            monkeypatch.setattr(module, name, part)
        out = tmp_path / "new" / file
        monkeypatch.setattr(
            sys, "argv", ["-", "m", *arguments, "--out", str(out.parent if module is small_card else out)]
        )
        with pytest.raises(EndedError):
            module.main()
        (body,) = record_gpu.bodies_of([out])
        assert len(record_gpu.records_of(body)) == len(body["results"]) > 0
        results: Results = body["results"]
        return results

    return run


def result(bench: str, case: str, metric: str) -> dict[str, Any]:
    return {"bench": bench, "case": case, "metric": metric, "samples": SAMPLES, "note": ""}


def test_engine(kept: Kept) -> None:
    pair = (result("decode", "b1", "ms_per_step"), engine_gpu.host_result(1, SAMPLES, 0.95))
    step, host = kept(engine_gpu, {"decode": giving(pair)}, "qwen.json")
    assert step["case"] == "b1" and step["predicted"] == 1e3
    assert (host["bench"], host["case"], host["predicted"]) == ("host_step", "b1", engine_gpu.HOST_PREDICTED[1])


def test_embeddings(kept: Kept) -> None:
    found = [result("embed", case, "tokens_per_second") for case in ("512x128", "64x512")]
    assert [one["case"] for one in kept(embed_gpu, {"embed": giving(*found)}, "embed.json")] == ["512x128", "64x512"]


def test_small_card(kept: Kept) -> None:
    turns = until_over([{"prefill": {"own": [2.0, 3.0, 4.0], "whole": [1.0, 2.0, 2.0]}}])
    parts = dict.fromkeys(("Loaded", "whole_plan", "show"), lambda *_: None) | {"rates": lambda *_: turns}
    parts["plan_result"] = giving(result("small_card", "plan", "changed_fields"))
    plan, one = kept(small_card, parts, "small_card-m.json")
    assert plan["metric"] == "changed_fields"
    assert one["samples"] == [2.0, 1.5, 2.0] and one["note"].startswith("1.500: own plan 3, whole card's plan 2")


def test_start(kept: Kept) -> None:
    """Three rounds, and ended in the fourth."""
    starts = [(float(n), {"agent listens": 0.5 + n}) for n in range(1, 11)]
    parts = {"start": giving(*starts), "bare": giving(*[(0.5, {})] * 4), "compile_packages": lambda: None}
    bare, *results = kept(start_gpu, parts, "start.json", "--device", "null", "--rounds", "5")
    assert (bare["case"], bare["metric"], bare["samples"]) == ("bare", "seconds_to_device", [0.5, 0.5, 0.5])
    assert [(one["case"], one["samples"]) for one in results] == [
        ("first", [1.0, 4.0, 7.0]), ("cold", [2.0, 5.0, 8.0]), ("warm", [3.0, 6.0, 9.0]),
    ]  # fmt: skip
    assert results[0]["note"] == "agent listens 4.50 s"


def test_verdicts_of_checks_are_records_a_sample_a_case(tmp_path: Path) -> None:
    logs = {
        "facts": "ok a\nok b\nok c\nvalues 3\n", "ops": "norm 1e-3 ok\nsilu 1e-3 ok\nrope 9e-1 TOO LARGE\n", "short": "ok\n",
        "broken": "",
    }  # fmt: skip
    runner = gpu_checks.Runner(tmp_path, 30.0)
    codes = {"facts": 0, "ops": 1, "short": 0, "broken": 1}
    programs = {name: f"print({log!r}, end=''); raise SystemExit({codes[name]})" for name, log in logs.items()}
    runner.run([gpu_checks.Check(name, (sys.executable, "-S", "-c", code)) for name, code in programs.items()])
    runner.verdicts["late"] = {"verdict": "no time", "seconds": 0.0, "problem": ""}
    (tmp_path / "checks.json").write_text(json.dumps(runner.verdicts))
    found = {"device": "a card", "driver": "1", "clocks_mhz": [1, 2], "versions": {"torch": "2"}}
    (tmp_path / "environment.json").write_text(json.dumps(found))
    (body,) = record_gpu.bodies_of(sorted(tmp_path.glob("*.json")))
    made = {one["case"]: one for one in record_gpu.records_in(body)}
    assert set(made) == {"facts", "ops", "all"} and all(one["bench"] == "checks" for one in made.values())
    assert made["facts"]["samples"] == [1.0] * 3 and made["facts"]["metric"] == "passed"
    assert "3 of 3 cases good" in made["facts"]["note"] and made["facts"]["note"].endswith("a; b; c")
    assert sorted(made["ops"]["samples"]) == [0.0, 1.0, 1.0] and "exit 1" in made["ops"]["note"]
    assert "rope 9e-1 TOO LARGE; norm" in made["ops"]["note"], "what is off comes first"
    assert sorted(made["all"]["samples"]) == [0.0, 0.0, 1.0, 1.0] and "no time: late" in made["all"]["note"]
    assert made["all"]["device"] == "a card"


def test_files_that_are_no_results_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, body in (("timings", {"seconds": {}}), ("checks", {"sticky": {}}), ("embed", {"results": []})):
        (tmp_path / f"{name}.json").write_text(json.dumps(body))
    assert record_gpu.bodies_of(sorted(tmp_path.iterdir())) == [{"results": []}]
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == [
        str(tmp_path / "checks.json"), str(tmp_path / "timings.json"),
    ]  # fmt: skip


def test_requests_without_something_have_a_record_of_their_own() -> None:
    assert record_gpu.case_of("qwen3-8b", "nano", "nano") == "qwen3-8b"
    assert record_gpu.case_of("qwen3-8b", "nano", "nano-without-lists") == "qwen3-8b-without-lists"
