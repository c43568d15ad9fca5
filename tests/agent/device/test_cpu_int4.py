"""The torch road with weights in 4 bits: the file's weights, near the float32 answers, and dense where it has to be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import quantize
from tests.e2e.conftest import embedded_plan

from dragoman_agent.device.cpu import CpuDevice
from dragoman_agent.device.cpu_road import TORCH_FLOAT32, TORCH_INT4, road_of
from dragoman_agent.device.cpu_torch_int4 import Int4Ops, stays_packed, unpack
from dragoman_agent.engine.local import build_core, run_all
from dragoman_agent.engine.messages import Delta, Sampling, Start, Stop
from dragoman_agent.model.layout import TensorLayout
from dragoman_agent.model.quant import dequantise
from dragoman_agent.model.source import open_model
from dragoman_kernels.tensor import QuantTensor

RECORD = Path(__file__).parents[2] / "golden" / "transformers_smollm2.json"


@pytest.mark.parametrize("dtype", ["Q4_0", "Q4_1"])
def test_codes_and_scales_are_the_files(dtype: str) -> None:
    values = np.random.default_rng(1).standard_normal((48, 96)).astype(np.float32)
    raw = quantize(values, gguf.GGMLQuantizationType[dtype])
    codes, scales, zeros = unpack(raw, 96)
    assert codes.min() >= 0 and codes.max() <= 15
    ours = (codes.reshape(48, -1, 32) - 8) * scales[..., None] + zeros[..., None]
    np.testing.assert_allclose(ours.reshape(48, 96), dequantise(QuantTensor(dtype, (48, 96), raw)), atol=1e-6)


@pytest.mark.parametrize("dtype", ["Q4_0", "Q4_1"])
@pytest.mark.parametrize("num_rows", [1, 7])
def test_a_product_is_that_of_the_dequantised_matrix(dtype: str, num_rows: int) -> None:
    rng = np.random.default_rng(2)
    raw = quantize(rng.standard_normal((64, 128)).astype(np.float32), gguf.GGMLQuantizationType[dtype])
    x = torch.from_numpy(rng.standard_normal((num_rows, 128)).astype(np.float32))
    ops = Int4Ops()
    weight = ops.pack(torch.from_numpy(raw), 128)
    bias = torch.linspace(-1, 1, 64)
    exact = x.double() @ torch.from_numpy(dequantise(QuantTensor(dtype, (64, 128), raw))).double().T + bias
    ours = ops.linear(x.bfloat16(), weight, bias.bfloat16()).double()
    assert float((ours - exact).norm() / exact.norm()) < 0.01
    dense = torch.ones(64, 128)
    assert ops.pack(dense, 128) is dense


@pytest.mark.parametrize(
    ("dtypes", "rows", "cols", "packed"),
    [
        (("Q4_1", "Q4_1", "Q4_1"), (64, 32, 32), 64, True),
        (("Q4_1", "Q4_1", "Q6_K"), (64, 32, 32), 64, False),
        (("Q4_1", "Q4_0", "Q4_1"), (64, 32, 32), 64, False),
        (("Q4_1", "Q4_1", "Q4_1"), (60, 20, 20), 64, False),
        (("F32", "F32", "F32"), (64, 32, 32), 64, False),
    ],
)
def test_what_is_stacked_is_packed_together_or_not_at_all(
    dtypes: tuple[str, ...], rows: tuple[int, ...], cols: int, packed: bool
) -> None:
    class Model:
        def layout(self, name: str) -> TensorLayout:
            index = "qkv".index(name[-6])
            return TensorLayout(dtypes[index], (rows[index], cols), 0)

    model: Any = Model()
    assert [stays_packed(f"layers.3.{part}_proj", model) for part in "qkv"] == [packed] * 3
    assert not stays_packed("embed_tokens", model) and not stays_packed("layers.3.q_norm", model)


def test_the_embedded_model_without_a_compiler(embedded_model_path: Path) -> None:
    """Chosen, a seventh of float32's memory, and nearly always transformers' float32 token."""
    model = open_model("embedded", embedded_model_path.parents[2])
    road = road_of(model, "auto", "no C++ compiler")
    assert road.name == TORCH_INT4 and "in 4 bits" in road.reason and "no C++ compiler" in road.reason
    assert road_of(model, "float32", "no C++ compiler").name == TORCH_FLOAT32
    assert road.weight_bytes < road_of(model, "float32", "no C++ compiler").weight_bytes / 4
    plan = embedded_plan(TORCH_INT4)
    device = CpuDevice()
    device.load(model, plan, lambda _: None)
    entries = json.loads(RECORD.read_text())["greedy"][:8]
    stop, sampling = Stop(max_output_tokens=1), Sampling(temperature=0.0)
    core = build_core(device, model, plan)
    # Each token after the record's own: one difference is one difference.
    starts = {
        f"{i}/{n}": Start(f"{i}/{n}", [*entry["prompt_ids"], *entry["token_ids"][:n]], sampling, stop, credit=100)
        for i, entry in enumerate(entries)
        for n in (0, 17)
    }
    found = {e.request_id: e.token_ids[0] for e in run_all(core, list(starts.values())) if isinstance(e, Delta)}
    assert device.info["road"] == TORCH_INT4
    device.close()
    equal = [found[f"{i}/{n}"] == entry["token_ids"][n] for i, entry in enumerate(entries) for n in (0, 17)]
    assert sum(equal) >= 0.8 * len(equal), equal
