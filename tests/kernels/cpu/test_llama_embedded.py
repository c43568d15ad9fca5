"""The native step on the embedded model: float32 against transformers, int8 against float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

Make = Callable[..., Any]

NUM_NEW_TOKENS = 24
PROMPT_SEEDS = (0, 1, 2)
# Natural text as token ids of the file's own vocabulary ("<|im_start|>user\nWhat is gravity?..." and the like).
CHAT_PROMPT = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]


@pytest.fixture(scope="module")
def transformers_model(embedded_model: Any) -> Any:
    """LlamaForCausalLM in fp32 with the dequantised weights."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    shape = embedded_model.shape
    config = transformers.LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=shape.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        max_position_embeddings=shape.max_context_tokens,
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    names = {"input_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
    state = {}
    for name, value in embedded_model.plain.items():
        parts = name.split(".")
        kind = names.get(parts[-1], parts[-1])
        if kind.endswith("_proj"):
            kind = ("mlp." if kind in ("gate_proj", "up_proj", "down_proj") else "self_attn.") + kind
        state[".".join(["model", *parts[:-1], kind, "weight"])] = torch.from_numpy(value)
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, assign=True, strict=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()


def greedy(driver: Any, prompt: list[int], count: int) -> tuple[list[int], list[np.ndarray]]:
    logits = [driver.run([(0, prompt)])[0][0]]
    tokens = [int(logits[0].argmax())]
    while len(tokens) < count:
        logits.append(driver.run([(0, [tokens[-1]])])[0][0])
        tokens.append(int(logits[-1].argmax()))
    driver.release(0)
    return tokens, logits


def test_float32_greedy_equals_transformers(embedded_model: Any, transformers_model: Any, load: Make) -> None:
    import torch

    driver = load(embedded_model)
    prompts = [CHAT_PROMPT]
    prompts += [np.random.default_rng(s).integers(17, 49152, 12).tolist() for s in PROMPT_SEEDS]
    for prompt in prompts:
        tokens, logits = greedy(driver, prompt, NUM_NEW_TOKENS)
        with torch.inference_mode():
            whole = transformers_model(torch.tensor([prompt + tokens])).logits[0].numpy()
        expected = whole[len(prompt) - 1 : -1]
        assert tokens == expected.argmax(axis=-1).tolist()
        assert np.abs(np.stack(logits) - expected).max() < 1e-4 * np.abs(expected).max()


def test_int8_agrees_with_float32(embedded_model: Any, load: Make) -> None:
    exact, rounded = load(embedded_model), load(embedded_model, activation="int8")
    text, _ = greedy(exact, CHAT_PROMPT, 150)
    other, _ = greedy(
        exact, [*CHAT_PROMPT[:3], 9690, 549, 253, 2421, 618, 253, 3568, 30, 2, 198, 1, 520, 9531, 198], 160
    )
    agreed = total = 0
    for tokens in (CHAT_PROMPT + text, CHAT_PROMPT[:3] + other):
        want = exact.teacher_forced(0, tokens, prefill=8)
        got = rounded.teacher_forced(0, tokens, prefill=8)
        exact.release(0)
        rounded.release(0)
        same = want.argmax(axis=-1) == got.argmax(axis=-1)
        best_two = np.partition(want, -2, axis=-1)[:, -2:]
        margins = best_two[:, 1] - best_two[:, 0]
        assert same[margins > 0.5].all()
        agreed += int(same.sum())
        total += len(same)
    assert total >= 300
    assert agreed / total >= 0.95
