"""Edits of many rows at once: the same as row by row, and in no more calls."""

from typing import Any

import numpy as np
import pytest
import torch
from tests.agent.engine.sampling_cases import make_batch, packed, random_logits
from torch.utils._python_dispatch import TorchDispatchMode

from dragoman_agent.device.base import Penalties, SamplingBatch
from dragoman_agent.engine import host_sampler, sampler


def test_some_rows_are_sampled_as_among_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts of a few rows, from logits in bfloat16, with every kind of edit; nothing is said of the others."""
    monkeypatch.setattr(sampler, "MAX_ROWS", 3)
    rng = np.random.default_rng(4)
    num, vocab_size = 11, 70
    logits = random_logits(num, vocab_size, 5).bfloat16()
    logits[4, 7] = float("nan")
    batch = make_batch(
        num, temperature=[0.0, 0.9] * 5 + [0.5], top_k=[0, 5, 0] * 3 + [3, 0], seed=range(num),
        num_logprobs=[-1, 0, 2, 4, -1, 1, 0, -1, 3, -1, 2],
    )  # fmt: skip
    batch.penalties = {1: Penalties(1.3, 0.2, 0.1, np.array([3, 4], np.int32), np.array([5], np.int32))}
    batch.logit_bias = {2: (np.array([9], np.int32), np.array([50.0], np.float32))}
    batch.banned, batch.allowed = {3: np.array([1, 2], np.int32)}, {8: np.array([11, 12], np.int32)}
    batch.masked_rows = np.array([5, 6, 10], np.int32)
    batch.masks = packed(rng.random((3, vocab_size)) < 0.5)
    rows = np.array([1, 2, 3, 4, 5, 8, 10])
    whole, some = sampler.sample(logits.float(), batch), sampler.sample_some(logits, batch, rows)
    assert whole.top_ids is not None and some.top_ids is not None
    for name in ("token_ids", "finite", "logprobs"):
        assert torch.equal(getattr(whole, name)[rows], getattr(some, name)[rows]), name
    for row in rows.tolist():
        asked = max(int(batch.num_logprobs[row]), 0)
        for name in ("top_ids", "top_logprobs"):
            assert torch.equal(getattr(whole, name)[row, :asked], getattr(some, name)[row, :asked]), (name, row)
    others = np.setdiff1d(np.arange(num), rows)
    assert not some.finite[others].any() and not some.token_ids[others].any() and (some.top_ids[others] == -1).all()
    plain = sampler.sample_some(logits, batch, np.array([0, 7, 9]))
    assert plain.logprobs is None and plain.top_ids is None


class Calls(TorchDispatchMode):
    """Counts what is called."""

    num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += 1
        return func(*args, **(kwargs or {}))


def edited_batch(num: int, vocab_size: int, seed: int = 0) -> SamplingBatch:
    """Every kind of edit in every row: prompts and outputs share tokens and repeat them."""
    rng = np.random.default_rng(seed)

    def ids(most: int) -> np.ndarray:
        return rng.integers(0, vocab_size, int(rng.integers(0, most)), dtype=np.int32)

    rows = range(num)
    return make_batch(
        num, temperature=0.8, seed=np.arange(num),
        penalties={
            row: Penalties(rng.uniform(0.5, 2), rng.uniform(-2, 2), rng.uniform(-2, 2), ids(90), ids(90))
            for row in rows
        },
        logit_bias={row: (some := ids(9), rng.normal(size=len(some)).astype(np.float32)) for row in rows},
        banned={row: ids(9) for row in rows},
        allowed={row: np.arange(vocab_size - row % 5, dtype=np.int32) for row in rows},
        masked_rows=np.arange(num, dtype=np.int32), masks=packed(rng.random((num, vocab_size)) < 0.8),
    )  # fmt: skip


@pytest.mark.parametrize("num", [1, 3, 70])
def test_edits_of_all_rows_at_once_are_those_of_each_row(num: int) -> None:
    """To the last bit, in float32, as the host's sampler makes them row by row."""
    vocab_size = 60
    logits = random_logits(num, vocab_size, num)
    batch = edited_batch(num, vocab_size, num)
    assert np.array_equal(sampler._edit(logits, batch).numpy(), host_sampler._edit(logits.numpy(), batch))


def test_more_edited_rows_take_no_more_torch_calls() -> None:
    def calls(num: int) -> int:
        batch = edited_batch(num, 40, 7)
        with Calls() as counted:
            sampler.sample_some(random_logits(num, 40), batch, np.arange(num))
        return counted.num

    assert calls(2) == calls(48) < 160
