"""Steps put together by hand, and what came of a row in a form that can be compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dragoman_agent.device.base import SamplingBatch, StepBatch, StepResult

NUM_TOP = 96  # log-probabilities asked for: the tiny model's whole vocabulary


@dataclass(frozen=True)
class Part:
    """One sequence of a step: its new tokens, how many came before them, and its blocks."""

    tokens: Sequence[int]
    before: int
    blocks: Sequence[int]
    sampled: bool = True

    @property
    def context(self) -> int:
        return self.before + len(self.tokens)


def sampling_of(num: int, **columns: Any) -> SamplingBatch:
    """`num` greedy rows; keywords replace whole columns, a number stands for all rows."""
    kinds = {
        "temperatures": (np.float32, 0), "top_ks": (np.int32, 0), "top_ps": (np.float32, 1), "min_ps": (np.float32, 0),
        "seeds": (np.uint64, 0), "choices": (np.int32, 0), "cursors": (np.int32, 0), "num_logprobs": (np.int32, -1),
    }  # fmt: skip
    arrays: dict[str, Any] = {
        name: np.broadcast_to(np.asarray(columns.pop(name, value), kind), num).copy()
        for name, (kind, value) in kinds.items()
    }
    return SamplingBatch(**arrays, **columns)


def step_of(parts: Sequence[Part], page: int, *, pool: Sequence[int] = (), width: int = 0, **columns: Any) -> StepBatch:
    """One step; `width` pads the block tables."""
    width = max(width, *(len(part.blocks) for part in parts))
    tables = np.zeros((len(parts), width), np.int32)
    for row, part in enumerate(parts):
        tables[row, : len(part.blocks)] = part.blocks
    positions = [np.arange(part.before, part.context) for part in parts]
    slots = [np.array(p.blocks)[at // page] * page + at % page for p, at in zip(parts, positions, strict=True)]
    rows = [row for row, part in enumerate(parts) if part.sampled]
    return StepBatch(
        step=1,
        token_ids=np.concatenate([np.asarray(part.tokens) for part in parts]).astype(np.int32),
        positions=np.concatenate(positions).astype(np.int32),
        slot_mapping=np.concatenate(slots).astype(np.int32),
        query_starts=np.cumsum([0, *(len(part.tokens) for part in parts)]).astype(np.int32),
        context_lens=np.array([part.context for part in parts], np.int32),
        block_tables=tables,
        prompt_lens=np.array([part.context for part in parts], np.int32),
        sample_seqs=np.array(rows, np.int32),
        pool_seqs=np.array(pool, np.int32),
        sampling=sampling_of(len(rows), **columns),
    )


def by_id(result: StepResult, row: int) -> npt.NDArray[np.float32]:
    """Log-probabilities of one row in the order of the token ids, so that a tie of two ids compares equal."""
    assert result.top_ids is not None and result.top_logprobs is not None, "log-probabilities were asked for"
    values: npt.NDArray[np.float32] = result.top_logprobs[row][np.argsort(result.top_ids[row], kind="stable")]
    return values
