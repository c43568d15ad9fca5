"""What the sampler asks a device to tell: on a GPU each such question waits until everything queued before it is done."""

from typing import Any

import numpy as np
import pytest
import torch
from tests.agent.engine.sampling_cases import make_batch, packed, random_logits
from torch.utils._python_dispatch import TorchDispatchMode

from dragoman_agent.device.base import Penalties, SamplingBatch
from dragoman_agent.engine import sampler
from dragoman_agent.engine.host_sampler import HostSampler

QUESTIONS = ("nonzero", "_local_scalar_dense", "masked_select", "unique", "equal", "is_nonzero", "repeat_interleave")


class Questions(TorchDispatchMode):
    """The calls whose result, or its size, the host has to know."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name.startswith("index") and any(
            isinstance(one, torch.Tensor) and one.dtype in (torch.bool, torch.uint8)
            for given in args[1:2]
            for one in (given if isinstance(given, list | tuple) else (given,))
        )
        if name in QUESTIONS or by_mask:
            self.asked.append(name)
        return func(*args, **(kwargs or {}))


def edits(num: int, vocab_size: int) -> dict[str, Any]:
    """Every kind of edit, in rows of their own."""
    ids = np.array([3, 4, 4], np.int32)
    return {
        "penalties": {0: Penalties(1.3, 0.2, 0.1, ids, ids)},
        "logit_bias": {1: (ids[:1], np.array([50.0], np.float32))},
        "banned": {2: ids},
        "allowed": {3: np.arange(700, dtype=np.int32)},
        "masked_rows": np.array([4], np.int32),
        "masks": packed(np.arange(vocab_size)[None] % 2 == 0),
    }


def asked(logits: torch.Tensor, batch: SamplingBatch) -> list[str]:
    with Questions() as questions:
        sampler.sample(logits, batch)
    return questions.asked


@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"temperature": 0.0},
        {"top_k": 20},
        {"top_k": 700},
        {"top_k": 20, "top_p": 0.95},
        {"top_k": 512, "top_p": 0.999},
        {"min_p": 0.1, "num_logprobs": 3},
    ],
    ids=str,
)
def test_a_step_is_sampled_without_a_question(filters: dict[str, Any]) -> None:
    """Also from flat logits, in which top-p ends outside of the candidates that are looked at first."""
    vocab_size = 900
    for scale in (0.001, 3.0):
        logits = random_logits(8, vocab_size, scale=scale)
        assert asked(logits, make_batch(8, seed=np.arange(8), **filters, **edits(8, vocab_size))) == []


def test_top_p_alone_asks_once_whether_its_candidates_are_enough() -> None:
    assert asked(random_logits(8, 900), make_batch(8, top_p=[0.9, 1.0] * 4, top_k=[0, 0, 30, 0] * 2)) == ["nonzero"]


def test_a_question_is_noticed() -> None:
    with Questions() as questions:
        values = torch.arange(3)
        values[values > 1] = 0
        torch.nonzero(values)
        bool(values.any())
    assert questions.asked == ["index_put_", "nonzero", "_local_scalar_dense"]


@pytest.mark.parametrize("top_k", [1, 20, 512, 513])
@pytest.mark.parametrize("top_p", [0.1, 0.6, 0.95])
def test_ties_that_reach_beyond_the_candidates_are_kept_by_top_p_too(top_k: int, top_p: float) -> None:
    """600 tokens are as likely as the last one that top-k keeps: where top-p wants any of them it keeps all, as the host does."""
    vocab_size, rows = 1200, 100
    one = torch.full((vocab_size,), -4.0)
    one[:5], one[200:800] = torch.tensor([3.0, 2.5, 2.0, 1.5, 1.0]), 0.0
    logits = one.expand(rows, -1).contiguous()
    batch = make_batch(rows, top_k=top_k, top_p=top_p, seed=8, cursor=np.arange(rows))
    drawn = sampler.sample(logits, batch).token_ids.numpy()
    assert np.array_equal(drawn, HostSampler(vocab_size).sample(logits.numpy(), batch).token_ids)
    if top_k > 5 and top_p > 0.9:
        assert drawn.max() > 700 and drawn.max() < 800
