"""Times the attention kernels on a GPU over their launch choices: a graph over several layers' caches, cold in L2.

python -m benchmarks.kernels_gpu [--quick]
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
from collections.abc import Callable

import numpy as np
import torch

from dragoman_kernels.triton.attention_decode import DecodeWorkspace, paged_decode_attention
from dragoman_kernels.triton.attention_prefill import paged_prefill_attention, prefill_work_list

DEVICE = torch.device("cuda")


def graph_seconds(body: Callable[[], object], repeats: int = 7, stream: torch.cuda.Stream | None = None) -> float:
    """Median seconds of one replay of `body`; captured in `stream` where a library holds on to it."""
    body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        body()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3)
    return statistics.median(times)


def all_layers(
    q: torch.Tensor,
    caches: list[list[torch.Tensor]],
    tables: torch.Tensor,
    lens: torch.Tensor,
    workspace: DecodeWorkspace,
    split: int,
    choice: dict[str, int],
) -> None:
    """One decode attention a layer."""
    for k, v in caches:
        paged_decode_attention(q, k, v, tables, lens, workspace, split, **choice)


def decode_table(batch: int, context: int, heads: int, kv_heads: int, dim: int, page: int, layers: int) -> None:
    """One line a choice, the best three."""
    blocks = -(-context // page)
    caches = [
        [torch.randn((batch * blocks + 1, kv_heads, page, dim), device=DEVICE, dtype=torch.bfloat16) for _ in "kv"]
        for _ in range(layers)
    ]
    tables = (torch.randperm(batch * blocks, device=DEVICE).int() + 1).view(batch, blocks)
    lens = torch.full((batch,), context, dtype=torch.int32, device=DEVICE)
    q = torch.randn((batch, heads, dim), device=DEVICE, dtype=torch.bfloat16)
    rows = []
    splits = [s for s in (1, 2, 4, 8, 16, 32, 64) if s * 64 <= max(context, 64) and batch * kv_heads * s <= 4096] or [1]
    for split, stages, warps, block_n in itertools.product(splits, (2, 3, 4, 5), (2, 4), (64, 128)):
        if block_n > page:
            continue
        workspace = DecodeWorkspace(batch, heads, dim, split, DEVICE)

        choice = {"block_n": block_n, "num_stages": stages, "num_warps": warps}
        body = functools.partial(all_layers, q, caches, tables, lens, workspace, split, choice)
        try:
            rows.append((graph_seconds(body) / layers, split, stages, warps, block_n))
        except Exception as error:  # a choice that needs too much shared memory is a row of the table, not a failure
            print(f"  split {split} stages {stages} warps {warps} block_n {block_n}: {type(error).__name__}")
    moved = 2 * batch * context * kv_heads * dim * 2
    rows.sort()
    print(f"decode {batch}x{context} {heads}/{kv_heads}/{dim} page {page}:")
    for seconds, split, stages, warps, block_n in rows[:4]:
        print(
            f"  {seconds * 1e6:8.1f} us {moved / seconds / 1e12:5.2f} TB/s  split {split} stages {stages} "
            f"warps {warps} block_n {block_n}"
        )
    for split in splits:
        best = min(row for row in rows if row[1] == split)
        print(f"    best of split {split}: {best[0] * 1e6:.1f} us stages {best[2]} warps {best[3]} block_n {best[4]}")


def prefill_table(batch: int, length: int, heads: int, kv_heads: int, dim: int, page: int) -> None:
    """One line a choice, the best three."""
    blocks = -(-length // page)
    k, v = (torch.randn((batch * blocks + 1, kv_heads, page, dim), device=DEVICE, dtype=torch.bfloat16) for _ in "kv")
    tables = (torch.randperm(batch * blocks, device=DEVICE).int() + 1).view(batch, blocks)
    starts = np.arange(batch + 1, dtype=np.int32) * length
    lens = np.full(batch, length, np.int32)
    q = torch.randn((batch * length, heads, dim), device=DEVICE, dtype=torch.bfloat16)
    rows = []
    for block_m, block_n, stages, warps in itertools.product((64, 128), (64, 128), (2, 3, 4), (4, 8)):
        if block_n > page:
            continue
        work = torch.from_numpy(prefill_work_list(starts, lens, block_m)).to(DEVICE)
        device_starts, device_lens = torch.from_numpy(starts).to(DEVICE), torch.from_numpy(lens).to(DEVICE)

        body = functools.partial(
            paged_prefill_attention, q, k, v, tables, device_starts, device_lens, work,
            block_m=block_m, block_n=block_n, num_stages=stages, num_warps=warps,
        )  # fmt: skip
        try:
            rows.append((graph_seconds(body), block_m, block_n, stages, warps))
        except Exception as error:
            print(f"  block_m {block_m} block_n {block_n} stages {stages} warps {warps}: {type(error).__name__}")
    flops = 2 * batch * length * length * heads * dim
    rows.sort()
    print(f"prefill {batch}x{length} {heads}/{kv_heads}/{dim} page {page}:")
    for seconds, block_m, block_n, stages, warps in rows[:4]:
        print(
            f"  {seconds * 1e6:8.1f} us {flops / seconds / 1e12:6.1f} TFLOP/s  block_m {block_m} block_n {block_n} "
            f"stages {stages} warps {warps}"
        )


def sdpa_peer(batch: int, length: int, heads: int, kv_heads: int, dim: int) -> None:
    """The library's own attention on contiguous tensors, for comparison."""
    shape = (batch, heads, length, dim)
    q, k, v = (torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in "qkv")
    for name in ("FLASH_ATTENTION", "CUDNN_ATTENTION"):
        with torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, name)):
            try:
                seconds = graph_seconds(
                    lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
                )
                print(f"  torch {name} {2 * batch * length**2 * heads * dim / seconds / 1e12:.1f} TFLOP/s")
            except Exception as error:
                print(f"  torch {name}: {type(error).__name__}: {str(error)[:80]}")


def main() -> None:
    """Run the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    for batch, context, layers in ((1, 1024, 16), (32, 1024, 8), (256, 1024, 3)):
        decode_table(batch, context, 32, 8, 128, 64, layers)
    if not quick:
        decode_table(1, 8192, 32, 8, 128, 64, 16)
        decode_table(64, 1024, 16, 8, 128, 64, 6)
        decode_table(64, 1024, 16, 8, 128, 128, 6)
        decode_table(64, 1024, 32, 8, 64, 64, 8)
    for batch, length, heads, kv_heads, dim in ((1, 8192, 32, 8, 128), (16, 1024, 16, 8, 128), (16, 1024, 32, 8, 64)):
        for page in (64,) if quick else (64, 128):
            prefill_table(batch, length, heads, kv_heads, dim, page)
        sdpa_peer(batch, length, heads, kv_heads, dim)


if __name__ == "__main__":
    main()
