"""The Llama family's operations on a CUDA device: cuBLAS products, our Triton kernels for the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from dragoman_agent.device.cuda_library import CudnnAttention, LibraryPart
from dragoman_agent.device.cuda_products import LibraryProducts
from dragoman_agent.model.config import ModelConfig
from dragoman_agent.model.layers import PagedCache
from dragoman_agent.pal.plan import DecodeAttention, GemmDecode, PrefillAttention
from dragoman_kernels.triton.activation import silu_mul
from dragoman_kernels.triton.attention_decode import DecodeWorkspace, paged_decode_attention
from dragoman_kernels.triton.attention_list import Cut, DecodeItems, listed_decode_attention
from dragoman_kernels.triton.attention_prefill import paged_prefill_attention
from dragoman_kernels.triton.gemm_decode import gemm_decode
from dragoman_kernels.triton.norm import rms_norm
from dragoman_kernels.triton.rope_cache import rope_and_cache

Scales = tuple[float, float]  # of stored K and V, see PagedCache


@dataclass(frozen=True, slots=True)
class DecodePart:
    """The step's first sequences, one query token each."""

    block_tables: Tensor  # int32 [num_seqs, width]
    context_lens: Tensor  # int32 [num_seqs]
    attention: DecodeAttention
    group_rows: Tensor | None = (
        None  # int32 [1], sequences that share a program; None: none do, by a kernel without groups
    )
    cut: Cut | None = None  # how a work list cuts the contexts; None: each into as many parts as `attention` says


@dataclass(frozen=True, slots=True)
class PrefillPart:
    """The step's other sequences."""

    block_tables: Tensor  # int32 [num_seqs, width]
    query_starts: Tensor  # int32 [num_seqs + 1]
    context_lens: Tensor  # int32 [num_seqs]
    work_list: Tensor  # int32 [num_items, 2]
    library: LibraryPart | None = None  # where the library attends
    first_row: int = 0  # of the step's, from which `query_starts` count
    launch: PrefillAttention | None = None  # whose work list it is; None: the usual one


@dataclass(frozen=True, slots=True)
class CudaStep:
    """A step's tensors on the device: decode tokens first, then prefill tokens."""

    token_ids: Tensor  # int32 [num_tokens]
    last_rows: Tensor | None  # int32; None: every row is wanted
    positions: Tensor  # int32 [num_tokens]
    slots: Tensor  # int32 [num_tokens]
    decode: DecodePart | None
    prefill: PrefillPart | None
    num_filled: int | None = None  # first rows that hold tokens in any case, where those behind may not; None: all do


class CudaOps:
    """See Ops in model/layers.py."""

    def __init__(
        self,
        cos: Tensor,
        sin: Tensor,
        prefill: PrefillAttention,
        gemm: Sequence[GemmDecode],
        workspace: DecodeWorkspace | None,
        library: CudnnAttention | None = None,
        products: LibraryProducts | None = None,
        items: DecodeItems | None = None,
    ) -> None:
        """`cos` and `sin` [max_context_tokens, head_dim / 2] float32 on the device; `workspace` of decode attention;
        `library` for the prompts of steps that come with a part for it; `products` for those that it has an algorithm for;
        `items` for the work list of steps that are cut by one.
        """
        self._cos, self._sin = cos, sin
        self.prefill = prefill
        self.queries_an_item = prefill.block_m  # of the work list of prefill
        self._workspace = workspace
        self.library = library
        self._products = products
        self._items = items
        self.dependent = False  # of the step that is queued: a kernel may start before the one before has ended
        self._gemm: dict[tuple[int, ...], list[GemmDecode]] = {}
        for choice in gemm:
            self._gemm.setdefault((choice.n, choice.k), []).append(choice)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See Ops."""
        return rms_norm(x, weight, eps, dependent=self.dependent)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See Ops; overwrites `residual`."""
        return rms_norm(x, weight, eps, residual, dependent=self.dependent), residual

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See Ops."""
        num_rows = x.shape[0]
        for choice in self._gemm.get(weight.shape, ()):
            if num_rows <= choice.max_rows:
                return gemm_decode(
                    x, weight, bias, block_n=choice.block_n, block_k=choice.block_k, num_stages=choice.num_stages,
                    num_warps=choice.num_warps, dependent=self.dependent,
                )  # fmt: skip
        if self._products is not None and bias is None and (out := self._products.product(x, weight)) is not None:
            return out
        return functional.linear(x, weight, bias)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See Ops."""
        return silu_mul(gate_up, dependent=self.dependent)

    def attention(
        self,
        qkv: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        cache: PagedCache,
        layer: int,
        step: CudaStep,
        config: ModelConfig,
    ) -> Tensor:
        """See Ops."""
        keys, values, scales = cache.keys[layer], cache.values[layer], cache.scales_of(layer)
        q = rope_and_cache(
            qkv, keys, values, self._cos, self._sin, step.positions, step.slots,
            config.num_heads, q_norm, k_norm, config.rms_norm_eps, dependent=self.dependent,
            key_scale=scales[0], value_scale=scales[1],
        )  # fmt: skip
        decode, prefill = step.decode, step.prefill
        out = torch.empty_like(q)
        if step.num_filled is not None:
            out[step.num_filled :].zero_()  # padding must not make NaN of the null block
        if decode is not None:
            rows = len(decode.context_lens)
            self._decode(q[:rows], keys, values, scales, decode, out[:rows], layer)
        if prefill is not None:
            rows = prefill.first_row
            self._prefill(q[rows:], keys, values, scales, prefill, out[rows:])
        return out.view(len(q), -1)

    def _prefill(self, q: Tensor, keys: Tensor, values: Tensor, scales: Scales, part: PrefillPart, out: Tensor) -> None:
        if part.library is not None and self.library is not None:
            self.library.run(q, keys, values, part.library, out)
            return
        launch = part.launch or self.prefill
        paged_prefill_attention(
            q, keys, values, part.block_tables, part.query_starts, part.context_lens, part.work_list,
            block_m=launch.block_m, block_n=launch.block_n, num_stages=launch.num_stages, num_warps=launch.num_warps,
            tma=launch.tma, key_scale=scales[0], value_scale=scales[1], out=out,
        )  # fmt: skip

    def _decode(
        self, q: Tensor, keys: Tensor, values: Tensor, scales: Scales, part: DecodePart, out: Tensor, layer: int
    ) -> None:
        launch, workspace = part.attention, self._workspace
        assert workspace is not None  # decode needs one, and was given one
        options: dict[str, Any] = {
            "num_stages": launch.num_stages, "num_warps": launch.num_warps, "key_scale": scales[0], "value_scale": scales[1],
            "dependent": self.dependent, "out": out,
        }  # fmt: skip
        if part.cut is None:
            paged_decode_attention(
                q, keys, values, part.block_tables, part.context_lens, workspace, launch.num_splits,
                block_n=launch.block_n, group_rows=part.group_rows, **options,
            )  # fmt: skip
            return
        items = self._items
        assert items is not None  # as the plan that cuts by a list has room for one
        if layer == 0:  # the same for all
            items.make(part.context_lens, part.cut, dependent=self.dependent)
        listed_decode_attention(q, keys, values, part.block_tables, workspace, items, part.cut, **options)
