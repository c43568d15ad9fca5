"""Stored tensor blocks to float32, a row at a time or many.

Block layouts are ggml's (ggml-common.h); one function a format, each on [num_blocks, block_bytes].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dragoman_kernels.tensor import QuantTensor

Blocks = npt.NDArray[np.uint8]
Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class QuantFormat:
    """How one dtype stores values."""

    block_values: int
    block_bytes: int
    decode: Callable[[Blocks], Float32Array]  # [num_blocks, block_bytes] -> [num_blocks, block_values]


def dequantise(tensor: QuantTensor) -> Float32Array:
    """Values of `tensor`, [rows, cols]. Raises ValueError for a dtype without a decoder or a wrong row length."""
    form = FORMATS.get(tensor.dtype)
    if form is None:
        raise ValueError(f"dtype {tensor.dtype} cannot be read; known are {', '.join(FORMATS)}")
    rows, cols = tensor.shape
    if cols % form.block_values or tensor.data.shape != (rows, cols // form.block_values * form.block_bytes):
        raise ValueError(f"data of {tensor.data.shape} bytes is not a {tensor.dtype} tensor of shape {tensor.shape}")
    return form.decode(np.ascontiguousarray(tensor.data).reshape(-1, form.block_bytes)).reshape(rows, cols)


def _half(blocks: Blocks) -> Float32Array:
    return np.ascontiguousarray(blocks).view(np.float16).astype(np.float32)


def _nibbles(packed: Blocks) -> Blocks:
    """Low nibbles of all bytes, then the high ones."""
    return np.concatenate([packed & 0x0F, packed >> 4], axis=1)


def _f32(blocks: Blocks) -> Float32Array:
    return blocks.view(np.float32).copy()


def _bf16(blocks: Blocks) -> Float32Array:
    return (blocks.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _q8_0(blocks: Blocks) -> Float32Array:
    return _half(blocks[:, :2]) * blocks[:, 2:].view(np.int8).astype(np.float32)


def _q4_0(blocks: Blocks) -> Float32Array:
    return _half(blocks[:, :2]) * (_nibbles(blocks[:, 2:]).astype(np.float32) - 8)


def _q4_1(blocks: Blocks) -> Float32Array:
    return _half(blocks[:, :2]) * _nibbles(blocks[:, 4:]).astype(np.float32) + _half(blocks[:, 2:4])


def _q4_k(blocks: Blocks) -> Float32Array:
    """256 values in 8 sub-blocks; 6-bit scales and minimums packed in 12 bytes."""
    packed = blocks[:, 4:16]
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], axis=1)
    minimums = np.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=1)
    scale = (_half(blocks[:, :2]) * scales.astype(np.float32))[:, :, None]
    minimum = (_half(blocks[:, 2:4]) * minimums.astype(np.float32))[:, :, None]
    quants = blocks[:, 16:].reshape(-1, 4, 1, 32) >> np.array([0, 4], np.uint8)[None, None, :, None] & 15
    values: Float32Array = scale * quants.reshape(-1, 8, 32).astype(np.float32) - minimum
    return values


def _q6_k(blocks: Blocks) -> Float32Array:
    """256 values: 4 low bits and 2 high bits apart, one int8 scale for each 16."""
    low = blocks[:, :128].reshape(-1, 2, 1, 64) >> np.array([0, 4], np.uint8)[None, None, :, None] & 15
    shifts = np.array([0, 2, 4, 6], np.uint8)[None, None, :, None]
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3
    quants = (low.reshape(-1, 8, 32) | (high.reshape(-1, 8, 32) << 4)).astype(np.int8) - np.int8(32)
    scale = _half(blocks[:, 208:210]) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    values: Float32Array = scale[:, :, None] * quants.reshape(-1, 16, 16).astype(np.float32)
    return values


FORMATS: dict[str, QuantFormat] = {
    "F32": QuantFormat(1, 4, _f32),
    "F16": QuantFormat(1, 2, _half),
    "BF16": QuantFormat(1, 2, _bf16),
    "Q8_0": QuantFormat(32, 34, _q8_0),
    "Q4_0": QuantFormat(32, 18, _q4_0),
    "Q4_1": QuantFormat(32, 20, _q4_1),
    "Q4_K": QuantFormat(256, 144, _q4_k),
    "Q6_K": QuantFormat(256, 210, _q6_k),
}
