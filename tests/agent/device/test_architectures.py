"""Every architecture and rope scaling in fp32 against transformers, on each road, with the prompt cut anyhow."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.needs import need_cpu_kernels

from dragoman_agent.device.base import LoadProgress
from dragoman_agent.device.cpu_native import NativeRoad
from dragoman_agent.device.cpu_road import NATIVE_FLOAT32, TORCH_FLOAT32, shape_problem
from dragoman_agent.device.cpu_torch import TorchRoad

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied": {"tied": True},
    "llama-multi-head": {"num_key_value_heads": 6},
    "llama-linear-rope": {"rope": {"rope_type": "linear", "factor": 3.0}},
    "llama-llama3-rope": {"rope": LLAMA3},
    "llama-yarn-rope": {"rope": YARN, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 48},
    "mistral": {},
    "mistral-window": {"sliding_window": 24},
    "qwen2": {"tied": True},
    "qwen2-yarn-rope": {"rope": YARN},
    "qwen3": {},
    "llama-odd-head": {"head_dim": 20, "vocab_size": 77},
}
TORCH_ONLY = ("mistral-window", "llama-odd-head")
CASES = [(name, road) for name in MODELS for road in (TORCH_FLOAT32, NATIVE_FLOAT32)]
CASES = [(name, road) for name, road in CASES if road == TORCH_FLOAT32 or name not in TORCH_ONLY]
PROMPT_LENGTHS = (1, 5, 33, 70)
NUM_TOKENS = 64


def open_road(model: Any, plan: Any, tmp: Path) -> NativeRoad | TorchRoad:
    def ignore(_: LoadProgress) -> None:
        return

    if plan.road == TORCH_FLOAT32:
        return TorchRoad(model, plan, ignore)
    from dragoman_agent.model.embedded import default_cache_dir

    return NativeRoad(model, plan, default_cache_dir({}), ignore)


@pytest.mark.parametrize(("name", "road_name"), CASES)
def test_logits_and_greedy_tokens_equal_transformers(
    name: str, road_name: str, random_model: Any, make_plan: Any, pages: Any, new_sequence: Any, tmp_path: Path
) -> None:
    model = random_model(name.split("-", maxsplit=1)[0], **MODELS[name])
    assert (shape_problem(model.config) is not None) == (name in TORCH_ONLY)
    if road_name == NATIVE_FLOAT32:
        need_cpu_kernels()
    plan = make_plan(model, road_name)
    road = open_road(model, plan, tmp_path)
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, model.config.vocab_size, length).tolist() for length in PROMPT_LENGTHS]
    expected = [model.greedy(prompt, NUM_TOKENS) for prompt in prompts]
    layout = pages(plan, seed=2)
    sequences = [new_sequence(list(prompt)) for prompt in prompts]
    compared = 0
    while any(len(s.tokens) < len(p) + NUM_TOKENS for s, p in zip(sequences, prompts, strict=True)):
        # Chunks of random length: prefill of one sequence shares steps with decode of others.
        alive = [s for s, p in zip(sequences, prompts, strict=True) if len(s.tokens) < len(p) + NUM_TOKENS]
        work = [(s, int(rng.integers(1, min(s.pending, 20) + 1))) for s in alive]
        batch, sampled = layout.batch(work)
        logits, _ = road.run(batch)
        for sequence, row in zip(sampled, logits, strict=True):
            index = sequences.index(sequence)
            tokens, rows = expected[index]
            at = len(sequence.tokens) - len(prompts[index])
            assert np.abs(row - rows[at]).max() <= 1e-4 * np.abs(rows[at]).max()
            assert int(row.argmax()) == tokens[at]
            sequence.tokens.append(int(row.argmax()))
            compared += 1
    road.close()
    assert compared == len(prompts) * NUM_TOKENS


@pytest.mark.parametrize("road_name", [TORCH_FLOAT32, NATIVE_FLOAT32])
def test_pooled_hidden_state_is_the_last_one_after_the_final_norm(
    road_name: str, random_model: Any, make_plan: Any, pages: Any, new_sequence: Any, tmp_path: Path
) -> None:
    import torch

    model = random_model("llama")
    if road_name == NATIVE_FLOAT32:
        need_cpu_kernels()
    plan = make_plan(model, road_name)
    road = open_road(model, plan, tmp_path)
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1]]
    batch, _ = pages(plan).batch([(new_sequence(prompt), len(prompt)) for prompt in prompts], pool=[1, 0])
    _, hidden = road.run(batch)
    road.close()
    with torch.inference_mode():
        wanted = [model.reference.model(torch.tensor([p])).last_hidden_state[0, -1].numpy() for p in reversed(prompts)]
    assert np.abs(hidden - np.stack(wanted)).max() <= 1e-4 * np.abs(wanted).max()
