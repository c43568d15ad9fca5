"""The check of the tiers on the null device and on the CPU: it passes, and tells of blocks that stay away or come back wrong."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from benchmarks import record_gpu
from tests.agent.device.conformance.subjects import plan_of
from tests.agent.device.conformance.tiny_model import CONFIG, TinyModel

from dragoman.step_model import StepModel
from dragoman_agent.cache.block_pool import BlockPool
from dragoman_agent.device.base import Int32Array, UInt8Array
from dragoman_agent.device.cpu import CpuDevice
from dragoman_agent.device.null import NullDevice
from dragoman_agent.device.null_model import NullModel, default_null_plan
from dragoman_agent.engine.core import EngineCore
from dragoman_agent.engine.tiers import TierSizes
from dragoman_text import TextTokenizer

# As on an H200: a step costs what it costs to hand over, so that by these prices nothing is ever worth bringing.
FLAT = StepModel((1,), (0,), (0.01,), 1e6, 1.0)


@pytest.fixture(scope="module")
def check() -> ModuleType:
    path = Path(__file__).with_name("check_tiers.py")
    spec = importlib.util.spec_from_file_location("check_tiers", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    module.FIRST_ID, module.END_ID = 1, 70
    return module


@contextmanager
def engine(kind: str, model_name: str, tier: str, num_tokens: int, folder: str) -> Iterator[EngineCore]:
    """What benchmarks.tiers.engine gives, on the null device or the CPU, with a tiny model."""
    device: Any
    model: Any
    if kind == "null":
        device, model = NullDevice(), NullModel()
        plan = default_null_plan(model, page_size=64, num_blocks=40, max_num_seqs=4, step_model=FLAT)
        vocab_size = model.config.vocab_size
    else:
        device, model, vocab_size = CpuDevice(), TinyModel(), CONFIG.vocab_size
        plan = plan_of("cpu", "torch-float32", step_model=FLAT)
        plan = replace(plan, max_context_tokens=max(plan.max_context_tokens, num_tokens + 16))
    device.load(model, plan, lambda _: None)
    size = 64 * (device.block_format.block_bytes + 300)
    sizes = TierSizes(host_bytes=size) if tier == "host" else TierSizes(disk_bytes=size, disk_dir=folder)
    tokenizer = TextTokenizer.from_files(NullModel().tokenizer)
    core = EngineCore(device, tokenizer, b"d" * 32, plan, vocab_size=vocab_size, tier_sizes=sizes)
    try:
        yield core
    finally:
        assert core.tiers is not None
        core.tiers.close()
        device.close()


@pytest.mark.parametrize(("kind", "num_tokens"), [("null", 300), ("cpu", 40)])
def test_both_tiers_pass_where_bringing_does_not_pay(
    check: ModuleType, kind: str, num_tokens: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "engine", engine)
    assert check.main(["--device", kind, "--tokens", str(num_tokens)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == "ok" and sum("so that it computes" in line for line in said) == 2


def test_rates_and_round_trips_are_recorded(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "engine", engine)
    path = tmp_path / "new" / "tiers.json"
    assert check.main(["m", "--device", "cpu", "--tokens", "40", "--out", str(path)]) == 0
    seen = json.loads(path.read_text())
    found = {(one["case"], one["metric"]): one for one in seen["results"]}
    assert set(found) == {("m-host", "identical_answers"), ("m-disk", "identical_answers")}, "no link, no share of it"
    assert found["m-disk", "identical_answers"]["samples"] == [1.0] * 3 and seen["clocks_mhz"] == []
    assert check.round_trip_result("m", "disk", 40, ["disk: wrong"])["samples"] == [0.0, 1.0, 1.0]
    said = capsys.readouterr().out
    assert "of 20 copies of" in said and "GB/s" in said


def test_each_copy_is_a_sample_of_the_share_of_the_link(check: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    out = check.Copies("out", 1000, (4.0, 2.0, 3.0), (3.0, 3.0, 3.0), (1.25, 1.25))
    back = check.Copies("in", 1000, (1.0, 1.0, 1.0), (0.1, 0.1, 0.1), ())
    results = check.rate_results("m", (out, back), 1000.0)
    card = {"driver": "1", "clocks_mhz": [1, 2], "device": "a card", "versions": {}}
    made = record_gpu.records_of({"model": "", "results": results, "command": "python x", **card})
    assert [(one["case"], one["metric"], one["value"]) for one in made] == [
        ("m-host", "out_share_of_link", 0.333333), ("m-host", "in_share_of_link", 1.0),
    ]  # fmt: skip
    assert made[0]["peer"]["value"] == 0.8 and "peer" not in made[1]
    assert "hands a copy over in 100% of its seconds" in made[0]["note"]
    assert check.rate_results("m", (out, back), 0.0) == []
    assert check.check_rates((out, back), 1000.0) == []
    (problem,) = check.check_rates((out, back), 1001.0)
    assert problem.startswith("out runs at 50% of the link's rate, at least 50% was expected; the host hands")
    capsys.readouterr()


def off(check: ModuleType, tier: str, folder: Path, *, brings: bool = True) -> list[str]:
    with engine("null", "", tier, 300, str(folder)) as core:
        if brings:
            check.always_bring(core)
        problems: list[str] = check.check_round_trip(core, 300, tier)
    return problems


def test_blocks_that_stay_away_are_told(check: ModuleType, tmp_path: Path) -> None:
    problems = off(check, "host", tmp_path, brings=False)
    assert len(problems) == 3
    assert problems[0].startswith("host: 0 tokens came back in 0 blocks, 256 were cached; declined 1 times")


def test_blocks_that_come_back_wrong_are_told(
    check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = NullDevice.copy_in

    def copy_in(self: NullDevice, rows: Sequence[UInt8Array], blocks: Int32Array) -> Any:
        return whole(self, [row ^ 1 for row in rows], blocks)

    monkeypatch.setattr(NullDevice, "copy_in", copy_in)
    problems = off(check, "disk", tmp_path)
    assert len(problems) == 3 and "log-probabilities differ" in problems[0]


def test_a_device_that_still_holds_them_is_told(
    check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BlockPool, "evict", lambda self, num_blocks: 0)
    problems = off(check, "host", tmp_path)
    assert len(problems) == 3 and "the device still holds 4 blocks" in problems[0]
