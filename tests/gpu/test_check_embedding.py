"""The checks of tests/gpu/check_embedding.py on the CPU: they pass on real vectors and tell of wrong ones."""

from __future__ import annotations

import dataclasses
import importlib.util
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest
import torch
from benchmarks import record_gpu
from tests.agent.model.embedding_model import save_embedding_model

from dragoman.step_model import StepModel
from dragoman_agent.device.cpu import CpuDevice
from dragoman_agent.device.cpu_road import KV_DTYPES, NATIVE_FLOAT32, TORCH_FLOAT32
from dragoman_agent.engine.core import EngineCore
from dragoman_agent.engine.local import build_core
from dragoman_agent.model.source import ModelSource, open_model
from dragoman_agent.pal.plan import Plan
from dragoman_text import TextTokenizer

PLAN = Plan(
    device_kind="cpu",
    model_name="embedding",
    page_size=16,
    num_blocks=400,
    max_context_tokens=512,
    max_batch_tokens=256,
    max_num_seqs=32,
    max_num_waiting=64,
    num_threads=2,
    road=TORCH_FLOAT32,
    kv_dtype=KV_DTYPES[TORCH_FLOAT32],
    memory=(),
    step_model=StepModel((1,), (0,), (0.01,), 300.0, 0.01),
)


@pytest.fixture(scope="module")
def checks() -> ModuleType:
    path = Path(__file__).with_name("check_embedding.py")
    spec = importlib.util.spec_from_file_location("check_embedding", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    module.DEVICE = "cpu"
    module.NUM_WORDS = (1, 9, 40)
    return module


@contextmanager
def cores(source: ModelSource, road: str) -> Iterator[Callable[[], EngineCore]]:
    plan = dataclasses.replace(PLAN, road=road, kv_dtype=KV_DTYPES[road])
    device = CpuDevice()
    device.load(source, plan, lambda _: None)
    assert device.info["road"] == road
    yield lambda: build_core(device, source, plan)
    device.close()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("embedding")
    save_embedding_model(made, dtype=torch.bfloat16)
    return made


@pytest.fixture(scope="module")
def source(directory: Path) -> ModelSource:
    return open_model(str(directory), directory)


def ids_of(checks: ModuleType, source: ModelSource) -> list[list[int]]:
    encode = TextTokenizer.from_files(source.tokenizer).encode
    return [encode(text) for text in checks.texts()]


def test_the_checks_pass_on_our_vectors_and_tell_of_others(
    checks: ModuleType, directory: Path, source: ModelSource, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = ids_of(checks, source)
    exact = checks.reference(directory, ids, torch.float32)
    rounding = checks.reference(directory, ids, torch.bfloat16) - exact
    with cores(source, TORCH_FLOAT32) as core_of:
        ours, good, bad = checks.embed(core_of(), ids), checks.Report(), checks.Report()
        checks.check_company(good, core_of, ids, ours, rounding)
        checks.check_transformers(good, "transformers", exact, rounding, ours)
        checks.check_sentence_transformers(good, directory, source, core_of)
        assert good.num_off == 0 and capsys.readouterr().out.count("at most") == 3
        checks.check_company(bad, core_of, ids, ours[::-1], rounding)
        checks.check_transformers(bad, "transformers", exact, rounding, ours[::-1])
        assert bad.num_off == 4 and capsys.readouterr().out.count("OFF ") == 4
    card = {"driver": "1", "clocks_mhz": [1, 2], "device": "a card", "versions": {}}
    made = record_gpu.records_of({"model": "", "results": good.results, "command": "python x", **card})
    found = {(one["case"].removeprefix("qwen3-embedding-0.6b-"), one["metric"]): one for one in made}
    assert set(found) >= {
        ("transformers", "cosine"), ("transformers", "distance_over_rounding"),
        ("one-at-a-time", "distance_over_rounding"), ("beside-16-requests-in-decode", "distance_over_rounding"),
    }  # fmt: skip
    cosine, ratio = (found["transformers", metric] for metric in ("cosine", "distance_over_rounding"))
    assert len(cosine["samples"]) == len(ids) and cosine["value"] == min(cosine["samples"]) > 0.999
    assert len(ratio["samples"]) == checks.NUM_PARTS and "transformers 5" in ratio["note"]


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++, which is not installed")
def test_one_bit_that_differs_is_told(
    checks: ModuleType, source: ModelSource, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = ids_of(checks, source)
    with cores(source, NATIVE_FLOAT32) as core_of:  # computes each row by itself
        raw = checks.raw_vectors(core_of(), ids)
        report = checks.Report()
        checks.check_bits(report, core_of, ids, raw)
        assert report.num_off == 0 and report.results[0]["samples"] == [1.0] * len(ids)
        raw[3] = bytes([raw[3][0] ^ 1]) + raw[3][1:]
        checks.check_bits(report, core_of, ids, raw)
        assert report.num_off == 2 and report.results[-1]["samples"][3] == 0.0
    assert f"{len(ids) - 1} of {len(ids)} texts have the same bits" in capsys.readouterr().out
