"""Dequantisation beside the `gguf` library's."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize, quantize

from dragoman_agent.model.gguf_source import GgufSource
from dragoman_agent.model.quant import FORMATS, dequantise
from dragoman_kernels.tensor import QuantTensor


def tensor(dtype: str, rows: int, num_blocks: int) -> QuantTensor:
    """Random blocks; the scales, which come as float16, are kept finite."""
    form = FORMATS[dtype]
    rng = np.random.default_rng(7)
    data = rng.integers(0, 256, (rows, num_blocks, form.block_bytes), dtype=np.uint8)
    if form.block_values == 1:
        values = rng.standard_normal((rows, num_blocks)).astype(np.float32)
        data = quantize(values, gguf.GGMLQuantizationType[dtype]).view(np.uint8)
    else:
        for start in {"Q4_1": (0, 2), "Q4_K": (0, 2), "Q6_K": (208,)}.get(dtype, (0,)):
            scales = rng.standard_normal((rows, num_blocks)).astype(np.float16)
            data[:, :, start : start + 2] = scales.view(np.uint8).reshape(rows, num_blocks, 2)
    return QuantTensor(dtype, (rows, num_blocks * form.block_values), data.reshape(rows, -1))


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize(("rows", "num_blocks"), [(1, 1), (3, 2), (5, 7)])
def test_values_equal_the_librarys(dtype: str, rows: int, num_blocks: int) -> None:
    stored = tensor(dtype, rows, num_blocks)
    kind = gguf.GGMLQuantizationType[dtype]
    expected = dequantize(stored.data.view(np.float32) if dtype == "F32" else stored.data, kind)
    if dtype == "F16":
        expected = stored.data.view(np.float16)
    values = dequantise(stored)
    assert values.dtype == np.float32
    assert values.shape == stored.shape
    np.testing.assert_array_equal(values, np.asarray(expected, np.float32).reshape(stored.shape))


@pytest.mark.parametrize("dtype", ["Q8_0", "Q4_0", "Q4_1", "F16", "BF16", "F32"])
def test_a_round_trip_is_near(dtype: str) -> None:
    values = np.random.default_rng(1).standard_normal((4, 64)).astype(np.float32)
    data = quantize(values, gguf.GGMLQuantizationType[dtype]).view(np.uint8)
    error = np.abs(dequantise(QuantTensor(dtype, (4, 64), data)) - values).max()
    assert error <= {"Q8_0": 0.02, "Q4_0": 0.5, "Q4_1": 0.3, "F16": 2e-3, "BF16": 2e-2, "F32": 0}[dtype]


def test_the_embedded_model_equals_the_library(embedded_model_path: Path, library_reader: gguf.GGUFReader) -> None:
    source = GgufSource(embedded_model_path)
    stored = {tensor.name: tensor for tensor in library_reader.tensors}
    for name, theirs in [("layers.7.down_proj", "blk.7.ffn_down"), ("norm", "output_norm")]:
        expected = dequantize(stored[f"{theirs}.weight"].data, stored[f"{theirs}.weight"].tensor_type)
        np.testing.assert_array_equal(dequantise(source.tensor(name)), np.atleast_2d(expected))


def test_an_unknown_dtype_and_a_wrong_length_are_refused() -> None:
    with pytest.raises(ValueError, match="dtype Q5_K cannot be read; known are F32, F16"):
        dequantise(QuantTensor("Q5_K", (1, 256), np.zeros((1, 176), np.uint8)))
    with pytest.raises(ValueError, match="not a Q8_0 tensor of shape"):
        dequantise(QuantTensor("Q8_0", (1, 64), np.zeros((1, 34), np.uint8)))
    with pytest.raises(ValueError, match="not a Q8_0 tensor of shape"):
        dequantise(QuantTensor("Q8_0", (1, 33), np.zeros((1, 34), np.uint8)))
