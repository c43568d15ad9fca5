"""Every algorithm that NVIDIA's library names for products of many rows, on a GPU: right at other numbers of rows than it was asked for.

PYTHONPATH=. python tests/gpu/check_products.py [--models NAME...] [--seconds 100]      a line a matrix; exit 1 when one is off

A plan asks the library at up to 2,048 and at up to 8,192 rows and uses its algorithms around them, by calls of its own and in graphs. Results are compared
with PyTorch's, with float64 for some rows, and those of a graph with those outside it bit by bit.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Sequence

import torch
import torch.nn.functional as functional
from benchmarks.gpu_checks import MODELS

from dragoman_agent.device.cuda_products import LibraryProducts
from dragoman_agent.device.torch_runtime import open_runtime
from dragoman_agent.model.random_source import RandomSource
from dragoman_agent.pal.candidates import LIBRARY_GEMM_RANKS, library_gemm_matrices
from dragoman_agent.pal.plan import LibraryGemm

ROWS = {
    2048: (1536, 2048, 3001),
    6144: (4096, 6144),
    8192: (4096, 5003, 8192, 12287),
}  # of steps, by those that the library is asked for
NUM_EXACT = 16  # rows that are computed in float64 as well
MAX_APART = 0.005  # in the Euclidean norm, relative: results are rounded to bfloat16, 2^-9 of each at most


def apart(found: torch.Tensor, right: torch.Tensor) -> float:
    """How far, over how long `right` is."""
    return float((found.double() - right.double()).norm() / right.double().norm())


def check_matrix(n: int, k: int, device: torch.device) -> tuple[int, float, list[str]]:
    """(algorithms, the most that one was apart, what was off)."""
    weight = torch.randn(n, k, dtype=torch.bfloat16, device=device)
    runtime = open_runtime("cuda", device.index)
    stream, worst, off, count = runtime.new_stream(), 0.0, [], 0
    for asked, rank in itertools.product(ROWS, LIBRARY_GEMM_RANKS):
        products = LibraryProducts((LibraryGemm(n, k, 1, 0, asked, rank),))
        if products.missing:
            continue
        count += 1
        for rows in ROWS[asked]:
            x = torch.randn(rows, k, dtype=torch.bfloat16, device=device)
            chosen = torch.randint(rows, (NUM_EXACT,), device=device)
            with runtime.on(stream):
                stream.wait_stream(torch.cuda.default_stream(device))  # type: ignore[attr-defined]  # torch's own
                out = products.product(x, weight)
                assert out is not None, "operands of torch's allocator are aligned"
                runtime.synchronize()
                graph, again = runtime.capture(stream, lambda p=products, x=x: p.product(x, weight), None)  # type: ignore[misc]
                graph.replay()
            runtime.synchronize()
            exact = x[chosen].double() @ weight.double().t()
            far = max(apart(out, functional.linear(x, weight)), apart(out[chosen], exact))
            worst = max(worst, far)
            if not far <= MAX_APART or not torch.equal(out, again):
                off.append(
                    f"number {rank + 1} of {asked} at {rows} rows: {far:.2e} apart, graph {'as' if torch.equal(out, again) else 'unlike'} outside"
                )
    return count, worst, off


def main(argv: Sequence[str] | None = None) -> int:
    """Every matrix of the models."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=MODELS)
    parser.add_argument("--seconds", type=float, default=100.0, help="matrices begin no later than this")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        sys.exit("no GPU that PyTorch can use: run this where nvidia-smi names one")
    begun, num_off = time.monotonic(), 0
    matrices = [one for name in options.models for one in library_gemm_matrices(RandomSource(name).config)]
    for n, k in dict.fromkeys(matrices):
        if time.monotonic() - begun > options.seconds:
            print(f"OFF {n}x{k}: left out, {options.seconds:g} s are over", flush=True)
            num_off += 1
            continue
        with torch.inference_mode():
            count, worst, off = check_matrix(n, k, torch.device("cuda", 0))
        torch.cuda.empty_cache()
        num_off += bool(off) or not count
        print(
            f"{'OFF' if off or not count else 'ok '} {n}x{k}: {count} algorithms, at most {worst:.1e} apart {'; '.join(off)}",
            flush=True,
        )
    return 1 if num_off else 0


if __name__ == "__main__":
    sys.exit(main())
