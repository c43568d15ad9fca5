"""Steps before anybody has asked for one: what a device compiles, checks and times itself with. Torch-free."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Generator
from dataclasses import replace

import numpy as np

from dragoman_agent.device.base import SamplingBatch, StepBatch, StepHandle
from dragoman_agent.pal.plan import Plan

FIRST_STEPS = 2  # of a GPU's warm-up, which launch each kernel for the first time; graphs follow
TIMED_BATCHES = (1, 8, 32, 128, 512)
TIMED_CONTEXTS = (128, 2048)
_NUM_TIMED = 3  # steps of each shape that are counted, each behind one that is not
_NUM_TIMED_LONG = 2  # of long steps: how much they differ is a matter of microseconds
_LONG_STEP_SECONDS = 5e-3


def timed_steps(plan: Plan) -> list[tuple[int, int]]:
    """(batch, context) of the decode steps that a loaded device times for the step model: what its graphs and blocks hold."""
    most = min(plan.max_num_seqs, max(plan.graph_batch_sizes, default=0))
    batches = dict.fromkeys(min(batch, most) for batch in TIMED_BATCHES)
    return [
        (batch, context)
        for batch in batches
        for context in TIMED_CONTEXTS
        if batch and context <= plan.max_context_tokens and batch * -(-context // plan.page_size) < plan.num_blocks
    ]


def decode_batch(plan: Plan, batch: int, context: int, step: int = 0) -> StepBatch:
    """A decode step of `batch` sequences at `context` tokens each, its own token included; pages lie anywhere.

    Raises ValueError where the plan has too few blocks for it.
    """
    width = -(-context // plan.page_size)
    if batch * width >= plan.num_blocks:
        raise ValueError(f"{batch} x {context} tokens need {batch * width} blocks, the plan has {plan.num_blocks - 1}")
    rng = np.random.default_rng(batch * 100_003 + context)
    tables = rng.permutation(plan.num_blocks - 1)[: batch * width].astype(np.int32).reshape(batch, width) + np.int32(1)
    positions = np.full(batch, context - 1, dtype=np.int32)
    rows, zeros, ones = np.arange(batch, dtype=np.int32), np.zeros(batch, np.int32), np.ones(batch, np.float32)
    return StepBatch(
        step=step,
        token_ids=zeros.copy(),
        positions=positions,
        slot_mapping=tables[:, -1] * np.int32(plan.page_size) + np.int32((context - 1) % plan.page_size),
        query_starts=np.arange(batch + 1, dtype=np.int32),
        context_lens=positions + np.int32(1),
        block_tables=tables,
        prompt_lens=zeros + np.int32(1),
        sample_seqs=rows,
        pool_seqs=np.zeros(0, np.int32),
        sampling=SamplingBatch(
            temperatures=np.float32(0.6) * ones,
            top_ks=zeros,
            top_ps=ones,
            min_ps=np.float32(0) * ones,
            seeds=rows.astype(np.uint64),
            choices=zeros,
            cursors=positions,
            num_logprobs=zeros - np.int32(1),
        ),
    )


def prompt_batch(plan: Plan, count: int) -> StepBatch:
    """A prompt of `count` tokens, or as many as the blocks hold, in the first blocks; its last row is sampled by temperature."""
    step = warm_up_batch(plan.page_size, 0, min(count, (plan.num_blocks - 1) * plan.page_size, plan.max_context_tokens))
    zero = np.zeros(1, np.int32)
    plain = replace(step.sampling, top_ks=zero, top_ps=np.ones(1, np.float32), num_logprobs=zero - np.int32(1))
    return replace(step, sampling=plain)


def in_null_block(step: StepBatch, page_size: int) -> StepBatch:
    """`step` with its K and V written into the null block, which nobody reads: any other may be somebody's."""
    return replace(step, slot_mapping=np.arange(len(step.slot_mapping), dtype=np.int32) % np.int32(page_size))


def timing(queue: Callable[[StepBatch], StepHandle], step: StepBatch) -> Generator[bool, None, float]:
    """Median device seconds of `step`, each queued behind another one, as in service. Between two pairs True is yielded, so that
    nobody waits for longer than one; nothing is under way then.
    """
    seconds: list[float] = []
    while len(seconds) < (_NUM_TIMED_LONG if min(seconds, default=0.0) > _LONG_STEP_SECONDS else _NUM_TIMED):
        if seconds:
            yield True
        first, second = queue(step), queue(step)
        first.result()
        seconds.append(second.result().seconds)
    return statistics.median(seconds)


def warm_up_batch(page_size: int, start: int, count: int) -> StepBatch:
    """`count` tokens from position `start` of a sequence in the first blocks; its one row is sampled with every filter, behind
    the first tokens by top-p alone, which is another way.
    """
    zero, none = np.zeros(1, np.int32), np.zeros(0, np.int32)
    positions = np.arange(start, start + count, dtype=np.int32)
    return StepBatch(
        step=0,
        token_ids=np.zeros(count, np.int32),
        positions=positions,
        slot_mapping=positions + np.int32(page_size),
        query_starts=np.array([0, count], np.int32),
        context_lens=np.array([start + count], np.int32),
        block_tables=np.arange(1, 1 - (start + count) // -page_size, dtype=np.int32)[None],
        prompt_lens=np.array([start + count], np.int32),
        sample_seqs=zero,
        pool_seqs=none,
        sampling=SamplingBatch(
            temperatures=np.ones(1, np.float32),
            top_ks=np.full(1, 0 if start else 2, np.int32),
            top_ps=np.full(1, 0.9, np.float32),
            min_ps=np.zeros(1, np.float32),
            seeds=np.zeros(1, np.uint64),
            choices=zero,
            cursors=zero,
            num_logprobs=zero,
        ),
    )
