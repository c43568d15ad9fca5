"""Steps with prompts by graphs and kernel by kernel, on the GPU backend's code under Triton's interpreter. Run by test_cuda_graphs.py.

Prints the sizes that were replayed, how often by the launch for long contexts and not, the largest difference of log-probabilities,
how many tokens differ, and from which row on each graph writes zeros for attention.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel's module is imported

import numpy as np
import torch
from tests.agent.device.conformance.host_runtime import InterpretedDevice
from tests.agent.device.conformance.steps import NUM_TOP, Part, by_id, step_of
from tests.agent.device.conformance.subjects import TinyModel, interpreted_subject

from dragoman_agent.device.cuda_inputs import Room
from dragoman_agent.device.cuda_ops import CudaStep
from dragoman_agent.pal import plan as plan_module
from dragoman_agent.pal.plan import LongPrefill, Plan, PrefillAttention

SIZES = (4, 12, 20)
ROUNDS = 6
FULL = ((5, 1), (0, 14), (3, 7))  # tokens before and of a step that nearly fills the chunk
# Of steps whose prompts see a dozen tokens in the mean; larger tiles than the usual ones, which would leave rows out of its list.
USUAL = PrefillAttention("paged", 4, 16, 4, 3)
LONG = LongPrefill(PrefillAttention("paged", 16, 16, 4, 3), min_tokens=4, min_context_tokens=12)
plan_module._FULL_TILES = 0.0  # no prompt here fills one

filled: dict[int, int] = {}  # by rows of a graph


class Watched(InterpretedDevice):
    """Notes what it captures."""

    def _forward(self, step: CudaStep, max_num_layers: int | None = None) -> torch.Tensor:
        if step.prefill is not None and step.last_rows is None:
            assert step.num_filled is not None and (max_num_layers is None or not step.num_filled), (
                "it runs on two tokens"
            )
            filled[len(step.token_ids)] = step.num_filled
        return super()._forward(step, max_num_layers)


def opened(plan: Plan) -> InterpretedDevice:
    device = Watched()
    device.load(TinyModel(), plan, lambda _: None)
    return device


def nan_like(tensor: torch.Tensor) -> torch.Tensor:
    """Memory that nobody has written to, at its worst."""
    return torch.full_like(tensor, float("nan"))


def main() -> None:
    """Sequences that come, are computed in random chunks beside each other, decode, and go."""
    plan = replace(interpreted_subject().plan, mixed_graph_tokens=(), chunk_graph=False, prefill_attention=USUAL)
    by_kernel = opened(plan)
    by_graph = opened(replace(plan, mixed_graph_tokens=SIZES, chunk_graph=True, long_prefill=LONG))
    # Kernel by kernel every second step is attended by the launch for long contexts, whatever its prompts see.
    always = replace(plan, long_prefill=replace(LONG, min_tokens=1, min_context_tokens=1))
    replayed: list[int] = []
    by_launch = {False: 0, True: 0}
    replay = by_graph._mixed_graphs.replay

    def counted(room: Room) -> object:
        replayed.append(room.num_tokens)
        by_launch[room.is_long] += 1
        return replay(room)

    by_graph._mixed_graphs.replay = counted  # type: ignore[method-assign, assignment]
    rng = np.random.default_rng(5)
    worst, different, total = 0.0, 0, 0
    torch.empty_like = nan_like  # type: ignore[assignment]
    for turn in range(ROUNDS + 1):
        parts = []
        blocks = iter(rng.permutation(np.arange(1, plan.num_blocks)).tolist())
        for row in range(int(rng.integers(1, 4)) if turn < ROUNDS else len(FULL)):
            before, count = int(rng.integers(0, 24)), int(rng.integers(1, 6 if row else 14))
            if turn == ROUNDS:
                before, count = FULL[row]
            mine = [next(blocks) for _ in range(-(-(before + count) // plan.page_size))]
            parts.append((rng.integers(1, 60, before).tolist(), rng.integers(1, 60, count).tolist(), mine))
        parts.sort(key=lambda part: len(part[1]) > 1)  # those of one query come first
        rows = []
        by_kernel._plan = always if turn % 2 else plan
        for device in (by_kernel, by_graph):
            for history, _, mine in parts:
                if history:
                    device.submit(step_of([Part(history, 0, mine)], plan.page_size)).result()
            step = step_of(
                [Part(new, len(history), mine) for history, new, mine in parts], plan.page_size, num_logprobs=NUM_TOP
            )
            result = device.submit(step).result()
            rows.append((result.token_ids.tolist(), [by_id(result, row) for row in range(len(parts))]))
        (ids, expected), (others, got) = rows
        assert all(np.isfinite(row).all() for row in got)
        worst = max(worst, *(float(np.abs(a - b).max()) for a, b in zip(expected, got, strict=True)))
        different += sum(a != b for a, b in zip(ids, others, strict=True))
        total += len(ids)
    told = {"sizes": sorted(set(replayed)), "worst": worst, "different": different, "total": total}
    print(json.dumps(told | {"filled": sorted(filled.items()), "usual": by_launch[False], "long": by_launch[True]}))


if __name__ == "__main__":
    main()
