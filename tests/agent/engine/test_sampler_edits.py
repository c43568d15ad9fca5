"""Edits of many rows at once: the same as row by row, and in no more calls."""

from typing import Any

import numpy as np
import pytest
import torch
from tests.agent.engine.sampling_cases import make_batch, packed, random_logits
from torch.utils._python_dispatch import TorchDispatchMode

from dragoman_agent.device.base import Penalties, SamplingBatch
from dragoman_agent.engine import host_sampler, sampler


def test_logprobs_of_drawn_tokens_are_those_of_the_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few rows at a time, from logits in bfloat16; a row that is not finite has none."""
    monkeypatch.setattr(sampler, "MAX_ROWS", 3)
    num = 11
    logits = random_logits(num, 70, 5).bfloat16()
    logits[4, 7] = float("nan")
    asked = [-1, 0, 2, 4, 1, 1, 0, -1, 3, -1, 2]
    batch = make_batch(num, temperature=[0.0, 0.9] * 5 + [0.5], top_k=5, seed=range(num), num_logprobs=asked)
    whole = sampler.sample(logits.float(), batch)
    room = torch.full((3,), 9, dtype=torch.int32)  # results are kept for more rows than a step has
    ids, finite = (torch.cat((part.int(), room)) for part in (whole.token_ids, whole.finite))
    found = sampler.logprobs_of(logits, ids, finite, batch)
    assert found is not None
    for name in ("token_ids", "finite", "logprobs", "top_ids", "top_logprobs"):
        assert torch.equal(getattr(whole, name), getattr(found, name)), name
    batch.num_logprobs[:] = -1
    assert sampler.logprobs_of(logits, ids, finite, batch) is None
    batch.num_logprobs[3] = 0
    own = sampler.logprobs_of(logits, ids, finite, batch)
    assert own is not None and own.logprobs is not None and own.top_ids is None
    assert own.logprobs.nonzero().tolist() == [[3]]


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
            sampler.sample(random_logits(num, 40), batch)
        return counted.num

    assert calls(2) == calls(48) < 160
