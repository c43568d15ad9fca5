"""The checks of tests/gpu/check_embedding.py on the CPU: they pass on real vectors and tell of wrong ones."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tests.agent.model.embedding_model import save_embedding_model

from dragoman.step_model import StepModel
from dragoman_agent.device.cpu import CpuDevice
from dragoman_agent.device.cpu_road import KV_DTYPES, TORCH_FLOAT32
from dragoman_agent.engine.core import EngineCore
from dragoman_agent.engine.local import build_core
from dragoman_agent.model.source import open_model
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


def test_the_checks_pass_on_our_vectors_and_tell_of_others(
    checks: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_embedding_model(tmp_path, dtype=torch.bfloat16)
    source = open_model(str(tmp_path), tmp_path)
    device = CpuDevice()
    device.load(source, PLAN, lambda _: None)

    def core_of() -> EngineCore:
        return build_core(device, source, PLAN)

    encode = TextTokenizer.from_files(source.tokenizer).encode
    ids = [encode(text) for text in checks.texts()]
    ours = checks.embed(core_of(), ids)
    assert checks.check_company(core_of, ids, ours) == 0
    assert checks.check_transformers(tmp_path, ids, ours) == 0
    assert checks.check_sentence_transformers(tmp_path, source, core_of) == 0
    assert capsys.readouterr().out.count("at least") >= 3
    assert checks.check_company(core_of, ids, ours[::-1]) == 2
    assert checks.check_transformers(tmp_path, ids, ours[::-1]) == 2
    device.close()
