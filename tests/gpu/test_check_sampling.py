"""The checks of tests/gpu/check_sampling.py on the CPU: they pass on the real sampler and tell of a wrong one."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from dragoman_agent.device.base import SamplingBatch


@pytest.fixture(scope="module")
def checks() -> ModuleType:
    path = Path(__file__).with_name("check_sampling.py")
    spec = importlib.util.spec_from_file_location("check_sampling", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    module.NUM_DRAWS = 4000
    module.LARGE_VOCAB = 4000
    return module


def test_the_samplers_of_the_cpu_pass(checks: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert checks.main(["--device", "cpu", "--rows", "12"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 31 and all(line.startswith("ok ") for line in lines[:-1])


def test_a_wrong_sampler_is_told(checks: ModuleType) -> None:
    right = checks.torch_draw(torch.device("cpu"))

    def warmer(logits: torch.Tensor, batch: SamplingBatch) -> np.ndarray:
        return right(logits, replace(batch, temperatures=batch.temperatures * np.float32(1.1)))

    def looser(logits: torch.Tensor, batch: SamplingBatch) -> np.ndarray:
        return right(logits, replace(batch, top_ps=np.minimum(batch.top_ps + np.float32(0.05), 1)))

    def next_seed(logits: torch.Tensor, batch: SamplingBatch) -> np.ndarray:
        return right(logits, replace(batch, seeds=batch.seeds + np.uint64(1)))

    off = [c.passed for c in checks.distribution_checks("warm", warmer, [{}, {"temperature": 0.7}])]
    assert not any(off)
    assert not any(c.passed for c in checks.distribution_checks("loose", looser, [{"top_p": 0.3}, {"top_p": 0.9}]))
    assert all(c.passed for c in checks.distribution_checks("seed", next_seed, [{}]))
    assert not any(c.passed for c in checks.agreement_checks("seed", next_seed, [{}], {}, 12))


def test_without_a_gpu_it_says_so(checks: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    assert checks.main([]) == 1
    assert "no CUDA device" in capsys.readouterr().err
