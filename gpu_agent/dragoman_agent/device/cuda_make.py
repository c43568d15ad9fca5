"""Which operations a plan runs a model by: kernels of one form each, or ours beside libraries."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from dragoman_agent.device.base import DeviceError
from dragoman_agent.device.cuda_blas import BlasError
from dragoman_agent.device.cuda_fixed import FixedOps
from dragoman_agent.device.cuda_library import AttentionSizes, CudnnAttention
from dragoman_agent.device.cuda_ops import CudaOps
from dragoman_agent.device.cuda_products import LibraryProducts
from dragoman_agent.device.torch_runtime import Stream
from dragoman_agent.model.config import ModelConfig
from dragoman_agent.pal.plan import Plan, mixed_graph_sizes
from dragoman_kernels.triton.attention_decode import DecodeWorkspace
from dragoman_kernels.triton.attention_list import DecodeItems

logger = logging.getLogger(__name__)


def make_ops(config: ModelConfig, plan: Plan, cos: Tensor, sin: Tensor, num_rows: int, stream: Stream) -> CudaOps:
    """On the device of `cos` and `sin` [max_context_tokens, head_dim / 2]; `num_rows` of the largest decode step.

    Raises DeviceError where the plan is not one for a GPU, or names a library that is not there.
    """
    prefill = plan.prefill_attention
    if prefill is None:
        raise DeviceError("The plan has no prefill attention: it was made for another kind of device. Plan for cuda.")
    if plan.deterministic:
        return FixedOps(cos, sin, prefill, plan, config, num_rows)
    parts = _max_num_parts(plan, num_rows)
    workspace = DecodeWorkspace(parts, config.num_heads, config.head_dim, 1, cos.device)
    products = _products(plan)
    items = _decode_items(config, plan, cos.device)
    return CudaOps(cos, sin, prefill, plan.gemm_decode, workspace, _library(config, plan, stream), products, items)


def _decode_items(config: ModelConfig, plan: Plan, device: torch.device) -> DecodeItems | None:
    if not plan.decode_lists:
        return None
    most = max(one.num_items for one in plan.decode_lists)
    return DecodeItems(most, plan.max_num_listed, config.num_kv_heads, device)


def _products(plan: Plan) -> LibraryProducts | None:
    if not plan.library_gemm:
        return None
    try:
        products = LibraryProducts(plan.library_gemm)
    except BlasError as error:
        raise DeviceError(
            f"The plan names algorithms of cuBLASLt, which cannot be used: {error}. Start with --pal-launch-tuning off."
        ) from error
    for one in products.missing:
        logger.warning(
            "cuBLASLt names no number %d of its algorithms for %d x %d any more, as when kernels were timed: its own choice is "
            "taken; delete the folder timings of the cache and start with --tune now to time them again", one.rank + 1, one.n, one.k,
        )  # fmt: skip
    return products


def _library(config: ModelConfig, plan: Plan, stream: Stream) -> CudnnAttention | None:
    if plan.library_prefill is None:
        return None
    sizes = AttentionSizes(
        config.num_heads, config.num_kv_heads, config.head_dim, plan.page_size, plan.num_blocks,
        plan.library_prefill.max_num_seqs, plan.max_batch_tokens, plan.max_context_tokens,
    )  # fmt: skip
    return CudnnAttention(sizes, stream)


def _max_num_parts(plan: Plan, num_rows: int) -> int:
    """The most parts that a step's contexts are split into, all sequences together."""
    smaller = [bucket for bucket in plan.decode_attention if bucket.max_batch < num_rows]
    mixed = {seqs for _, seqs in mixed_graph_sizes(plan.captured_tokens, plan.max_num_seqs)}
    return max(
        plan.decode_for(num_rows).num_splits * num_rows,
        *(b.num_splits * b.max_batch for b in smaller),
        *(plan.mixed_decode(seqs).num_splits * seqs for seqs in mixed),
        *(one.num_items for one in plan.decode_lists),
        1,
    )
