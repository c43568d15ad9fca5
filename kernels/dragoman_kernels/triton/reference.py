"""What each kernel must compute, in plain float64 torch: the reference of the tests."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm in float64."""
    x = x.double()
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight.double()


def gather_context(cache: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
    """The first `length` tokens of one sequence out of a paged cache: [num_kv_heads, length, head_dim]."""
    pages = cache[table.long()]  # [num_blocks, num_kv_heads, page, head_dim]
    return pages.permute(1, 0, 2, 3).reshape(cache.shape[1], -1, cache.shape[3])[:, :length]


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: list[int],
    context_lens: list[int],
) -> torch.Tensor:
    """Causal attention in float64, sequence by sequence; q [num_tokens, num_heads, head_dim]."""
    out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    group = q.shape[1] // k_cache.shape[1]
    for seq, context in enumerate(context_lens):
        begin, end = query_starts[seq], query_starts[seq + 1]
        k = gather_context(k_cache, block_tables[seq], context).double().repeat_interleave(group, 0)
        v = gather_context(v_cache, block_tables[seq], context).double().repeat_interleave(group, 0)
        scores = torch.einsum("thd,hcd->htc", q[begin:end].double(), k) * q.shape[2] ** -0.5
        position = torch.arange(context - (end - begin), context, device=q.device)
        hidden = torch.arange(context, device=q.device)[None, :] > position[:, None]
        scores = scores.masked_fill(hidden[None], float("-inf"))
        out[begin:end] = torch.einsum("htc,hcd->thd", scores.softmax(-1), v)
    return out
