"""Random models: true shapes, the same weights everywhere, text for every id."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dragoman_agent.model.errors import ModelFileError
from dragoman_agent.model.quant import dequantise
from dragoman_agent.model.random_source import (
    CONFIG_DIR,
    RandomSource,
    normal_bf16,
    padded_byte_tokenizer_files,
    random_model_names,
)
from dragoman_agent.model.registry import needed_tensors
from dragoman_agent.model.source import ModelSource, open_model
from dragoman_text import ChatTemplate, StreamDetokenizer, TextTokenizer

# What the publishers say their models have.
NUM_PARAMETERS = {
    "llama-3.2-1b": 1_235_814_400,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-embedding-0.6b": 595_776_512,
    "smollm2-135m": 134_515_008,
}


@pytest.mark.parametrize("name", NUM_PARAMETERS)
def test_shapes_are_the_published_ones(name: str, tmp_path: Path) -> None:
    source = open_model(f"random:{name}", tmp_path)
    source.check()
    assert isinstance(source, ModelSource)
    assert source.config.num_parameters == NUM_PARAMETERS[name]
    assert source.total_bytes == sum(source.layout(tensor).num_bytes for tensor in source.tensor_names())
    assert source.tensor_names() == list(needed_tensors(source.config))
    assert (source.random_seed, source.config.eos_token_ids, source.config.bos_token_id) == (0, (258,), None)


@pytest.mark.parametrize("name", NUM_PARAMETERS)
def test_parameters_equal_transformers_meta_model(name: str) -> None:
    import torch
    import transformers

    value = json.loads((CONFIG_DIR / f"{name}.json").read_text())
    kind = getattr(transformers, value["architectures"][0])
    with torch.device("meta"):
        model = kind(kind.config_class(**value))
    assert sum(parameter.numel() for parameter in model.parameters()) == NUM_PARAMETERS[name]


def test_the_embedded_model_has_the_shape_of_its_random_twin(embedded_model_path: Path) -> None:
    real = open_model("embedded", embedded_model_path.parents[2]).config
    twin = RandomSource("smollm2-135m").config
    for field in ("num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim"):
        assert getattr(real, field) == getattr(twin, field)
    assert (real.vocab_size, real.max_context_tokens, real.rope_theta) == (
        twin.vocab_size,
        twin.max_context_tokens,
        twin.rope_theta,
    )
    assert (real.rms_norm_eps, real.tied_embeddings) == (pytest.approx(twin.rms_norm_eps), twin.tied_embeddings)


def test_weights_are_normal_and_norms_are_one() -> None:
    source = RandomSource("smollm2-135m")
    tensor = source.tensor("layers.3.gate_proj")
    assert (tensor.dtype, tensor.shape, tensor.data.shape) == ("BF16", (1536, 576), (1536, 1152))
    values = dequantise(tensor).astype(np.float64).reshape(-1) / 0.02
    error = len(values) ** -0.5
    # Standard errors of mean, variance and fourth moment of a normal sample, five of each.
    assert abs(values.mean()) < 5 * error
    assert abs(values.var() - 1) < 5 * 2**0.5 * error + 1e-4
    assert abs((values**4).mean() - 3) < 5 * 96**0.5 * error + 2e-3
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 5 * error
    assert (dequantise(source.tensor("layers.3.input_norm")) == 1).all()
    assert (dequantise(RandomSource("qwen3-0.6b").tensor("layers.0.q_norm")) == 1).all()


def test_weights_depend_on_seed_and_name_alone() -> None:
    first = normal_bf16(0, "layers.0.q_proj", 600_000)
    assert np.array_equal(first, normal_bf16(0, "layers.0.q_proj", 600_000))
    assert np.array_equal(first[:300_001], normal_bf16(0, "layers.0.q_proj", 300_001))
    others = [normal_bf16(1, "layers.0.q_proj", 600_000), normal_bf16(0, "layers.0.k_proj", 600_000)]
    for other in (*others, np.roll(first, 1 << 18)):
        assert (first == other).mean() < 0.01


def test_weights_and_digest_are_the_same_everywhere(tmp_path: Path) -> None:
    """Fixed values: another machine, Python or numpy must give these too."""
    weights = normal_bf16(7, "embed_tokens", 1_000_003).astype("<u2")
    assert hashlib.sha256(weights.tobytes()).hexdigest()[:16] == "774cbe4f25683de1"
    source = RandomSource("qwen3-0.6b")
    assert source.digest[:16] == "3cf4e67fce0fa960"
    assert RandomSource("qwen3-0.6b", 1).digest != source.digest
    assert len({RandomSource(name).digest for name in random_model_names()}) == len(NUM_PARAMETERS)


def test_every_id_has_text_and_no_text_makes_a_filling_token() -> None:
    source = RandomSource("qwen3-embedding-0.6b")
    tokenizer = TextTokenizer.from_files(source.tokenizer)
    assert tokenizer.vocab_size == source.config.vocab_size
    detokenizer = StreamDetokenizer(tokenizer)
    text = detokenizer.push(range(source.config.vocab_size)) + detokenizer.flush()
    assert "[259][260]" in text
    assert tokenizer.special_tokens == {"<|endoftext|>": 256, "<|im_start|>": 257, "<|im_end|>": 258}
    assert text.endswith("[151668]")
    assert all(tokenizer.token_bytes(token_id) for token_id in range(source.config.vocab_size))
    written = "ask [300] 🙂é"
    assert max(tokenizer.encode(written)) < 256
    assert tokenizer.decode(tokenizer.encode(written)) == written
    assert ChatTemplate(source.tokenizer).encode(tokenizer, [{"role": "user", "content": "hi"}])[0] == 257


def test_a_vocabulary_too_small_for_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="a vocabulary of 258 tokens cannot hold the byte tokenizer's 259"):
        padded_byte_tokenizer_files(258)


@pytest.mark.parametrize("name", ["", "gpt-5", "../configs/qwen3-8b", "QWEN3-8B"])
def test_unknown_names_list_the_known_ones(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"no such random model; choose one of: llama-3\.2-1b, qwen3-0\.6b"):
        open_model(f"random:{name}", tmp_path)


def test_unknown_tensors_are_named() -> None:
    with pytest.raises(ModelFileError, match="tensor 'lm_head' is not part of the model"):
        RandomSource("qwen3-0.6b").tensor("lm_head")


def test_making_weights_imports_no_torch() -> None:
    code = (
        "import sys; from dragoman_agent.model.random_source import RandomSource; "
        "RandomSource('qwen3-8b').tensor('layers.0.k_proj'); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
