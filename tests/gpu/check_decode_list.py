"""Decode attention by a work list on a GPU: right, and with equal bits each time, in a graph whose lengths change between replays.

python tests/gpu/check_decode_list.py      a line a shape, how far from the kernel without a list; exit 1 when one is off
"""

from __future__ import annotations

import sys

import torch

from dragoman_kernels.triton.attention_decode import DecodeWorkspace, paged_decode_attention
from dragoman_kernels.triton.attention_list import Cut, DecodeItems, listed_decode_attention

# (query heads, KV heads, head size, sequences, items).
SHAPES = ((16, 8, 128, 32, 48), (32, 8, 128, 64, 80), (32, 8, 64, 256, 384), (16, 8, 128, 8, 32))
PAGE, LONGEST = 64, 16384
LAUNCH = {"num_warps": 4, "num_stages": 3}
NUM_LENGTHS, NUM_REPLAYS = 6, 50
NUM_LAYERS = 3  # that share a list in the graph
MAX_APART = 0.01  # in the Euclidean norm, relative: parts are summed in another order, results rounded to bfloat16


def lengths(num_seqs: int, nth: int) -> torch.Tensor:
    """int32 [num_seqs]: alike, one long, spread over all, with padding at the end, all padding but one, and by chance."""
    generator = torch.Generator().manual_seed(nth)
    usual = torch.full((num_seqs,), 700)
    if nth == 1:
        usual[num_seqs // 2] = LONGEST
    elif nth == 2:
        usual = (torch.logspace(0, 3, num_seqs)).round()
    elif nth == 3:
        usual[3 * num_seqs // 4 :] = 0
    elif nth == 4:
        usual[1:] = 0
    elif nth == 5:
        usual = (torch.rand(num_seqs, generator=generator) ** 6 * LONGEST / 4).round()
    return usual.int()


def check(
    device: torch.device, heads: int, kv_heads: int, dim: int, num_seqs: int, num_items: int
) -> tuple[float, str]:
    """(the most that a step was apart, what was off)."""
    num_pages = 4096  # of which every sequence may have any: nobody writes
    caches = [torch.randn((num_pages, kv_heads, PAGE, dim), dtype=torch.bfloat16, device=device) for _ in "kv"]
    tables = torch.randint(1, num_pages, (num_seqs, LONGEST // PAGE), dtype=torch.int32, device=device)
    q = torch.randn((NUM_LAYERS, num_seqs, heads, dim), dtype=torch.bfloat16, device=device)
    lens = torch.zeros(num_seqs, dtype=torch.int32, device=device)
    out = torch.empty_like(q)
    items, cut = DecodeItems(num_items, num_seqs, kv_heads, device), Cut(num_items, 4, 64)
    workspace = DecodeWorkspace(max(num_items, num_seqs), heads, dim, 1, device)

    def step() -> None:
        items.make(lens, cut)
        for layer in range(NUM_LAYERS):
            listed_decode_attention(q[layer], *caches, tables, workspace, items, cut, out=out[layer], **LAUNCH)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    worst = 0.0
    for nth in range(NUM_LENGTHS):
        lens.copy_(lengths(num_seqs, nth))
        first: torch.Tensor | None = None
        for _ in range(NUM_REPLAYS):
            out.fill_(float("nan"))
            graph.replay()
            first = out.clone() if first is None else first
            if not torch.equal(first, out):
                return worst, f"lengths {nth}: a replay has other bits"
        if items.arrived.any():
            return worst, f"lengths {nth}: programs are counted that have ended"
        for layer in range(NUM_LAYERS):
            right = paged_decode_attention(q[layer], *caches, tables, lens, workspace, 1, block_n=64, **LAUNCH).float()
            worst = max(worst, float((out[layer].float() - right).norm() / right.norm()))
            if out[layer][lens == 0].any() or not worst <= MAX_APART:
                return worst, f"lengths {nth}, layer {layer}: other results than without a list"
    return worst, ""


def main() -> int:
    """All shapes."""
    if not torch.cuda.is_available():
        print("no usable GPU: this check needs one", file=sys.stderr)
        return 1
    failed = 0
    for shape in SHAPES:
        worst, problem = check(torch.device("cuda", torch.cuda.current_device()), *shape)
        failed += bool(problem)
        print(f"{shape}: {worst:.2g} apart {problem or 'ok'}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
