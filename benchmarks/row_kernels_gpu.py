"""Times rotation, activation and norm on a GPU over their launch choices, beside what the card's bandwidth would allow.

python -m benchmarks.row_kernels_gpu [--bandwidth 4.29e12]      a line a choice, the quickest first, the present one marked
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from benchmarks.kernels_gpu import graph_seconds

from dragoman_kernels.triton.activation import silu_mul
from dragoman_kernels.triton.norm import rms_norm
from dragoman_kernels.triton.rope_cache import rope_and_cache

DEVICE = torch.device("cuda")
TOKENS = (1, 32, 256, 2048, 8192)
PAGE = 64
LAYERS = 4  # in turns, so that what is read was not just written
# Name: heads, KV heads, head size, hidden, intermediate, and whether q and k have a norm.
SHAPES = {
    "qwen3-0.6b": (16, 8, 128, 1024, 3072, True),
    "llama-3.2-1b": (32, 8, 64, 2048, 8192, False),
    "qwen3-8b": (32, 8, 128, 4096, 12288, True),
}


def randn(*size: int) -> torch.Tensor:
    return torch.randn(size, device=DEVICE, dtype=torch.bfloat16)


def rotation(shape: tuple[int, int, int, int, int, bool], tokens: int) -> tuple[Callable[..., object], int]:
    """A call with `program_heads` and `num_warps`, and the bytes it moves."""
    heads, kv_heads, dim, *_, has_norm = shape
    size = (-(-tokens // PAGE) + 1, kv_heads, PAGE, dim)
    layers = [(randn(tokens, (heads + 2 * kv_heads) * dim), randn(*size), randn(*size)) for _ in range(LAYERS)]
    angles = torch.ones(tokens, dim // 2, device=DEVICE)
    positions = torch.arange(tokens, dtype=torch.int32, device=DEVICE)
    norm = randn(dim) if has_norm else None

    def call(**choice: Any) -> None:
        for qkv, keys, values in layers:
            rope_and_cache(qkv, keys, values, angles, angles, positions, positions + PAGE, heads, norm, norm, **choice)

    return call, LAYERS * tokens * (2 * 2 * (heads + 2 * kv_heads) * dim + 4 * dim)


def activation(shape: tuple[int, int, int, int, int, bool], tokens: int) -> tuple[Callable[..., object], int]:
    """A call with `block` and `num_warps`, and the bytes it moves."""
    layers = [randn(tokens, 2 * shape[4]) for _ in range(LAYERS)]

    def call(**choice: Any) -> None:
        for gate_up in layers:
            silu_mul(gate_up, **choice)

    return call, LAYERS * tokens * 3 * 2 * shape[4]


def norm(shape: tuple[int, int, int, int, int, bool], tokens: int) -> tuple[Callable[..., object], int]:
    """A call with `num_warps`, and the bytes it moves."""
    layers = [(randn(tokens, shape[3]), randn(tokens, shape[3])) for _ in range(LAYERS)]
    weight = randn(shape[3])

    def call(**choice: Any) -> None:
        for x, residual in layers:
            rms_norm(x, weight, 1e-6, residual, **choice)

    return call, LAYERS * tokens * 4 * 2 * shape[3]


KERNELS: dict[str, tuple[Callable[..., tuple[Callable[..., object], int]], list[dict[str, int]]]] = {
    "rotation": (rotation, [{"program_heads": h, "num_warps": w} for h, w in itertools.product((4, 8, 16, 32, 64), (1, 2, 4, 8))]),
    "activation": (activation, [{"block": b, "num_warps": w} for b, w in itertools.product((512, 1024, 2048, 4096), (2, 4, 8))]),
    "norm": (norm, [{"num_warps": w} for w in (1, 2, 4, 8, 16)]),
}  # fmt: skip


def main() -> None:
    """Every kernel, shape and number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bandwidth", type=float, default=4.29e12, help="bytes a second of a copy")
    bandwidth = parser.parse_args().bandwidth
    for (kernel, (make, choices)), (name, shape), tokens in itertools.product(KERNELS.items(), SHAPES.items(), TOKENS):
        call, num_bytes = make(shape, tokens)
        present = graph_seconds(call)
        timed = [(graph_seconds(functools.partial(call, **choice)), choice) for choice in choices]
        found = sorted(timed, key=lambda each: each[0])
        best = ", ".join(
            f"{1e6 * seconds / LAYERS:.1f} us {' '.join(f'{key} {value}' for key, value in choice.items())}"
            for seconds, choice in found[:3]
        )
        print(
            f"{kernel:10} {name:13} {tokens:5} tokens: now {1e6 * present / LAYERS:.1f} us ({num_bytes / present / 1e12:.2f} TB/s, "
            f"{1e6 * num_bytes / bandwidth / LAYERS:.1f} us by bandwidth); best {best}", flush=True,
        )  # fmt: skip


if __name__ == "__main__":
    main()
