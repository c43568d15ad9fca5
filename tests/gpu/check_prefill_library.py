"""cuDNN's attention over our pages against our own kernel and float64, for steps of any composition: run on a GPU.

python tests/gpu/check_prefill_library.py
prints a line a case and exits with 1 when one is off.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from benchmarks.card import usable_gpu

from dragoman_agent.device.cuda_library import AttentionSizes, CudnnAttention
from dragoman_kernels.triton.attention_prefill import paged_prefill_attention, prefill_work_list

# (queries, tokens before them) of each prompt of a step.
STEPS = (
    [(1024, 0)],
    [(2048, 6144)],
    [(700, 0), (1, 900), (333, 64), (64, 1)],
    [(513, 127)] * 16,
)
HEADS = ((16, 8, 128), (32, 8, 128), (32, 8, 64))
PAGES = (16, 64, 128)
MAX_CONTEXT, MAX_TOKENS = 9216, 8224
TOLERANCE = 1.5  # of our own kernel's error against float64


def float64_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, before: int) -> torch.Tensor:
    """Of q [num_queries, num_heads, dim] over k and v [context, num_kv_heads, dim]."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * q.shape[2] ** -0.5
    at = before + torch.arange(q.shape[0], device=q.device)
    scores.masked_fill_(torch.arange(k.shape[0], device=q.device) > at[:, None], -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


def check(heads: int, kv_heads: int, dim: int, page: int) -> bool:
    """One graph for all steps."""
    device, rng = torch.device("cuda"), np.random.default_rng(0)
    num_blocks = 2048 * 64 // page
    keys, values = (torch.randn(num_blocks, kv_heads, page, dim, device=device).bfloat16() for _ in "kv")
    sizes = AttentionSizes(heads, kv_heads, dim, page, num_blocks, 16, MAX_TOKENS, MAX_CONTEXT)
    library = CudnnAttention(sizes, torch.cuda.current_stream())
    fine = True
    for step in STEPS:
        lengths = np.array([count for count, _ in step], np.int32)
        lens = lengths + np.array([before for _, before in step], np.int32)
        starts = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
        width = -(-int(lens.max()) // page)
        tables = torch.from_numpy(rng.permutation(num_blocks - 1)[: len(step) * width].astype(np.int32) + np.int32(1))
        tables = tables.view(len(step), width).to(device)
        q = torch.randn(int(starts[-1]), heads, dim, device=device).bfloat16()
        out = torch.empty_like(q)
        assert sizes.can_run(starts)
        library.take_tables(tables)
        library.run(q, keys, values, library.part(torch.from_numpy(sizes.words(starts, lens)).to(device)), out)
        own = paged_prefill_attention(
            q, keys, values, tables, *(torch.from_numpy(x).to(device) for x in (starts, lens, prefill_work_list(starts, lens)))
        )  # fmt: skip
        errors = []
        for i, (count, before) in enumerate(step[:4]):
            blocks = tables[i].long()
            k, v = (x[blocks].transpose(1, 2).reshape(-1, kv_heads, dim)[: int(lens[i])] for x in (keys, values))
            rows = slice(int(starts[i]), int(starts[i]) + count)
            exact = float64_attention(q[rows], k, v, before)
            errors.append([(x[rows].double() - exact).square().mean().sqrt().item() for x in (out, own)])
        theirs, ours = np.max(errors, axis=0)
        good = bool(torch.isfinite(out.float()).all()) and theirs <= TOLERANCE * ours + 1e-6
        fine &= good
        print(
            f"{'ok ' if good else 'OFF'} {heads}/{kv_heads}/{dim} page {page} {len(step)} prompts, {starts[-1]} tokens: "
            f"error {theirs:.2e}, our kernel's {ours:.2e}", flush=True,
        )  # fmt: skip
    return fine


def main() -> None:
    """Every shape and page."""
    usable_gpu()
    results = [check(*heads, page) for heads in HEADS for page in PAGES]
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
