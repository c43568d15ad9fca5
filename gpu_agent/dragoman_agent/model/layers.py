"""What a decoder layer is made of, in plain torch: norms, rotary embedding, gated MLP, attention over a paged cache.

`TorchOps` is the reference and the CPU road; a device with kernels of its own passes another `Ops`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
import torch.nn.functional as functional
from torch import Tensor

from dragoman_agent.device.base import StepBatch
from dragoman_agent.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class PagedCache:
    """K and V of every layer: [num_layers, num_blocks, num_kv_heads, page_size, head_dim]; block 0 is the null block."""

    keys: Tensor
    values: Tensor
    scales: tuple[tuple[float, float], ...] = ()  # of K and V by layer, where they are kept in eight bits

    @property
    def page_size(self) -> int:
        """Tokens in a block."""
        return self.keys.shape[3]

    @property
    def raw(self) -> PagedCache:
        """The same memory in a type that every tensor operation knows: bytes where it is kept in eight bits."""
        if self.keys.element_size() > 1:
            return self
        return PagedCache(self.keys.view(torch.uint8), self.values.view(torch.uint8), self.scales)

    def scales_of(self, layer: int) -> tuple[float, float]:
        """What stored K and V of a layer are multiplied by."""
        return self.scales[layer] if self.scales else (1.0, 1.0)


@dataclass(frozen=True, slots=True)
class SequenceView:
    """One sequence of a step: its query rows, its blocks and what each query may see."""

    start: int  # first query row
    end: int
    context_len: int
    blocks: Tensor  # int64 [ceil(context_len / page_size)]
    mask: Tensor | None  # bool [num_queries, context_len]; None when every query sees the whole context


@dataclass(frozen=True, slots=True)
class StepTensors:
    """A step on the device, built once and read by every layer."""

    token_ids: Tensor  # int64 [num_tokens]
    slot_blocks: Tensor  # int64 [num_tokens] block each token's K and V go to
    slot_offsets: Tensor  # int64 [num_tokens] and the place in it
    cos: Tensor  # float32 [num_tokens, 1, head_dim / 2]
    sin: Tensor  # float32 [num_tokens, 1, head_dim / 2]
    sequences: tuple[SequenceView, ...]
    last_rows: Tensor  # int64: last query row of each sampled sequence, then of each pooled one


class StepLike(Protocol):
    """What the model itself reads of a step; the rest is between a device and its operations."""

    @property
    def token_ids(self) -> Tensor:
        """[num_tokens]"""

    @property
    def last_rows(self) -> Tensor | None:
        """Rows whose hidden state is wanted; None when it is all of them."""


Step = TypeVar("Step", bound=StepLike)
_Step = TypeVar("_Step", bound=StepLike, contravariant=True)


class Ops(Protocol[_Step]):
    """The operations a device may replace. x is [num_tokens, hidden_size] in the model's dtype."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / rms(x) * weight over the last dimension, the mean square in fp32 (arXiv 1910.07467)."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """The norm of x + residual, and that sum; `residual` may be overwritten."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x @ weight.T + bias."""

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up of [num_tokens, 2 * intermediate_size]."""

    def attention(
        self,
        qkv: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        cache: PagedCache,
        layer: int,
        step: _Step,
        config: ModelConfig,
    ) -> Tensor:
        """Norm and rotate q and k, write K and V to the cache, attend.

        `qkv` [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]; returns [num_tokens, num_heads * head_dim].
        """


class TorchOps:
    """Reference operations; any torch device."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See Ops."""
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See Ops."""
        total = residual + x
        return self.rms_norm(total, weight, eps), total

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See Ops."""
        return functional.linear(x, weight, bias)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Half-split rotary embedding of x [num_tokens, num_heads, head_dim]."""
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See Ops."""
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate) * up

    def attention(
        self,
        qkv: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        cache: PagedCache,
        layer: int,
        step: StepTensors,
        config: ModelConfig,
    ) -> Tensor:
        """See Ops. One sequence at a time: its neighbours cannot touch its sums."""
        heads, num_kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        mixed = qkv.view(-1, heads + 2 * num_kv_heads, head_dim)
        q, k, v = mixed[:, :heads], mixed[:, heads : heads + num_kv_heads], mixed[:, heads + num_kv_heads :]
        if q_norm is not None and k_norm is not None:
            q, k = self.rms_norm(q, q_norm, config.rms_norm_eps), self.rms_norm(k, k_norm, config.rms_norm_eps)
        q, k = self.rotate(q, step.cos, step.sin), self.rotate(k, step.cos, step.sin)
        keys, values = cache.keys[layer], cache.values[layer]
        keys[step.slot_blocks, :, step.slot_offsets] = k
        values[step.slot_blocks, :, step.slot_offsets] = v
        group = heads // num_kv_heads
        outputs = []
        for sequence in step.sequences:
            num_queries = sequence.end - sequence.start
            context_k = self._context(keys, sequence)
            context_v = self._context(values, sequence)
            # The query heads that share a KV head become rows of one head, so K and V are never repeated.
            rows = q[sequence.start : sequence.end].reshape(num_queries, num_kv_heads, group, head_dim)
            rows = rows.permute(1, 2, 0, 3).reshape(1, num_kv_heads, group * num_queries, head_dim)
            mask = None if sequence.mask is None else sequence.mask.repeat(group, 1)
            out = functional.scaled_dot_product_attention(
                rows, context_k, context_v, attn_mask=mask, scale=head_dim**-0.5
            )
            out = out.view(num_kv_heads, group, num_queries, head_dim).permute(2, 0, 1, 3)
            outputs.append(out.reshape(num_queries, num_kv_heads * group * head_dim))
        return torch.cat(outputs)

    @staticmethod
    def _context(pages: Tensor, sequence: SequenceView) -> Tensor:
        """[1, num_kv_heads, context_len, head_dim] of [num_blocks, num_kv_heads, page_size, head_dim]."""
        chosen = pages.index_select(0, sequence.blocks).transpose(0, 1)
        return chosen.reshape(1, chosen.shape[0], -1, chosen.shape[3])[:, :, : sequence.context_len]


def step_tensors(
    batch: StepBatch,
    *,
    page_size: int,
    frequencies: Tensor,
    attention_factor: float = 1.0,
    sliding_window: int | None = None,
) -> StepTensors:
    """The tensors of a step on the device of `frequencies` (float32 [head_dim / 2])."""
    device = frequencies.device
    slots = torch.from_numpy(batch.slot_mapping).to(device).long()
    angles = torch.from_numpy(batch.positions).to(device).float().unsqueeze(1) * frequencies
    starts, contexts = batch.query_starts.tolist(), batch.context_lens.tolist()
    sequences = []
    for i, context_len in enumerate(contexts):
        num_blocks = math.ceil(context_len / page_size)
        blocks = torch.from_numpy(batch.block_tables[i, :num_blocks]).to(device).long()
        mask = _visible(starts[i + 1] - starts[i], context_len, sliding_window, device)
        sequences.append(SequenceView(starts[i], starts[i + 1], context_len, blocks, mask))
    last = [starts[i + 1] - 1 for i in (*batch.sample_seqs.tolist(), *batch.pool_seqs.tolist())]
    last.extend(batch.score_rows.tolist())
    return StepTensors(
        token_ids=torch.from_numpy(batch.token_ids).to(device).long(),
        slot_blocks=slots // page_size,
        slot_offsets=slots % page_size,
        cos=(angles.cos() * attention_factor).unsqueeze(1),
        sin=(angles.sin() * attention_factor).unsqueeze(1),
        sequences=tuple(sequences),
        last_rows=torch.tensor(last, dtype=torch.int64, device=device),
    )


def _visible(num_queries: int, context_len: int, window: int | None, device: torch.device) -> Tensor | None:
    """Causal mask of the last `num_queries` positions, within the window where the model has one."""
    if num_queries == 1 and (window is None or context_len <= window):
        return None
    at = torch.arange(context_len - num_queries, context_len, device=device).unsqueeze(1)
    keys = torch.arange(context_len, device=device)
    visible = keys <= at
    return visible if window is None else visible & (keys > at - window)
