"""The torch road for 4-bit weights: they stay in 4 bits, all else is bfloat16. For machines without a compiler.

A weight of Q4_1 is d * q + m, one of Q4_0 d * (q - 8), with q in 0..15 and one d and m for 32 values. torch's product takes
(q - 8) * scale + zero, so scale = d and zero = m + 8 d, or 0: the weights are the file's but for the rounding of both to
bfloat16.
"""

from __future__ import annotations

import dataclasses
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dragoman_agent.device.base import Float32Array, Int32Array, ProgressFn, UInt8Array
from dragoman_agent.device.cpu_torch import TorchRoad
from dragoman_agent.model.layers import TorchOps
from dragoman_agent.model.llama import LayerWeights, LlamaWeights
from dragoman_agent.model.quant import dequantise
from dragoman_agent.model.source import ModelSource
from dragoman_kernels.tensor import QuantTensor

GROUP: Final = 32  # values of one scale
DTYPES: Final = ("Q4_0", "Q4_1")
_CODE_BYTES: Final = GROUP // 2
_ROW_TILE: Final = 16  # torch packs so many outputs together
_STACKED: Final = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("o_proj",), ("down_proj",))


class Int4Ops(TorchOps):
    """bfloat16, with matrices of 4 bits where they were packed; the residual is kept in float32."""

    def __init__(self) -> None:
        self._scales: dict[int, Tensor] = {}  # by id of the packed matrix, which lives as long as the weights

    def pack(self, weight: Tensor, num_inputs: int) -> Tensor:
        """A matrix for `linear`: one as stored, uint8 [outputs, bytes of a row], in 4 bits, another as it is."""
        if weight.dtype != torch.uint8:
            return weight
        codes, scales, zeros = unpack(weight.numpy(), num_inputs)
        packed: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(torch.from_numpy(codes), 1)
        both = torch.stack((torch.from_numpy(scales), torch.from_numpy(zeros)), dim=-1)
        self._scales[id(packed)] = both.transpose(0, 1).contiguous().bfloat16()
        return packed

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See Ops."""
        scales = self._scales.get(id(weight))
        if scales is None:
            return torch.nn.functional.linear(x, weight, bias)
        product: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, weight, GROUP, scales)
        return product if bias is None else product + bias

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See Ops."""
        total = residual.float() + x
        return self.rms_norm(total, weight.float(), eps).bfloat16(), total


class Int4Road(TorchRoad):
    """Weights of Q4_0 and Q4_1 in 4 bits, the others, activations, K and V in bfloat16."""

    detail = "torch operations, weights in 4 bits"
    dtype = torch.bfloat16

    def _make_ops(self) -> TorchOps:
        return Int4Ops()

    def _read_weights(self, model: ModelSource, progress: ProgressFn) -> LlamaWeights:
        weights, config, ops = super()._read_weights(model, progress), model.config, self._ops
        assert isinstance(ops, Int4Ops)

        def packed(layer: LayerWeights) -> LayerWeights:
            return dataclasses.replace(
                layer,
                qkv=ops.pack(layer.qkv, config.hidden_size),
                out=ops.pack(layer.out, config.num_heads * config.head_dim),
                gate_up=ops.pack(layer.gate_up, config.hidden_size),
                down=ops.pack(layer.down, config.intermediate_size),
            )

        return dataclasses.replace(weights, layers=tuple(map(packed, weights.layers)))

    def _values(self, name: str, stored: QuantTensor, model: ModelSource) -> Tensor:
        if stored.dtype in DTYPES and stays_packed(name, model):
            return torch.from_numpy(np.array(stored.data))  # a copy: files are mapped; rows are stacked as they are
        return torch.from_numpy(dequantise(stored)).bfloat16()


def stays_packed(name: str, model: ModelSource) -> bool:
    """Whether a matrix is kept in 4 bits: it and those stacked with it have one such dtype and sizes that torch packs."""
    prefix, _, part = name.rpartition(".")
    stacked = next((parts for parts in _STACKED if part in parts), None)
    if stacked is None or not prefix.startswith("layers."):
        return False
    layouts = [model.layout(f"{prefix}.{one}") for one in stacked]
    num_rows = sum(layout.shape[0] for layout in layouts)
    return (
        layouts[0].dtype in DTYPES
        and all(layout.dtype == layouts[0].dtype for layout in layouts)
        and num_rows % _ROW_TILE == 0
        and layouts[0].shape[1] % GROUP == 0
    )


def unpack(raw: UInt8Array, num_inputs: int) -> tuple[Int32Array, Float32Array, Float32Array]:
    """Codes [rows, num_inputs] 0 to 15, scales and zeros [rows, num_inputs / 32] of a matrix of Q4_0 or Q4_1."""
    blocks = raw.reshape(len(raw), num_inputs // GROUP, -1)
    halves: npt.NDArray[np.float32] = (
        np.ascontiguousarray(blocks[:, :, :-_CODE_BYTES]).view(np.float16).astype(np.float32)
    )
    scales = np.ascontiguousarray(halves[:, :, 0])
    zeros = halves[:, :, 1] + 8 * scales if halves.shape[2] == 2 else np.zeros_like(scales)
    packed = blocks[:, :, -_CODE_BYTES:]
    codes: Int32Array = np.concatenate((packed & 15, packed >> 4), axis=2).reshape(len(raw), -1).astype(np.int32)
    return codes, scales, zeros
