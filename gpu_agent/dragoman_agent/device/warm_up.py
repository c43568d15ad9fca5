"""A step of one sequence before anybody has one: what a device compiles and checks itself with. Torch-free."""

from __future__ import annotations

import numpy as np

from dragoman_agent.device.base import SamplingBatch, StepBatch


def warm_up_batch(page_size: int, start: int, count: int) -> StepBatch:
    """`count` tokens from position `start` of a sequence in the first blocks; its one row is sampled with every filter."""
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
            top_ks=np.full(1, 2, np.int32),
            top_ps=np.full(1, 0.9, np.float32),
            min_ps=np.zeros(1, np.float32),
            seeds=np.zeros(1, np.uint64),
            choices=zero,
            cursors=zero,
            num_logprobs=zero,
        ),
    )
