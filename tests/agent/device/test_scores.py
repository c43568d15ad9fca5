"""Scores of given tokens on each CPU road against transformers in float64, and against the road's own sampling."""

from __future__ import annotations

import shutil
from typing import Any

import numpy as np
import pytest
import torch

from dragoman_agent.device.cpu import CpuDevice
from dragoman_agent.device.cpu_road import NATIVE_FLOAT32, TORCH_FLOAT32

NEEDS_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++, which is not installed")
ROADS = [TORCH_FLOAT32, pytest.param(NATIVE_FLOAT32, marks=NEEDS_COMPILER)]


def scored(device: CpuDevice, pages: Any, sequence: Any, count: int, num_top: int) -> Any:
    """Compute the next `count` tokens and score what follows each, as far as there is something."""
    start = sequence.computed
    step, _ = pages.batch([(sequence, count)])
    last = min(start + count, len(sequence.tokens) - 1)
    step.score_rows = np.arange(last - start, dtype=np.int32)
    step.score_targets = np.array(sequence.tokens[start + 1 : last + 1], np.int32)
    step.num_score_logprobs = num_top
    return device.submit(step).result()


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("chunk", [150, 67])
def test_scores_equal_a_float64_reference(
    random_model: Any, make_plan: Any, pages: Any, new_sequence: Any, road: str, chunk: int
) -> None:
    model = random_model("llama")
    tokens = np.random.default_rng(2).integers(0, model.config.vocab_size, 150).tolist()
    device = CpuDevice()
    device.load(model, make_plan(model, road, max_num_seqs=2), lambda _: None)
    try:
        layout, sequence = pages(make_plan(model, road)), new_sequence(tokens)
        results = [scored(device, layout, sequence, min(chunk, 150 - at), 4) for at in range(0, 150, chunk)]
    finally:
        device.close()
    with torch.inference_mode():
        exact = model.reference.double()(torch.tensor([tokens])).logits[0].log_softmax(-1).numpy()
        model.reference.float()
    own = np.concatenate([result.score_logprobs for result in results])
    assert own == pytest.approx(exact[np.arange(149), tokens[1:]], abs=2e-4)
    ids = np.concatenate([result.score_top_ids for result in results])
    top = np.concatenate([result.score_top_logprobs for result in results])
    best = -np.sort(-exact[:149], axis=1)[:, :4]
    assert top == pytest.approx(best, abs=2e-4)
    assert np.take_along_axis(exact[:149], ids, axis=1) == pytest.approx(best, abs=2e-4)
    assert len(results[-1].token_ids) == 1, "the last position is sampled as ever"


@pytest.mark.parametrize("road", ROADS)
def test_b04_a_score_is_what_sampling_reports(
    random_model: Any, make_plan: Any, pages: Any, new_sequence: Any, road: str
) -> None:
    model = random_model("qwen3")
    tokens = np.random.default_rng(3).integers(0, model.config.vocab_size, 40).tolist()
    device = CpuDevice()
    device.load(model, make_plan(model, road), lambda _: None)
    try:
        layout = pages(make_plan(model, road))
        result = scored(device, layout, new_sequence(tokens), 40, 1)
        for end in (1, 17, 39):
            step, _ = layout.batch([(new_sequence(tokens[:end]), end)], num_logprobs=np.array([1], np.int32))
            sampled = device.submit(step).result()
            assert sampled.top_ids[0, 0] == result.score_top_ids[end - 1, 0]
            assert sampled.top_logprobs[0, 0] == pytest.approx(result.score_top_logprobs[end - 1, 0], abs=1e-5)
    finally:
        device.close()
