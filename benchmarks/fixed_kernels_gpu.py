"""Tiles of the deterministic product and of deterministic attention on a GPU: seconds of each, and whether bits differ between tiles.

    PYTHONPATH=. python -m benchmarks.fixed_kernels_gpu [--seconds 200] [--out FILE.json]

A deterministic plan has one tile a matrix for 1 row and for thousands, so it must be quick at both ends.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as functional

from dragoman_agent.device.torch_runtime import Runtime, Stream, open_runtime
from dragoman_kernels.triton.attention_decode import DecodeWorkspace, paged_decode_attention
from dragoman_kernels.triton.attention_fixed import (
    FixedWorkspace,
    fixed_decode_attention,
    fixed_prefill_attention,
    queries_a_tile,
)
from dragoman_kernels.triton.attention_prefill import paged_prefill_attention, prefill_work_list
from dragoman_kernels.triton.gemm_fixed import gemm_fixed

# (outputs, inputs): Qwen3-0.6B's, Llama-3.2-1B's gate and up, Qwen3-8B's, and a head.
MATRICES = (
    (4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (16384, 2048),
    (6144, 4096), (24576, 4096), (4096, 12288), (151936, 1024),
)  # fmt: skip
ROWS = (1, 32, 256, 2048)
# block_m, block_n, block_k, num_stages, num_warps
TILES = (
    (64, 64, 128, 3, 4), (64, 64, 128, 4, 4), (64, 64, 64, 4, 4), (64, 32, 128, 4, 4), (64, 32, 256, 3, 4), (64, 128, 64, 3, 4),
    (64, 128, 64, 4, 8), (64, 128, 128, 3, 8), (64, 256, 64, 3, 8), (128, 64, 64, 4, 4), (128, 128, 64, 3, 8), (128, 128, 64, 4, 8),
    (128, 256, 64, 3, 8),
)  # fmt: skip
HEADS = ((16, 8, 128), (32, 8, 64), (32, 8, 128))
# rows, block_n, num_stages, num_warps, part
ATTENTION = (
    (64, 64, 5, 4, 256), (64, 64, 3, 4, 256), (64, 64, 5, 4, 512), (64, 64, 5, 4, 1024), (64, 128, 3, 4, 256), (64, 32, 5, 4, 256),
    (64, 64, 5, 8, 256), (32, 64, 5, 4, 256), (16, 64, 5, 4, 256), (128, 64, 3, 8, 256),
)  # fmt: skip
DECODES = ((1, 4096, 16), (8, 1024, 4), (32, 1024, 1), (256, 1024, 1))  # sequences, tokens each, programs a context
PAGE = 64
NUM_COMPILERS = 12


class Bench:
    """Times calls in a graph, on operands that do not stay in L2."""

    def __init__(self, index: int = 0) -> None:
        self.runtime: Runtime = open_runtime("cuda", index)
        self.runtime.activate()
        self.stream: Stream = self.runtime.new_stream()
        self.device = self.runtime.device

    def microseconds(self, calls: Sequence[Callable[[], Any]]) -> float:
        """Of one call, the best of three rounds."""
        calls[0]()
        self.runtime.synchronize()
        rounds = max(1, 12 // len(calls))

        def run() -> torch.Tensor:
            for _ in range(rounds):
                for call in calls:
                    last = call()
            return last

        graph, _ = self.runtime.capture(self.stream, run, None)
        best = float("inf")
        for _ in range(3):
            begin, end = self.runtime.new_event(), self.runtime.new_event()
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            best = min(best, begin.elapsed_time(end))
        return round(1e3 * best / (rounds * len(calls)), 2)


def randn(bench: Bench, *size: int) -> torch.Tensor:
    return torch.randn(size, dtype=torch.bfloat16, device=bench.device)


def products(bench: Bench, deadline: float) -> dict[str, Any]:
    """Microseconds by matrix, rows and tile; the tiles whose bits are not the first tile's."""
    found: dict[str, Any] = {}
    other_bits: dict[str, list[str]] = {}
    for n, k in MATRICES:
        weights = [0.02 * randn(bench, n, k) for _ in range(max(2, min(12, (160 << 20) // (2 * n * k))))]
        for rows in ROWS:
            if time.monotonic() > deadline:
                return {"microseconds": found, "other_bits": other_bits, "cut": True}
            x = randn(bench, rows, k)
            key = f"{n}x{k} rows {rows}"
            found[key] = {"library": bench.microseconds([partial(functional.linear, x, w) for w in weights])}
            first = None
            for tile in TILES:
                m, bn, bk, stages, warps = tile
                launch = {"block_m": m, "block_n": bn, "block_k": bk, "num_stages": stages, "num_warps": warps}
                name = "-".join(map(str, tile))
                try:
                    out = gemm_fixed(x, weights[0], **launch)
                    found[key][name] = bench.microseconds([partial(gemm_fixed, x, w, **launch) for w in weights])
                except Exception as error:  # a tile that a card cannot run: the others count
                    found[key][name] = f"{type(error).__name__}: {str(error)[:80]}"
                    continue
                first = out if first is None else first
                if not torch.equal(first, out):
                    other_bits.setdefault(key, []).append(name)
        del weights
        torch.cuda.empty_cache()
    return {"microseconds": found, "other_bits": other_bits}


def caches(bench: Bench, batch: int, context: int, kv_heads: int, dim: int) -> list[tuple[torch.Tensor, ...]]:
    blocks = -(-context // PAGE)
    made = []
    num_bytes = 4 * batch * blocks * PAGE * kv_heads * dim
    for _ in range(max(1, min(8, (160 << 20) // num_bytes))):
        tables = (torch.randperm(batch * blocks, device=bench.device).int() + 1).view(batch, blocks)
        size = (batch * blocks + 1, kv_heads, PAGE, dim)
        made.append((randn(bench, *size), randn(bench, *size), tables))
    return made


def attention(bench: Bench, deadline: float) -> dict[str, Any]:
    """Microseconds of decode and of a prompt by heads and launch, the usual kernels beside."""
    found: dict[str, Any] = {}
    for (heads, kv_heads, dim), (batch, context, programs) in itertools.product(HEADS, DECODES):
        if time.monotonic() > deadline:
            break
        q = randn(bench, batch, heads, dim)
        lens = torch.full((batch,), context, dtype=torch.int32, device=bench.device)
        data = caches(bench, batch, context, kv_heads, dim)
        key = f"{heads}/{kv_heads}/{dim} decode {batch} x {context}"
        usual = DecodeWorkspace(batch, heads, dim, 16, bench.device)
        outputs: dict[tuple[int, int], torch.Tensor] = {}
        found[key] = {
            "usual": bench.microseconds(
                [
                    partial(
                        paged_decode_attention, q, k, v, t, lens, usual, programs, block_n=64, num_stages=5, num_warps=4
                    )
                    for k, v, t in data
                ]
            )
        }
        for rows, block_n, stages, warps, part in ATTENTION:
            work = FixedWorkspace(batch, heads, dim, -(-context // part), bench.device)
            name = f"r{rows}-n{block_n}-g{stages}-w{warps}-p{part}"
            try:
                k, v, t = data[0]
                out = fixed_decode_attention(
                    q,
                    k,
                    v,
                    t,
                    lens,
                    work,
                    part,
                    programs,
                    rows=rows,
                    block_n=block_n,
                    num_stages=stages,
                    num_warps=warps,
                )
                # Launches of equal tiles and parts: do rows and warps change the bits?
                if not torch.equal(outputs.setdefault((block_n, part), out), out):
                    found.setdefault("other bits", []).append(f"{key} {name}")
                found[key][name] = bench.microseconds(
                    [
                        partial(fixed_decode_attention, q, k, v, t, lens, work, part, programs,
                            rows=rows, block_n=block_n, num_stages=stages, num_warps=warps,
                        )
                        for k, v, t in data
                    ]
                )  # fmt: skip
            except Exception as error:
                found[key][name] = f"{type(error).__name__}: {str(error)[:80]}"
    for heads, kv_heads, dim in HEADS:
        found |= prompts(bench, heads, kv_heads, dim, 4096) if time.monotonic() < deadline else {}
    return found


def prompts(bench: Bench, heads: int, kv_heads: int, dim: int, tokens: int) -> dict[str, Any]:
    """A prompt of `tokens` tokens at once."""
    q = randn(bench, tokens, heads, dim)
    starts, lens = np.array([0, tokens], np.int32), np.array([tokens], np.int32)
    on_card = [torch.from_numpy(array).to(bench.device) for array in (starts, lens)]
    (k, v, tables), *_ = caches(bench, 1, tokens, kv_heads, dim)
    work = torch.from_numpy(prefill_work_list(starts, lens, 64)).to(bench.device)
    made: dict[str, Any] = {
        "usual": bench.microseconds(
            [
                partial(
                    paged_prefill_attention,
                    q,
                    k,
                    v,
                    tables,
                    *on_card,
                    work,
                    block_m=64,
                    block_n=64,
                    num_stages=3,
                    num_warps=4,
                )
            ]
        )
    }
    for rows, block_n, stages, warps, part in ATTENTION:
        items = torch.from_numpy(prefill_work_list(starts, lens, queries_a_tile(rows, heads, kv_heads))).to(
            bench.device
        )
        space = FixedWorkspace(1, heads, dim, 1, bench.device)
        try:
            made[f"r{rows}-n{block_n}-g{stages}-w{warps}-p{part}"] = bench.microseconds(
                [
                    partial(fixed_prefill_attention, q, k, v, tables, *on_card, items, space, part,
                        rows=rows, block_n=block_n, num_stages=stages, num_warps=warps,
                    )
                ]
            )  # fmt: skip
        except Exception as error:
            made[f"r{rows}-n{block_n}-g{stages}-w{warps}-p{part}"] = f"{type(error).__name__}: {str(error)[:80]}"
    return {f"{heads}/{kv_heads}/{dim} prefill {tokens}": made}


def compile_part(index: int, count: int) -> None:
    """Launches every `count`-th kernel once, so that it lies in Triton's cache."""
    bench = Bench()
    with torch.inference_mode():
        for n, (tile, k) in enumerate(itertools.product(TILES, dict.fromkeys(k for _, k in MATRICES))):
            if n % count == index:
                m, bn, bk, stages, warps = tile
                try:
                    gemm_fixed(
                        randn(bench, 8, k), randn(bench, 256, k),
                        block_m=m, block_n=bn, block_k=bk, num_stages=stages, num_warps=warps,
                    )  # fmt: skip
                except Exception as error:
                    print(f"{tile} x {k}: {error}", file=sys.stderr)


def sweep(seconds: float) -> dict[str, Any]:
    """Everything, within about `seconds`."""
    deadline = time.monotonic() + seconds
    command = [sys.executable, "-m", "benchmarks.fixed_kernels_gpu", "--compile"]
    compilers = [
        subprocess.Popen([*command, str(index)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for index in range(NUM_COMPILERS)
    ]
    for process in compilers:
        try:
            process.wait(max(min(120.0, deadline - time.monotonic()), 0.1))
        except subprocess.TimeoutExpired:
            process.kill()
    bench = Bench()
    with torch.inference_mode(), bench.runtime.on(bench.stream):
        found = {"attention": attention(bench, deadline - seconds / 3)}
        return {**found, "products": products(bench, deadline)}


def main() -> None:
    """Time and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=200)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--compile", type=int)
    options = parser.parse_args()
    if options.compile is not None:
        compile_part(options.compile, NUM_COMPILERS)
        return
    found = sweep(options.seconds)
    text = json.dumps(found, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
