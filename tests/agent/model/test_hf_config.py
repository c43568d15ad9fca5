"""config.json: every spelling that publishers use, and every file that must not be guessed at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dragoman_agent.model.config import ModelConfig, RopeScaling
from dragoman_agent.model.errors import ModelFileError
from dragoman_agent.model.hf_config import config_from_hf
from dragoman_agent.model.rope import rope_frequencies

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 1024}
YARN = {"factor": 4.0, "original_max_position_embeddings": 1024}


def read(**changes: Any) -> ModelConfig:
    value = {key: item for key, item in (BASE | changes).items() if item is not ...}
    return config_from_hf(Path("dir/config.json"), value, "m", (2,))


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"rope_type": "default"}, RopeScaling()),
        ({"rope_type": "linear", "factor": 2.0}, RopeScaling(kind="linear", factor=2.0)),
        ({"rope_type": "llama3"} | LLAMA3, RopeScaling(kind="llama3", factor=8.0, original_max_position=1024)),
        ({"rope_type": "yarn"} | YARN, RopeScaling(kind="yarn", factor=4.0, original_max_position=1024)),
        (
            {"rope_type": "yarn", "beta_fast": 16.0, "beta_slow": 2, "attention_factor": 1.5} | YARN,
            RopeScaling(
                kind="yarn", factor=4.0, original_max_position=1024, beta_fast=16, beta_slow=2, attention_factor=1.5
            ),
        ),
    ],
)
def test_rope_in_every_spelling_gives_transformers_frequencies(
    parameters: dict[str, Any], expected: RopeScaling
) -> None:
    old = {"type" if key == "rope_type" else key: item for key, item in parameters.items()}
    spellings = [
        read(rope_scaling=parameters),
        read(rope_scaling=old),
        read(rope_theta=..., rope_parameters=parameters | {"rope_theta": 500000.0}),
        read(rope_scaling=parameters, rope_parameters=parameters | {"rope_theta": 500000.0}),
    ]
    assert all((config.rope_scaling, config.rope_theta) == (expected, 500000.0) for config in spellings)
    theirs = transformers.LlamaConfig(**{**BASE, "rope_scaling": parameters})
    if parameters["rope_type"] != "default":
        frequencies, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](theirs, torch.device("cpu"))
        found, found_factor = rope_frequencies(spellings[0])
        assert np.allclose(found, frequencies.numpy(), rtol=2e-6, atol=0)
        assert found_factor == pytest.approx(factor)


@pytest.mark.parametrize("scaling", [None, {}, {"rope_type": "default"}, {"rope_theta": 500000.0}])
def test_no_scaling(scaling: Any) -> None:
    assert read(rope_scaling=scaling).rope_scaling == RopeScaling()


def test_a_file_older_than_rope_theta_means_10000() -> None:
    assert read(rope_theta=...).rope_theta == 10000.0


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"factor": 2.0}, r"key 'rope_scaling.rope_type' is missing"),
        (
            {"type": "dynamic", "factor": 2.0},
            r"'rope_scaling.type' is 'dynamic': .*known: default, linear, llama3, yarn",
        ),
        ({"rope_type": "longrope"}, "'rope_scaling.rope_type' is 'longrope'"),
        ({"rope_type": "linear"}, "'rope_scaling.factor' is missing"),
        ({"rope_type": "linear", "factor": "2"}, "'rope_scaling.factor' is '2', a positive number"),
        ({"rope_type": "linear", "factor": 0.5}, "'rope_scaling.factor' is 0.5, a number from 1"),
        ({"rope_type": "yarn", "factor": 4.0}, "'rope_scaling.original_max_position_embeddings' is missing"),
        ({"rope_type": "llama3"} | LLAMA3 | {"factor": None}, "'rope_scaling.factor' is missing"),
        ({"rope_type": "llama3"} | LLAMA3 | {"low_freq_factor": None}, "'rope_scaling.low_freq_factor' is missing"),
        ({"rope_type": "llama3"} | LLAMA3 | {"high_freq_factor": None}, "'rope_scaling.high_freq_factor' is missing"),
        (
            {"rope_type": "llama3"} | LLAMA3 | {"original_max_position_embeddings": None},
            "'rope_scaling.original_max_position_embeddings' is missing",
        ),
        ({"rope_type": "llama3"} | LLAMA3 | {"low_freq_factor": 4.0}, "a number below high_freq_factor"),
        ({"rope_type": "yarn", "type": "linear"} | YARN, "it contradicts 'rope_type'"),
        ({"rope_type": "yarn", "mscale": 1.0} | YARN, "'rope_scaling.mscale'"),
        ({"rope_type": "yarn", "truncate": False} | YARN, "'rope_scaling.truncate'"),
        ({"rope_type": "yarn", "beta_fast": 1.0} | YARN, "a number above beta_slow"),
        ({"rope_type": "yarn", "rope_theta": 1e4} | YARN, "'rope_theta' is 500000.0: it contradicts"),
        ([1], r"'rope_scaling' is \[1\], an object"),
    ],
)
def test_incomplete_or_unknown_scalings_name_the_key(scaling: Any, message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        read(rope_scaling=scaling)


def test_two_spellings_that_disagree() -> None:
    with pytest.raises(ModelFileError, match="contradicts 'rope_parameters'"):
        read(
            rope_scaling={"rope_type": "linear", "factor": 2.0}, rope_parameters={"rope_type": "linear", "factor": 3.0}
        )


def test_an_unknown_rope_key_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    read(rope_scaling={"rope_type": "linear", "factor": 2.0, "finetuned": True})
    assert "key 'rope_scaling.finetuned' is not known and has no effect" in caplog.text


def test_yarn_stretches_the_context_where_the_file_was_not_adapted() -> None:
    assert read(rope_scaling={"rope_type": "yarn"} | YARN, max_position_embeddings=1024).max_context_tokens == 4096
    assert read(rope_scaling={"rope_type": "yarn"} | YARN, max_position_embeddings=8192).max_context_tokens == 8192


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (8, 2, 64)),
        ({"head_dim": 128}, (8, 2, 128)),
        ({"head_dim": None}, (8, 2, 64)),
        ({"num_key_value_heads": ...}, (8, 8, 64)),
        ({"num_key_value_heads": None}, (8, 8, 64)),
        ({"hidden_size": 100, "head_dim": 64}, (8, 2, 64)),
    ],
)
def test_heads(changes: dict[str, Any], expected: tuple[int, int, int]) -> None:
    config = read(**changes)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 3}, "'num_key_value_heads' is 3: 8 attention heads cannot share that many evenly"),
        ({"hidden_size": 500}, "key 'head_dim' is missing and hidden_size 500 is not a multiple of 8"),
        ({"head_dim": 63}, r"head size 63 \(key 'head_dim'\) is not an even number"),
        ({"head_dim": -64}, "'head_dim' is -64"),
        ({"num_attention_heads": 0}, "'num_attention_heads' is 0"),
        ({"hidden_size": "512"}, "'hidden_size' is '512', an integer"),
        ({"hidden_size": True}, "'hidden_size' is True"),
        ({"hidden_size": 1 << 40}, "'hidden_size' is 1099511627776"),
        ({"hidden_size": ...}, "key 'hidden_size' is missing"),
        ({"intermediate_size": None}, "key 'intermediate_size' is missing"),
        ({"rms_norm_eps": ...}, "key 'rms_norm_eps' is missing"),
        ({"rms_norm_eps": float("nan")}, "'rms_norm_eps' is nan"),
        ({"vocab_size": ...}, "key 'vocab_size' is missing"),
        ({"max_position_embeddings": ...}, "key 'max_position_embeddings' is missing"),
        ({"architectures": ["MambaForCausalLM"]}, r"\['MambaForCausalLM'\]: not supported \(known: LlamaForCausalLM"),
        ({"architectures": "LlamaForCausalLM"}, "a list of strings"),
        ({"architectures": ..., "model_type": "gpt2"}, "'model_type' is 'gpt2': not supported"),
        ({"architectures": ..., "model_type": ...}, "key 'architectures' is missing"),
        ({"hidden_act": "gelu"}, "'hidden_act' is 'gelu'"),
        ({"mlp_bias": True}, "'mlp_bias'"),
        ({"partial_rotary_factor": 0.5}, "'partial_rotary_factor'"),
        ({"num_experts": 8}, "mixtures of experts"),
        ({"quantization_config": {"quant_method": "awq"}}, r"quantised \(awq\)"),
        ({"tie_word_embeddings": "yes"}, "'tie_word_embeddings' is 'yes', true or false"),
    ],
)
def test_values_that_cannot_be_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFileError, match=message) as caught:
        read(**changes)
    assert str(caught.value).startswith("dir/config.json: ")


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("Llama", {"attention_bias": True}, ("llama", True, True, False)),
        ("Llama", {}, ("llama", False, False, False)),
        ("Mistral", {"attention_bias": True}, ("mistral", False, False, False)),
        ("Qwen2", {}, ("qwen2", True, False, False)),
        ("Qwen3", {}, ("qwen3", False, False, True)),
        ("Qwen3", {"attention_bias": True}, ("qwen3", True, True, True)),
    ],
)
def test_biases_and_norms_of_each_family(family: str, changes: dict[str, Any], expected: tuple[Any, ...]) -> None:
    for suffix in ("ForCausalLM", "Model"):
        config = read(architectures=[family + suffix], **changes)
        found = (config.architecture, config.attention_bias, config.attention_output_bias, config.qk_norm)
        assert found == expected


@pytest.mark.parametrize(
    ("family", "changes", "window"),
    [
        ("Mistral", {"sliding_window": 256}, 256),
        ("Mistral", {"sliding_window": None}, None),
        ("Mistral", {"sliding_window": 256, "layer_types": ["full_attention"] * 4}, None),
        ("Llama", {"sliding_window": 256}, None),
        ("Qwen2", {"sliding_window": 256}, None),
        ("Qwen2", {"sliding_window": 256, "use_sliding_window": False, "max_window_layers": 0}, None),
        ("Qwen2", {"sliding_window": 256, "use_sliding_window": True, "max_window_layers": 4}, None),
        ("Qwen2", {"sliding_window": 256, "use_sliding_window": True, "max_window_layers": 0}, 256),
        ("Qwen3", {"sliding_window": 256, "use_sliding_window": True, "layer_types": ["sliding_attention"] * 4}, 256),
    ],
)
def test_sliding_windows(family: str, changes: dict[str, Any], window: int | None) -> None:
    assert read(architectures=[f"{family}ForCausalLM"], **changes).sliding_window == window


@pytest.mark.parametrize(
    "changes", [{"max_window_layers": 2}, {"layer_types": ["full_attention", "sliding_attention"] * 2}]
)
def test_windows_on_some_layers_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ModelFileError, match="covers some layers only"):
        read(architectures=["Qwen2ForCausalLM"], sliding_window=256, use_sliding_window=True, **changes)
