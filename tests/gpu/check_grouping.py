"""Decode attention whose sequences share programs: equal bits whatever the number, also from one replay of a graph to the next, and
what each number costs. Run on a GPU.

python tests/gpu/check_grouping.py
prints a line a case, then microseconds a launch, and exits with 1 when bits differ or a case cannot be timed.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

import torch
from benchmarks.card import usable_gpu

from dragoman_agent.device.cuda_tuning import time_cases
from dragoman_agent.pal.group_timing import GROUP_ROWS, KIND
from dragoman_kernels.triton.attention_decode import DecodeWorkspace, paged_decode_attention

# (query heads, KV heads, head size, parts of a context).
SHAPES = ((16, 8, 128, 1), (16, 8, 128, 4), (32, 8, 64, 1))
TIMED = ((16, 8, 128), (32, 8, 64))
BATCHES, CONTEXTS = (64, 256), (128, 1024)
PAGE, NUM_SEQS, MAX_TOKENS = 64, 67, 300  # a number of sequences that no number of rows divides
LAUNCH = {"block_n": 64, "num_warps": 4, "num_stages": 5}
REPLAYED = (1, 4, 2, 8, 1)


class Step:
    """Sequences of 0 to 300 tokens in shuffled pages; a row of 0 tokens is padding."""

    def __init__(
        self, device: torch.device, heads: int, kv_heads: int, dim: int, num_splits: int, dtype: torch.dtype
    ) -> None:
        blocks = -(-MAX_TOKENS // PAGE)
        size = (NUM_SEQS * blocks + 1, kv_heads, PAGE, dim)
        self.caches = [torch.randn(size, device=device).to(dtype) for _ in "kv"]
        self.tables = (torch.randperm(NUM_SEQS * blocks, device=device).int() + 1).view(NUM_SEQS, blocks)
        self.lens = torch.randint(0, MAX_TOKENS + 1, (NUM_SEQS,), dtype=torch.int32, device=device)
        self.lens[::9] = 0
        self.q = torch.randn((NUM_SEQS, heads, dim), device=device).to(dtype)
        self.out = torch.empty_like(self.q)
        self.word = torch.ones(1, dtype=torch.int32, device=device)
        self._num_splits = num_splits
        self._workspace = DecodeWorkspace(NUM_SEQS, heads, dim, num_splits, device)

    def attend(self, word: torch.Tensor | None) -> None:
        """Into `out`."""
        paged_decode_attention(
            self.q, *self.caches, self.tables, self.lens, self._workspace, self._num_splits, group_rows=word, out=self.out,
            **LAUNCH,
        )  # fmt: skip

    def eager(self, word: torch.Tensor | None) -> torch.Tensor:
        """A copy of what a launch gives."""
        self.out.fill_(float("nan"))
        self.attend(word)
        return self.out.clone()

    def replayed(self, graph: torch.cuda.CUDAGraph, rows: int) -> torch.Tensor:
        """The same of a replay."""
        self.out.fill_(float("nan"))
        self.word.fill_(rows)
        graph.replay()
        return self.out.clone()


def unequal(step: Step, *, in_graph: bool) -> list[str]:
    """Where bits are not those of the kernel without groups."""
    alone = step.eager(None)
    problems = (
        [] if bool(alone.isfinite().all()) and not alone[step.lens == 0].any() else ["without groups: no numbers"]
    )
    problems += [
        f"eager, {rows} a program" for rows in GROUP_ROWS if not torch.equal(step.eager(step.word.fill_(rows)), alone)
    ]
    if in_graph:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step.attend(step.word)
        problems += [
            f"in a graph, {rows} a program" for rows in REPLAYED if not torch.equal(step.replayed(graph, rows), alone)
        ]
    return problems


def cases() -> list[dict[str, Any]]:
    """What the tuner times, with the launch of all shapes here and a longer context as well."""
    return [
        {
            "key": f"{heads}/{kv_heads}/{dim} {batch}x{context} {rows}", "kind": KIND,
            "shape": {
                "num_heads": heads, "num_kv_heads": kv_heads, "head_dim": dim, "page_size": PAGE, "batch": batch,
                "context": context, "rows": rows,
            },
            "config": {"num_splits": 1, **LAUNCH},
        }
        for (heads, kv_heads, dim), batch, context, rows in itertools.product(TIMED, BATCHES, CONTEXTS, (0, *GROUP_ROWS))
    ]  # fmt: skip


def told(seconds: dict[str, float | str]) -> bool:
    """A line for each shape, batch and context; False where one could not be timed."""
    good = True
    for (heads, kv_heads, dim), batch, context in itertools.product(TIMED, BATCHES, CONTEXTS):
        name = f"{heads}/{kv_heads}/{dim} {batch}x{context}"
        found = {rows: seconds[f"{name} {rows}"] for rows in (0, *GROUP_ROWS)}
        failed = {rows: text for rows, text in found.items() if isinstance(text, str)}
        good &= not failed
        words = (
            f"{'no groups' if rows == 0 else f'{rows} a program'} {1e6 * float(value):.2f}"
            for rows, value in found.items()
            if rows not in failed
        )
        print(
            f"{'OFF' if failed else 'ok '} {name} in us: {', '.join(words)}{f'; {failed}' if failed else ''}",
            flush=True,
        )
    return good


def main() -> None:
    """Bits, then times."""
    usable_gpu()
    device, good = torch.device("cuda"), True
    torch.manual_seed(0)
    for heads, kv_heads, dim, splits in SHAPES:
        problems = unequal(Step(device, heads, kv_heads, dim, splits, torch.bfloat16), in_graph=True)
        good &= not problems
        what = f"{heads}/{kv_heads}/{dim} in {splits} parts, {NUM_SEQS} sequences"
        print(f"OFF {what}: other bits {'; '.join(problems)}" if problems else f"ok  {what}: equal bits", flush=True)
    good &= told(time_cases(cases(), 0))
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
