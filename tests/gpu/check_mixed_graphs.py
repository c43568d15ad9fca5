"""Steps with prompts by graph and kernel by kernel on a GPU, random weights of a real shape: the same logits, and how long each takes.

python tests/gpu/check_mixed_graphs.py [qwen3-0.6b]      exit 1 when a step is off
Bits are equal in a deterministic plan. In the usual one a padded product rounds otherwise, so both roads are held against the
deterministic one: a graph's logits may not be farther from it than those of single kernels, in graphs where a library or one of the
kernels attends that take K and V by tensor descriptors neither.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
from benchmarks.card import usable_gpu
from benchmarks.gpu_setup import Loaded

from dragoman_agent.device.base import DeviceError, SamplingBatch, StepBatch
from dragoman_agent.device.cuda import CudaDevice
from dragoman_agent.model.source import open_model
from dragoman_agent.pal.plan import LibraryPrefill, Plan, PrefillAttention
from dragoman_agent.pal.planner import Limits, Switches, plan_for
from dragoman_agent.pal.probe import profile_device
from dragoman_agent.pal.rates import rates_of
from dragoman_kernels.triton.launches import tma_prefill_launches, ws_prefill_launches

PROFILES = Path("/tmp/dragoman-check")
LIMITS = Limits(max_context_tokens=4096, max_num_seqs=256)
MAX_BLOCKS = 4096
# Of the distance between single kernels and the deterministic road, of which the worst of two rows says little: 1.4 was met where a
# form attends right to the last bit of bfloat16. Another row's logits are thirty times as far.
MAX_FARTHER = 2.0
NUM_TIMED = 8
# (tokens of each prompt in the step and before it, sequences that decode beside them at so many tokens).
STEPS = (
    ([(1, 0)], 0, 0), ([(7, 0)], 0, 0), ([(64, 0)], 0, 0), ([(200, 0), (40, 100)], 0, 0), ([(64, 0)], 8, 500), ([(17, 0), (5, 300), (2, 64)], 31, 1000),
    ([(100, 900)], 64, 300), ([(300, 0)], 200, 400), ([(500, 0)], 4, 4000), ([(1000, 1000)], 16, 200), ([(1900, 0)], 100, 100),
    ([(3000, 0)], 20, 300), ([(3500, 500)], 0, 0),
)  # fmt: skip
FULL = (
    ([512], 0, 0),
    ([512], 60, 300),
    ([3000, 700], 30, 200),
)  # lengths of prompts that fill a chunk in turns, and what decodes


Shape = tuple[list[tuple[int, int]], int, int]
Ran = tuple[torch.Tensor, np.ndarray, float, float]


def full(plan: Plan) -> list[Shape]:
    """Steps of as many tokens as the plan allows."""
    shapes: list[Shape] = []
    for lengths, num_decodes, context in FULL:
        left, prompts = plan.max_batch_tokens - num_decodes, []
        while left:
            prompts.append((min(lengths[len(prompts) % len(lengths)], left), 0))
            left -= prompts[-1][0]
        shapes.append((prompts, num_decodes, context))
    return shapes


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


def run(device: CudaDevice, step: StepBatch) -> Ran:
    """Logits, token ids, wall and device seconds of a step."""
    ids = device.submit(step).result().token_ids
    logits = device.last_logits().float().clone()
    torch.cuda.synchronize()  # read before the next step overwrites them, in another stream
    seconds, begin = [], time.perf_counter()
    for _ in range(NUM_TIMED):
        seconds.append(device.submit(step).result().seconds)
    return logits, ids, (time.perf_counter() - begin) / NUM_TIMED, float(np.median(seconds))


def results(loaded: Loaded, plan: Plan, shapes: Sequence[Shape]) -> list[Ran]:
    """Of each step, and that the null block stayed finite."""
    device = loaded.device(plan)
    fill(device)
    ran = [run(device, step_of(plan, *shape)) for shape in shapes]
    null = device._cache.keys[:, 0].float(), device._cache.values[:, 0].float()
    fine = all(bool(torch.isfinite(x).all()) for x in null)
    told = device.info["mixed_step_seconds"]
    device.close()
    if not fine:
        raise SystemExit("OFF the null block has values that are not finite")
    print(
        f"  graphs of {device.info['mixed_graph_tokens']} tokens; the timed step {1e3 * (told or 0):.2f} ms", flush=True
    )
    return ran


def distance(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square of the worst row, of that row's own."""
    return float(((got - expected).square().mean(1) / expected.square().mean(1)).sqrt().max())


def main() -> int:
    """Every step by both."""
    name = sys.argv[1] if len(sys.argv) > 1 else "qwen3-0.6b"
    source = open_model(f"random:{name}", Path())
    found = usable_gpu()
    profile, _ = profile_device(found, PROFILES)
    plan, decisions = plan_for(profile, source.config, LIMITS, Switches())
    fixed, _ = plan_for(profile, source.config, replace(LIMITS, deterministic=True), Switches())
    plan, fixed = (
        replace(one, num_blocks=min(plan.num_blocks, fixed.num_blocks, MAX_BLOCKS), graph_batch_sizes=(1,))
        for one in (plan, fixed)
    )
    told = next(decision for decision in decisions if decision.subject == "mixed-graphs")
    print(f"{name}: graphs of {told.chosen} tokens; {told.reason}; predicted {1e3 * (told.predicted or 0):.2f} ms")
    if not plan.mixed_graph_tokens or plan.page_size != fixed.page_size:
        print("no graph to check, or other pages in the deterministic plan")
        return 1
    loaded, rates, config = Loaded(source), rates_of(profile), source.config
    sizes = (config.head_dim, plan.page_size, rates.capability, rates.shared_per_block)
    none = {"mixed_graph_tokens": (), "chunk_graph": False}
    shapes = [*STEPS, *(shape for shape in full(plan) if plan.max_batch_tokens <= fixed.max_batch_tokens)]
    exact, again = results(loaded, replace(fixed, **none), shapes), results(loaded, fixed, shapes)
    by_kernel = results(loaded, replace(plan, **none), shapes)
    roads = {"graph": results(loaded, plan, shapes)}
    for launch in (*tma_prefill_launches(*sizes)[-1:], *ws_prefill_launches(*sizes)):
        own = PrefillAttention("paged", **asdict(launch))
        roads[f"m{own.block_m}-n{own.block_n}-w{own.num_warps}"] = results(
            loaded, replace(plan, prefill_attention=own), shapes
        )
    try:
        library = replace(plan, library_prefill=LibraryPrefill("cudnn", 1024, 16))
        roads["graph, library"] = results(loaded, library, shapes)
    except DeviceError as error:
        print(f"without a library: {error}")
    bad = 0
    for nth, shape in enumerate(shapes):
        tokens, near = sum(count for count, _ in shape[0]) + shape[1], distance(by_kernel[nth][0], exact[nth][0])
        same = torch.equal(exact[nth][0], again[nth][0])
        words = [
            f"kernels {1e3 * by_kernel[nth][2]:.2f} ms wall ({1e3 * by_kernel[nth][3]:.2f} device), off {near:.4f}"
        ]
        good = same
        for road, ran in roads.items():
            off = distance(ran[nth][0], exact[nth][0])
            good = good and off <= MAX_FARTHER * near
            words.append(f"{road} {1e3 * ran[nth][2]:.2f} ({1e3 * ran[nth][3]:.2f}), off {off:.4f}")
        bad += not good
        print(
            f"{'ok ' if good else 'OFF'} {tokens} tokens in {len(shape[0])} prompts, {shape[1]} decode: {'; '.join(words)}; deterministic "
            f"{'equal' if same else 'DIFFERS'} {1e3 * exact[nth][2]:.2f}, by graph {1e3 * again[nth][2]:.2f}", flush=True,
        )  # fmt: skip
    return bad


if __name__ == "__main__":
    sys.exit(min(main(), 1))
