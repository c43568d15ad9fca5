"""The CPU device: which road and why, order and independence of steps, what failures say and what they leave alone."""

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dragoman_agent.device.base import Device, DeviceError, LoadProgress
from dragoman_agent.device.checks import check_batch
from dragoman_agent.device.cpu import CpuDevice
from dragoman_agent.device.cpu_road import (
    NATIVE_FLOAT32,
    NATIVE_INT8,
    TORCH_FLOAT32,
    TORCH_INT4,
    choose_cpu_road,
    decide_road,
)
from dragoman_kernels.tensor import QuantTensor

NEEDS_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++, which is not installed")
ROADS = [
    TORCH_FLOAT32,
    pytest.param(NATIVE_FLOAT32, marks=NEEDS_COMPILER),
]


def ignore(_: LoadProgress) -> None:
    return


@pytest.fixture(params=ROADS)
def road(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def device(road: str, random_model: Any, make_plan: Any) -> Iterator[CpuDevice]:
    opened = CpuDevice()
    opened.load(random_model("llama"), make_plan(random_model("llama"), road), ignore)
    yield opened
    opened.close()


DECISIONS = [
    ({}, {"Q4_1", "Q8_0"}, "auto", None, NATIVE_INT8, "weights are Q4_1, Q8_0"),
    ({}, {"Q4_1", "Q8_0"}, "int8", None, NATIVE_INT8, "int8 was asked for"),
    ({}, {"Q4_1", "Q8_0"}, "float32", None, NATIVE_FLOAT32, "float32 was asked for"),
    ({}, {"F32"}, "auto", None, NATIVE_FLOAT32, "weights are F32"),
    ({}, {"F16"}, "int8", None, NATIVE_FLOAT32, "nothing to multiply in 8 bits"),
    ({}, {"Q4_K"}, "auto", None, NATIVE_FLOAT32, "weights are Q4_K"),
    ({}, {"Q4_1"}, "auto", "no C++ compiler", TORCH_INT4, "no C++ compiler"),
    ({}, {"Q4_1"}, "float32", "no C++ compiler", TORCH_FLOAT32, "no C++ compiler"),
    ({}, {"Q8_0", "F32"}, "auto", "no C++ compiler", TORCH_FLOAT32, "much slower"),
    ({}, {"Q4_1"}, "int8", "no C++ compiler", TORCH_INT4, "int8 was asked for and is not possible"),
    ({"head_dim": 20}, {"Q4_1"}, "auto", None, TORCH_INT4, "head size 20"),
    ({"sliding_window": 100}, {"Q4_1"}, "auto", None, TORCH_INT4, "sliding window of 100"),
    ({"sliding_window": 4096}, {"Q4_1"}, "auto", None, NATIVE_INT8, "weights are Q4_1"),
]


@pytest.mark.parametrize(("changes", "dtypes", "requested", "problem", "name", "reason"), DECISIONS)
def test_road_and_reason(
    changes: dict[str, Any],
    dtypes: set[str],
    requested: str,
    problem: str | None,
    name: str,
    reason: str,
    random_model: Any,
) -> None:
    config = replace(random_model("llama").config, **changes)
    decided = decide_road(config, dtypes, requested, problem)
    assert decided[0] == name
    assert reason in decided[1]


def test_an_unknown_dtype_is_refused(random_model: Any) -> None:
    with pytest.raises(ValueError, match="--dtype float8 is not one the CPU computes in; use auto, int8, float32"):
        choose_cpu_road(random_model("llama"), "float8")


def test_without_a_compiler_the_plan_takes_torch_and_says_why(
    random_model: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    chosen = choose_cpu_road(random_model("llama"), "auto", tmp_path)
    assert chosen.name == TORCH_FLOAT32
    assert "no C++ compiler" in chosen.reason
    assert chosen.kv_dtype == "float32"
    assert chosen.weight_bytes == random_model("llama").total_bytes


def test_kernels_that_fail_to_build_at_load_are_said_loudly(
    random_model: Any,
    make_plan: Any,
    pages: Any,
    new_sequence: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A compiler that is there but fails: its output is logged, the reason is in `info`, and tokens are right."""
    broken = tmp_path / "g++"
    broken.write_text(
        "#!/bin/sh\n[ $1 = --version ] && echo broken 1.0 && exit 0\necho internal error 42 >&2\nexit 1\n"
    )
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    model = random_model("llama")
    plan = make_plan(model, NATIVE_FLOAT32)
    device = CpuDevice(tmp_path / "cache")
    with caplog.at_level(logging.WARNING):
        device.load(model, plan, ignore)
    try:
        assert device.info["road"] == TORCH_FLOAT32
        assert "the plan's road native-float32 is not possible" in device.info["road_note"]
        assert "torch-float32 is used" in caplog.text
        assert "internal error 42" in caplog.text
        batch, _ = pages(plan).batch([(new_sequence([5, 6, 7]), 3)])
        assert device.submit(batch).result().token_ids.tolist() == model.greedy([5, 6, 7], 1)[0]
    finally:
        device.close()


def test_load_reports_growing_progress_and_info(road: str, random_model: Any, make_plan: Any) -> None:
    model = random_model("llama")
    seen: list[LoadProgress] = []
    device = CpuDevice()
    assert isinstance(device, Device)
    device.load(model, make_plan(model, road), seen.append)
    device.close()
    phases = [report.phase for report in seen]
    assert sorted(set(phases), key=phases.index) == ["open", "weights", "kv", "warmup"]
    weights = [report.done for report in seen if report.phase == "weights"]
    assert weights == sorted(weights)
    assert weights[-1] == model.total_bytes
    assert device.info["road"] == road
    assert "road_note" not in device.info
    assert device.info["load_seconds"] > 0


def test_steps_run_in_order(
    device: CpuDevice, road: str, random_model: Any, make_plan: Any, pages: Any, new_sequence: Any
) -> None:
    """Two steps are under way at once."""
    model = random_model("llama")
    prompt = [9, 8, 7, 6, 5, 4]
    layout, sequence = pages(make_plan(model, road)), new_sequence(list(prompt))
    handles = []
    for count in (4, 2):
        batch, _ = layout.batch([(sequence, count)])
        handles.append(device.submit(batch))
    first, second = (handle.result() for handle in handles)
    assert len(first.token_ids) == 0
    assert second.token_ids.tolist() == model.greedy(prompt, 1)[0]
    assert second.seconds > 0


def test_sampled_tokens_do_not_depend_on_neighbours(
    device: CpuDevice, road: str, random_model: Any, make_plan: Any, pages: Any, new_sequence: Any
) -> None:
    layout = pages(make_plan(random_model("llama"), road))
    prompts = [[i + 1, 2 * i, 3] for i in range(12)]

    def columns(rows: list[int]) -> dict[str, Any]:
        return {
            "temperatures": np.full(len(rows), 1.5, np.float32),
            "top_ps": np.full(len(rows), 0.95, np.float32),
            "seeds": np.array(rows, np.uint64),
            "num_logprobs": np.full(len(rows), 2, np.int32),
        }

    batch, _ = layout.batch([(new_sequence(p), 3) for p in prompts], **columns(list(range(12))))
    together = device.submit(batch).result()
    assert together.logprobs is not None
    assert together.top_ids is not None
    assert together.top_ids.shape == (12, 2)
    for row, prompt in enumerate(prompts):
        batch, _ = layout.batch([(new_sequence(prompt), 3)], **columns([row]))
        alone = device.submit(batch).result()
        assert alone.logprobs is not None
        assert alone.token_ids[0] == together.token_ids[row]
        assert alone.logprobs[0] == pytest.approx(together.logprobs[row], abs=1e-4)


def test_embeddings_come_back_for_pooled_sequences_only(
    device: CpuDevice, road: str, random_model: Any, make_plan: Any, pages: Any, new_sequence: Any
) -> None:
    model = random_model("llama")
    batch, _ = pages(make_plan(model, road)).batch([(new_sequence([1, 2]), 2), (new_sequence([3]), 1)], pool=[1])
    result = device.submit(batch).result()
    assert result.embeddings is not None
    assert result.embeddings.shape == (1, model.config.hidden_size)
    batch, _ = pages(make_plan(model, road)).batch([(new_sequence([1, 2]), 2)])
    assert device.submit(batch).result().embeddings is None


def test_a_nan_fails_its_own_row(road: str, random_model: Any, make_plan: Any, pages: Any, new_sequence: Any) -> None:
    model = random_model("llama")
    values = model.tensors["embed_tokens"].data.view(np.float32).copy()
    values[77] = np.nan
    rows, cols = values.shape
    poisoned = replace(
        model, tensors=model.tensors | {"embed_tokens": QuantTensor("F32", (rows, cols), values.view(np.uint8))}
    )
    device = CpuDevice()
    device.load(poisoned, make_plan(model, road), ignore)
    work = [(new_sequence(prompt), 2) for prompt in ([1, 2], [3, 77], [4, 5])]
    batch, _ = pages(make_plan(model, road)).batch(work)
    result = device.submit(batch).result()
    device.close()
    assert result.finite.tolist() == [True, False, True]
    assert [result.token_ids[0], result.token_ids[2]] == [model.greedy(p, 1)[0][0] for p in ([1, 2], [4, 5])]


@pytest.mark.parametrize(
    ("array", "value", "message"),
    [
        ("token_ids", 131, "token_ids"),
        ("token_ids", -900, "token_ids"),
        ("slot_mapping", 3, "slot_mapping"),
        ("slot_mapping", 200 * 16, "slot_mapping"),
        ("block_tables", 200, "block_tables"),
        ("block_tables", 0, "block_tables"),
        ("context_lens", 1, "context_lens"),
        ("context_lens", 513, "context_lens"),
        ("sample_seqs", 1, "_seqs"),
        ("query_starts", 1, "query_starts"),
    ],
)
def test_a_step_that_does_not_fit_is_refused_and_the_next_one_runs(
    device: CpuDevice,
    road: str,
    array: str,
    value: int,
    message: str,
    random_model: Any,
    make_plan: Any,
    pages: Any,
    new_sequence: Any,
) -> None:
    layout = pages(make_plan(random_model("llama"), road))
    batch, _ = layout.batch([(new_sequence([1, 2, 3]), 3)])
    getattr(batch, array).flat[0] = value
    with pytest.raises(DeviceError, match=f"Step 1 failed on the CPU: .*{message}"):
        device.submit(batch).result()
    batch, _ = layout.batch([(new_sequence([1, 2, 3]), 3)])
    assert device.submit(batch).result().token_ids.tolist() == random_model("llama").greedy([1, 2, 3], 1)[0]


def test_too_many_tokens_are_refused(random_model: Any, make_plan: Any, pages: Any, new_sequence: Any) -> None:
    model = random_model("llama")
    plan = make_plan(model, TORCH_FLOAT32)
    batch, _ = pages(plan).batch([(new_sequence([1] * 257), 257)])
    with pytest.raises(ValueError, match="a step takes 1 to 256 tokens, token_ids has 257"):
        check_batch(batch, model.config, plan)


def test_life_of_a_device(
    device: CpuDevice, road: str, random_model: Any, make_plan: Any, pages: Any, new_sequence: Any
) -> None:
    plan = make_plan(random_model("llama"), road)
    with pytest.raises(DeviceError, match="already loaded"):
        device.load(random_model("llama"), plan, ignore)
    batch, _ = pages(plan).batch([(new_sequence([1]), 1)])
    with pytest.raises(DeviceError, match="No model is loaded"):
        CpuDevice().submit(batch)
    device.close()
    device.close()
    with pytest.raises(DeviceError, match="No model is loaded"):
        device.submit(batch)


def test_a_road_the_cpu_does_not_have_is_refused(random_model: Any, make_plan: Any) -> None:
    with pytest.raises(DeviceError, match="The plan's road 'null' is not one the CPU has"):
        CpuDevice().load(random_model("llama"), make_plan(random_model("llama"), "null"), ignore)


def test_an_incomplete_model_is_refused(road: str, random_model: Any, make_plan: Any) -> None:
    model = random_model("llama")
    tensors = dict(model.tensors)
    del tensors["layers.1.up_proj"]
    with pytest.raises(DeviceError, match=r"cannot be loaded on the CPU: .*layers\.1\.up_proj"):
        CpuDevice().load(replace(model, tensors=tensors), make_plan(model, road), ignore)


COMPILED_ROAD_CODE = """
import os, sys
from dragoman.step_model import StepModel
from dragoman_agent.device.cpu import CpuDevice
from dragoman_agent.engine.local import build_core, run_all
from dragoman_agent.engine.messages import Sampling, Start, Stop
from dragoman_agent.model.embedded import default_cache_dir
from dragoman_agent.model.source import open_model
from dragoman_agent.pal.plan import Plan

model = open_model("embedded", default_cache_dir(os.environ))
step_model = StepModel((1,), (0,), (0.01,), 300.0, 0.01)
plan = Plan("cpu", "m", 16, 2000, 4096, 256, 64, 64, 2, "native-int8", "float16", (), step_model)
device = CpuDevice()
device.load(model, plan, lambda _: None)
run_all(build_core(device, model, plan), [Start("a", [1] * 300, Sampling(top_p=0.9, num_logprobs=2), Stop())])
device.close()
peak = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
print("torch" in sys.modules, peak)
"""


@NEEDS_COMPILER
def test_the_compiled_road_takes_neither_torch_nor_much_memory(embedded_model_path: Path) -> None:
    """A request is loaded, computed and sampled with 32,000 tokens of KV."""
    done = subprocess.run(
        [sys.executable, "-c", COMPILED_ROAD_CODE], check=True, timeout=120, capture_output=True, text=True
    )
    has_torch, peak_kib = done.stdout.split()
    assert has_torch == "False"
    assert int(peak_kib) < 1.5 * 2**20
