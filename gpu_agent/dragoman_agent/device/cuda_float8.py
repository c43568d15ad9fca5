"""Scales of K and V in eight bits, found at load from one prompt: a function of the weights alone.

A scale is a power of two, so that dividing by it loses nothing, and leaves room for numbers twice as large as the largest
that the prompt had in that layer; what is larger still is cut. Eight bits hold 2^17 between the largest and the smallest.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from dragoman_agent.device.base import Int32Array
from dragoman_agent.device.cuda_ops import CudaOps, CudaStep, PrefillPart
from dragoman_agent.model.config import ModelConfig
from dragoman_agent.model.layers import PagedCache
from dragoman_agent.model.llama import LlamaWeights, forward
from dragoman_kernels.triton.attention_prefill import prefill_work_list
from dragoman_kernels.triton.float8 import MAX_FLOAT8

_NUM_TOKENS = 256  # of the prompt
_STRIDE = 7919  # between its token ids: a prime, so that they are spread over the vocabulary
_ROOM = 2.0  # over the largest number that was seen


def find_scales(
    config: ModelConfig, weights: LlamaWeights, ops: CudaOps, page_size: int, max_num_tokens: int, dtype: torch.dtype
) -> tuple[tuple[float, float], ...]:
    """Scales of K and V by layer. Raises ValueError where a layer's are not finite."""
    count = min(_NUM_TOKENS, max_num_tokens)
    device = weights.embedding.device
    num_pages = -(-count // page_size)
    size = (1, num_pages + 1, config.num_kv_heads, page_size, config.head_dim)
    cache = PagedCache(torch.zeros(size, dtype=dtype, device=device), torch.zeros(size, dtype=dtype, device=device))
    observing = _Observing(ops, cache)
    forward(config, weights, cache, _prompt(config, ops, page_size, count, device), observing)
    largest = torch.stack(observing.largest).float().cpu().tolist()
    return tuple((scale_for(k, f"K of layer {i}"), scale_for(v, f"V of layer {i}")) for i, (k, v) in enumerate(largest))


def scale_for(largest: float, what: str) -> float:
    """The power of two that brings `largest`, with room, to what eight bits hold. Raises ValueError where it is not finite."""
    if not math.isfinite(largest):
        raise ValueError(f"{what} is not finite on a plain prompt: the weights are damaged; load them again")
    if largest == 0:
        return 1.0
    return float(2.0 ** math.ceil(math.log2(_ROOM * largest / MAX_FLOAT8)))


class _Observing:
    """The operations of `ops`, each layer's K and V in the one layer of `cache`, whose largest numbers are kept."""

    def __init__(self, ops: CudaOps, cache: PagedCache) -> None:
        self._ops, self._cache = ops, cache
        self.largest: list[Tensor] = []
        self.rms_norm, self.add_rms_norm = ops.rms_norm, ops.add_rms_norm
        self.linear, self.silu_mul = ops.linear, ops.silu_mul

    def attention(
        self, qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, cache: PagedCache, layer: int, step: CudaStep, config: ModelConfig
    ) -> Tensor:  # fmt: skip
        """See Ops."""
        out = self._ops.attention(qkv, q_norm, k_norm, self._cache, 0, step, config)
        self.largest.append(torch.stack((self._cache.keys.abs().amax(), self._cache.values.abs().amax())))
        return out


def _prompt(config: ModelConfig, ops: CudaOps, page_size: int, count: int, device: torch.device) -> CudaStep:
    """One prompt of `count` tokens in the first blocks."""
    positions = np.arange(count, dtype=np.int32)
    starts, lens = np.array([0, count], np.int32), np.array([count], np.int32)
    tables = np.arange(1, 1 - count // -page_size, dtype=np.int32)[None]

    def put(array: Int32Array) -> Tensor:
        return torch.from_numpy(array).to(device)

    part = PrefillPart(put(tables), put(starts), put(lens), put(prefill_work_list(starts, lens, ops.queries_an_item)))
    ids = (positions.astype(np.int64) * _STRIDE % config.vocab_size).astype(np.int32)
    return CudaStep(put(ids), None, put(positions), put(positions + np.int32(page_size)), None, part)
