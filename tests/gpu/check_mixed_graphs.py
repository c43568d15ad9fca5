"""Steps with prompts by graph and kernel by kernel on a GPU, random weights of a real shape: the same logits, and how long each takes.

python tests/gpu/check_mixed_graphs.py [qwen3-0.6b]      exit 1 when a step is off
Prints a line a step: tokens, sequences that decode beside them, difference, wall and device time of both.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from benchmarks.gpu_setup import Loaded

from dragoman_agent.device.base import SamplingBatch, StepBatch
from dragoman_agent.device.cuda import CudaDevice
from dragoman_agent.model.source import open_model
from dragoman_agent.pal.attributes import take_inventory
from dragoman_agent.pal.plan import Plan
from dragoman_agent.pal.planner import Limits, Switches, plan_for
from dragoman_agent.pal.probe import profile_device

PROFILES = Path("/tmp/dragoman-check")
LIMITS = Limits(max_context_tokens=4096, max_num_seqs=256)
MAX_BLOCKS = 4096
# Of the largest logit: bfloat16 sums in another order, through all layers. Another row's logits differ by about all of it.
TOLERANCE = 0.06
NUM_TIMED = 8
# (tokens of each prompt in the step and before it, sequences that decode beside them at so many tokens).
STEPS = (
    ([(1, 0)], 0, 0), ([(7, 0)], 0, 0), ([(64, 0)], 0, 0), ([(200, 0), (40, 100)], 0, 0), ([(64, 0)], 8, 500), ([(17, 0), (5, 300), (2, 64)], 31, 1000),
    ([(100, 900)], 64, 300), ([(300, 0)], 200, 400), ([(500, 0)], 4, 4000), ([(1000, 1000)], 16, 200), ([(1900, 0)], 100, 100),
)  # fmt: skip


def step_of(plan: Plan, prompts: list[tuple[int, int]], num_decodes: int, context: int) -> StepBatch:
    """Greedy; pages lie anywhere and hold what earlier steps left."""
    rng = np.random.default_rng(len(prompts) * 1000 + num_decodes)
    counts = np.array([1] * num_decodes + [count for count, _ in prompts], np.int32)
    before = np.array([context - 1] * num_decodes + [tokens for _, tokens in prompts], np.int32)
    lens, page = counts + before, plan.page_size
    widths = -(-lens // page)
    blocks = rng.permutation(plan.num_blocks - 1)[: widths.sum()].astype(np.int32) + np.int32(1)
    tables = np.zeros((len(counts), widths.max()), np.int32)
    for row, part in enumerate(np.split(blocks, np.cumsum(widths)[:-1])):
        tables[row, : len(part)] = part
    seqs = np.repeat(np.arange(len(counts)), counts)
    positions = np.concatenate([np.arange(b, b + c, dtype=np.int32) for b, c in zip(before, counts, strict=True)])
    rows = np.arange(len(counts), dtype=np.int32)
    zeros, ones = np.zeros(len(rows), np.int32), np.ones(len(rows), np.float32)
    return StepBatch(
        step=0,
        token_ids=rng.integers(0, 10_000, len(positions)).astype(np.int32),
        positions=positions,
        slot_mapping=(tables[seqs, positions // page] * page + positions % page).astype(np.int32),
        query_starts=np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
        context_lens=lens,
        block_tables=tables,
        prompt_lens=lens,
        sample_seqs=rows,
        pool_seqs=np.zeros(0, np.int32),
        sampling=SamplingBatch(0 * ones, zeros, ones, 0 * ones, zeros.astype(np.uint64), zeros, zeros, zeros - np.int32(1)),
    )  # fmt: skip


def fill(device: CudaDevice) -> None:
    """K and V as a model's are: unit normal, the null block zero."""
    generator = torch.Generator("cuda").manual_seed(1)
    with torch.inference_mode():  # as they were made
        for cache in (device._cache.keys, device._cache.values):
            for layer in cache:
                layer.copy_(torch.randn(layer.shape, generator=generator, device="cuda", dtype=torch.float32))
            cache[:, 0] = 0
    torch.cuda.synchronize()  # the steps are in another stream


def run(device: CudaDevice, step: StepBatch) -> tuple[torch.Tensor, np.ndarray, float, float]:
    """Logits, token ids, wall and device seconds of a step."""
    ids = device.submit(step).result().token_ids
    logits = device.last_logits().float().clone()
    torch.cuda.synchronize()  # read before the next step overwrites them, in another stream
    seconds, begin = [], time.perf_counter()
    for _ in range(NUM_TIMED):
        seconds.append(device.submit(step).result().seconds)
    return logits, ids, (time.perf_counter() - begin) / NUM_TIMED, float(np.median(seconds))


def main() -> int:
    """Every step by both."""
    name = sys.argv[1] if len(sys.argv) > 1 else "qwen3-0.6b"
    source = open_model(f"random:{name}", Path())
    found = next(d for d in take_inventory().devices if d.facts.kind == "cuda")
    profile, _ = profile_device(found, PROFILES)
    plan, decisions = plan_for(profile, source.config, LIMITS, Switches())
    plan = replace(plan, num_blocks=min(plan.num_blocks, MAX_BLOCKS), graph_batch_sizes=(1,))
    told = next(decision for decision in decisions if decision.subject == "mixed-graphs")
    print(f"{name}: graphs of {told.chosen} tokens; {told.reason}; predicted {told.predicted}")
    if not plan.mixed_graph_tokens:
        print("no graph to check")
        return 1
    loaded, results, taken = Loaded(source), [], []
    for sizes in ((), plan.mixed_graph_tokens):
        begin, free = time.perf_counter(), torch.cuda.mem_get_info()[0]
        device = loaded.device(replace(plan, mixed_graph_tokens=sizes))
        taken.append((time.perf_counter() - begin, free - torch.cuda.mem_get_info()[0], device.info))
        fill(device)
        results.append([run(device, step_of(plan, *shape)) for shape in STEPS])
        null = device._cache.keys[:, 0].float(), device._cache.values[:, 0].float()
        fine = all(bool(torch.isfinite(x).all()) for x in null)
        device.close()
        if not fine:
            print("OFF the null block has values that are not finite")
            return 1
    bad = 0
    for shape, (expected, ids, *eager), (got, others, *graph) in zip(STEPS, *results, strict=True):
        tokens = sum(count for count, _ in shape[0]) + shape[1]
        error = float((got - expected).abs().max() / expected.abs().max())
        # Greedy choices may differ where two logits are closer than the two roads.
        gap = (expected.gather(1, torch.from_numpy(ids).long().cuda()[:, None]) - expected.gather(1, torch.from_numpy(others).long().cuda()[:, None])).abs().max()  # fmt: skip
        good = error <= TOLERANCE and float(gap / expected.abs().max()) <= TOLERANCE
        bad += not good
        print(
            f"{'ok ' if good else 'OFF'} {tokens} tokens, {shape[1]} decode: difference {error:.4f}; by kernel {1e3 * eager[0]:.2f} ms wall "
            f"({1e3 * eager[1]:.2f} device), by graph {1e3 * graph[0]:.2f} ({1e3 * graph[1]:.2f})", flush=True,
        )  # fmt: skip
    (plain_load, plain_bytes, _), (load, size, info) = taken
    print(
        f"graphs took {load - plain_load:.2f} s of the load and {(size - plain_bytes) / (1 << 20):.0f} MiB; the timed step "
        f"{1e3 * (info['mixed_step_seconds'] or 0):.2f} ms, predicted {1e3 * (told.predicted or 0):.2f}"
    )
    return bad


if __name__ == "__main__":
    sys.exit(min(main(), 1))
