"""The Llama family's operations in one order of arithmetic: a token's bits depend on the tokens before it alone.

Every product and all attention go through kernels of one tile shape each, whatever the step: no library is asked, for it
takes another kernel for another number of rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dragoman_agent.device.cuda_ops import CudaOps, DecodePart, PrefillPart, Scales
from dragoman_agent.model.config import ModelConfig
from dragoman_agent.model.llama import LlamaWeights
from dragoman_agent.pal.plan import GemmFixed, Plan, PrefillAttention
from dragoman_kernels.triton.attention_fixed import (
    FixedWorkspace,
    fixed_decode_attention,
    fixed_prefill_attention,
    queries_a_tile,
)
from dragoman_kernels.triton.gemm_fixed import gemm_fixed

_CHECKED_ROWS = 130  # more than one tile of the largest; a head of 150,000 outputs takes 40 MB a tile


class FixedOps(CudaOps):
    """See Ops in model/layers.py."""

    def __init__(
        self, cos: Tensor, sin: Tensor, prefill: PrefillAttention, plan: Plan, model: ModelConfig, num_rows: int
    ) -> None:
        """`cos` and `sin` as for CudaOps; `num_rows` of the largest decode step. Raises ValueError where too many heads share a KV head for a tile."""
        super().__init__(cos, sin, prefill, (), None)
        self.queries_an_item = queries_a_tile(prefill.block_m, model.num_heads, model.num_kv_heads)
        self._fixed = _workspace(plan, model, num_rows, cos)
        self._part_tokens = plan.attention_part_tokens
        self._tiles: dict[tuple[int, ...], list[GemmFixed]] = {}
        for one in plan.gemm_fixed:
            self._tiles.setdefault((one.n, one.k), []).append(one)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See Ops. Raises ValueError for a matrix that the plan gives no tile."""
        rows = x.shape[0]
        tiles = self._tiles.get(weight.shape, ())
        tile = next((one for one in tiles if rows <= one.max_rows or not one.max_rows), None)
        if tile is None:
            raise ValueError(
                f"the plan is deterministic and has no tile for a matrix of {weight.shape[0]} x {weight.shape[1]}; "
                "it was made for another model"
            )
        return _product(x, weight, bias, tile)

    def check_tiles(self, weights: LlamaWeights) -> None:
        """Whether the tiles of each matrix sum in one order, on random rows of one layer. Raises ValueError where they do not."""
        layer = weights.layers[0]
        generator = torch.Generator(self._cos.device).manual_seed(0)
        for weight in (layer.qkv, layer.out, layer.gate_up, layer.down, weights.head):
            tiles = self._tiles.get(weight.shape, ())
            if len(tiles) < 2:
                continue
            x = torch.randn((_CHECKED_ROWS, weight.shape[1]), generator=generator, device=weight.device).to(
                weight.dtype
            )
            first = _product(x, weight, None, tiles[0])
            if not all(torch.equal(first, _product(x, weight, None, tile)) for tile in tiles[1:]):
                raise ValueError(
                    f"tiles of the {weight.shape[0]} x {weight.shape[1]} matrix do not give equal bits on this device, so "
                    "a deterministic plan must not choose among them; start with --pal-launch-tuning off, which takes one"
                )

    def _decode(
        self, q: Tensor, keys: Tensor, values: Tensor, scales: Scales, part: DecodePart, out: Tensor, layer: int
    ) -> None:
        fixed_decode_attention(
            q, keys, values, part.block_tables, part.context_lens, self._fixed, self._part_tokens,
            part.attention.num_splits, rows=self.prefill.block_m, block_n=self.prefill.block_n,
            num_stages=self.prefill.num_stages, num_warps=self.prefill.num_warps,
            key_scale=scales[0], value_scale=scales[1], out=out,
        )  # fmt: skip

    def _prefill(self, q: Tensor, keys: Tensor, values: Tensor, scales: Scales, part: PrefillPart, out: Tensor) -> None:
        fixed_prefill_attention(
            q, keys, values, part.block_tables, part.query_starts, part.context_lens, part.work_list, self._fixed,
            self._part_tokens, rows=self.prefill.block_m, block_n=self.prefill.block_n,
            num_stages=self.prefill.num_stages, num_warps=self.prefill.num_warps,
            key_scale=scales[0], value_scale=scales[1], out=out,
        )  # fmt: skip


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, tile: GemmFixed) -> Tensor:
    return gemm_fixed(
        x, weight, bias, block_m=tile.block_m, block_n=tile.block_n, block_k=tile.block_k,
        num_stages=tile.num_stages, num_warps=tile.num_warps,
    )  # fmt: skip


def _workspace(plan: Plan, model: ModelConfig, num_rows: int, cos: Tensor) -> FixedWorkspace:
    """Parts of the longest context for as many sequences as share one among several programs; on the device of `cos`."""
    return FixedWorkspace(
        num_rows, model.num_heads, model.head_dim, -(-plan.max_context_tokens // plan.attention_part_tokens),
        cos.device, max((b.max_batch for b in plan.decode_attention if b.num_splits > 1), default=0),
    )  # fmt: skip
