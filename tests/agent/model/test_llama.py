"""Parts of the torch model by themselves; the whole is compared with transformers in tests/agent/device."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dragoman_agent.model.config import ModelConfig, RopeScaling
from dragoman_agent.model.layers import PagedCache, SequenceView, StepTensors, TorchOps, _visible
from dragoman_agent.model.llama import assemble, forward, logits
from dragoman_agent.model.rope import rope_frequencies


def make_config(**changes: Any) -> ModelConfig:
    fields: dict[str, Any] = {
        "name": "small",
        "architecture": "llama",
        "num_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "vocab_size": 50,
        "max_context_tokens": 4096,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
        "tied_embeddings": True,
    }
    return ModelConfig(**fields | changes)


SCALINGS = [
    ({"rope_type": "linear", "factor": 2.5}, RopeScaling(kind="linear", factor=2.5)),
    (
        {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        RopeScaling(kind="llama3", factor=32.0, original_max_position=8192),
    ),
    (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        RopeScaling(kind="yarn", factor=4.0, original_max_position=32768),
    ),
    (
        {
            "rope_type": "yarn",
            "factor": 16.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 64,
            "beta_slow": 2,
            "attention_factor": 1.25,
        },
        RopeScaling(
            kind="yarn", factor=16.0, original_max_position=4096, beta_fast=64, beta_slow=2, attention_factor=1.25
        ),
    ),
]


@pytest.mark.parametrize("head_dim", [64, 128, 80])
@pytest.mark.parametrize(("parameters", "scaling"), SCALINGS, ids=lambda value: getattr(value, "kind", ""))
def test_rope_frequencies_equal_transformers(parameters: dict[str, Any], scaling: RopeScaling, head_dim: int) -> None:
    theirs = transformers.LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=131072,
        rope_parameters={"rope_theta": 500000.0} | parameters,
    )
    expected, expected_factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](theirs, torch.device("cpu"))
    found, factor = rope_frequencies(make_config(head_dim=head_dim, rope_scaling=scaling))
    assert np.allclose(found, expected.numpy(), rtol=2e-6, atol=0)
    assert factor == pytest.approx(expected_factor)


@pytest.mark.parametrize("kind", ["llama3", "yarn"])
def test_rope_scaling_without_its_original_length_is_refused(kind: Any) -> None:
    with pytest.raises(ValueError, match="lacks the original context length"):
        rope_frequencies(make_config(rope_scaling=RopeScaling(kind=kind, factor=4.0)))


@pytest.mark.parametrize(
    ("queries", "context", "window"), [(1, 9, None), (4, 9, None), (9, 9, None), (1, 9, 3), (4, 9, 3)]
)
def test_masks_by_definition(queries: int, context: int, window: int | None) -> None:
    mask = _visible(queries, context, window, torch.device("cpu"))
    for row in range(queries):
        at = context - queries + row
        for key in range(context):
            wanted = key <= at and (window is None or key > at - window)
            assert (True if mask is None else bool(mask[row, key])) == wanted


def random_tensors(config: ModelConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, cols: int) -> torch.Tensor:
        return torch.randn(rows, cols, generator=generator) / cols**0.5

    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    tensors = {"embed_tokens": matrix(config.vocab_size, hidden), "norm": torch.ones(hidden)}
    for layer in range(config.num_layers):
        parts = {
            "q_proj": matrix(q, hidden),
            "k_proj": matrix(kv, hidden),
            "v_proj": matrix(kv, hidden),
            "o_proj": matrix(hidden, q),
            "gate_proj": matrix(inner, hidden),
            "up_proj": matrix(inner, hidden),
            "down_proj": matrix(hidden, inner),
            "input_norm": torch.ones(hidden),
            "post_attention_norm": torch.ones(hidden),
        }
        tensors |= {f"layers.{layer}.{name}": value for name, value in parts.items()}
    return tensors


def test_a_missing_tensor_is_named() -> None:
    tensors = random_tensors(make_config())
    del tensors["layers.1.up_proj"]
    with pytest.raises(ValueError, match=r"small lacks the tensor layers\.1\.up_proj"):
        assemble(make_config(), tensors.get)


def test_a_bias_on_some_projections_only_is_refused() -> None:
    tensors = random_tensors(make_config()) | {"layers.0.k_proj.bias": torch.zeros(16)}
    with pytest.raises(ValueError, match="but not on all of them"):
        assemble(make_config(), tensors.get)


def one_step(config: ModelConfig, dtype: torch.dtype, num_tokens: int, neighbours: int) -> torch.Tensor:
    """Logits of one prompt, alone or with other prompts in the step."""
    weights = assemble(config, {k: v.to(dtype) for k, v in random_tensors(config).items()}.get)
    page_size, num_seqs = 16, neighbours + 1
    size = (config.num_layers, num_seqs + 1, config.num_kv_heads, page_size, config.head_dim)
    frequencies = torch.from_numpy(rope_frequencies(config)[0])
    positions = torch.arange(num_tokens).repeat(num_seqs)
    angles = positions.float().unsqueeze(1) * frequencies
    ids = torch.cat([(torch.arange(num_tokens) * 7 + 3 * i) % config.vocab_size for i in range(num_seqs)])
    step = StepTensors(
        token_ids=ids,
        slot_blocks=torch.arange(1, num_seqs + 1).repeat_interleave(num_tokens),
        slot_offsets=positions,
        cos=angles.cos().unsqueeze(1),
        sin=angles.sin().unsqueeze(1),
        sequences=tuple(
            SequenceView(
                i * num_tokens,
                (i + 1) * num_tokens,
                num_tokens,
                torch.tensor([i + 1]),
                _visible(num_tokens, num_tokens, None, torch.device("cpu")),
            )
            for i in range(num_seqs)
        ),
        last_rows=torch.tensor([num_tokens - 1]),
    )
    cache = PagedCache(torch.zeros(size, dtype=dtype), torch.zeros(size, dtype=dtype))
    with torch.inference_mode():
        return logits(weights, forward(config, weights, cache, step, TorchOps()), TorchOps())


def test_neighbours_change_a_row_by_no_more_than_rounding() -> None:
    alone, among = (one_step(make_config(), torch.float32, 12, neighbours) for neighbours in (0, 7))
    assert (alone - among).abs().max() <= 1e-5 * alone.abs().max()


def test_bfloat16_follows_float32() -> None:
    exact, rounded = (one_step(make_config(), dtype, 12, 0) for dtype in (torch.float32, torch.bfloat16))
    assert rounded.dtype == torch.float32
    assert torch.cosine_similarity(exact, rounded).item() > 0.999
