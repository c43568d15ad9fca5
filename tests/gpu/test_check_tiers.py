"""The check of the tiers on the null device and on the CPU: it passes, and tells of blocks that stay away or come back wrong."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
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
