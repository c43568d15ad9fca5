"""Decode steps whose contexts differ, by the plan's work lists and without them, on a GPU.

python -m benchmarks.uneven_gpu MODEL [--batches 8,32,64,128,256] [--out FILE]      a line a batch and kind of contexts

Contexts are 1,024 tokens alike, with one as long as the plan allows among them, or spread from 256 to 4,096.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from benchmarks.card import Result, keep, result
from benchmarks.gpu_setup import Loaded, setup, step_seconds

from dragoman_agent.device.base import StepBatch
from dragoman_agent.device.cuda import CudaDevice
from dragoman_agent.device.warm_up import decode_batch
from dragoman_agent.pal.list_timing import EVEN, LAYOUTS, LONG, SPREAD, list_lens
from dragoman_agent.pal.plan import Plan

WORDS = {EVEN: "alike", LONG: "one long", SPREAD: "spread"}
USUAL, LONGEST = 1024, 16384  # the second at most
NUM_SAMPLES = 3  # each a median of steps
MAX_APART = (
    0.05  # of logits, relative, in the Euclidean norm: random weights carry what attention rounds through all layers
)


def uneven_batch(plan: Plan, lens: list[int]) -> StepBatch:
    """A decode step of sequences with `lens` tokens each, their own included; pages lie anywhere."""
    size = plan.page_size
    widths = [-(-length // size) for length in lens]
    if sum(widths) >= plan.num_blocks:
        raise ValueError(f"{sum(lens)} tokens need {sum(widths)} blocks, the plan has {plan.num_blocks - 1}")
    order = np.random.default_rng(len(lens)).permutation(plan.num_blocks - 1).astype(np.int32) + np.int32(1)
    tables = np.zeros((len(lens), max(widths)), np.int32)
    taken = 0
    for row, width in enumerate(widths):
        tables[row, :width] = order[taken : taken + width]
        taken += width
    context_lens = np.array(lens, np.int32)
    positions = context_lens - np.int32(1)
    whole = decode_batch(plan, len(lens), 1)
    return replace(
        whole, positions=positions, context_lens=context_lens, block_tables=tables,
        slot_mapping=tables[np.arange(len(lens)), positions // size] * np.int32(size) + positions % np.int32(size),
        sampling=replace(whole.sampling, cursors=positions),
    )  # fmt: skip


def measure(
    device: CudaDevice, plan: Plan, batches: list[int]
) -> dict[tuple[int, int], tuple[list[float], torch.Tensor]]:
    """By batch and layout milliseconds a step, and the logits of one."""
    longest = min(LONGEST, plan.max_context_tokens)
    found = {}
    for batch in batches:
        for layout in LAYOUTS:
            lens = list_lens({"batch": batch, "context": USUAL, "longest": longest, "layout": layout})
            step = uneven_batch(plan, lens)
            samples = [1e3 * statistics.median(step_seconds(device, step)) for _ in range(NUM_SAMPLES)]
            found[batch, layout] = samples, device.last_logits().float().cpu()
    return found


def main() -> None:
    """Without lists first, then with them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--batches", default="8,32,64,128,256")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    here = setup(arguments.model)
    batches = [int(one) for one in arguments.batches.split(",")]
    loaded = Loaded(here.source)
    found = []
    for plan in (replace(here.plan, decode_lists=()), here.plan):
        device = loaded.device(plan)
        found.append(measure(device, plan, batches))
        device.close()
    plain, listed = found
    results: list[Result] = []
    for (batch, layout), (samples, logits) in listed.items():
        before, expected = plain[batch, layout]
        apart = float((logits - expected).norm() / expected.norm())
        list_of = here.plan.list_for(batch)
        what = f"{list_of.num_items} items" if list_of else "no list planned"
        print(
            f"{batch:4} {WORDS[layout]:9} {statistics.median(samples):7.3f} ms, without {statistics.median(before):7.3f}, "
            f"{what}, logits {apart:.1e} apart{'' if apart <= MAX_APART else ' OFF'}", flush=True,
        )  # fmt: skip
        for name, those in (("by a list", samples), ("without", before)):
            if list_of or name == "without":
                case = f"{batch}, {WORDS[layout]}, {name}"
                results.append(result("uneven", case, "step", "ms", those, note=what if name == "by a list" else ""))
    keep(arguments.out, arguments.model, here.profile.device.index, results, command="python -m benchmarks.uneven_gpu")


if __name__ == "__main__":
    main()
