"""Directories that transformers saved: every tensor, the configuration and the logits are transformers' own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.agent.model.checkpoints import save_checkpoint

from dragoman_agent.model import safetensors_source
from dragoman_agent.model.errors import ModelFileError
from dragoman_agent.model.layers import PagedCache, SequenceView, StepTensors, TorchOps, _visible
from dragoman_agent.model.llama import assemble, forward, logits
from dragoman_agent.model.quant import dequantise
from dragoman_agent.model.rope import rope_frequencies
from dragoman_agent.model.safetensors_source import SafetensorsSource
from dragoman_agent.model.source import ModelSource, open_model

YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    ("llama", {"attention_bias": True, "head_dim": 24}),
    ("mistral", {"sliding_window": 8}),
    ("qwen2", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    ("qwen3", {"tie_word_embeddings": True, "head_dim": 32}),
    ("qwen3", {"attention_bias": True, "num_key_value_heads": 4}),
]


def opened(directory: Path) -> ModelSource:
    source = open_model(str(directory), directory)
    source.check()
    assert isinstance(source, ModelSource)
    return source


def our_logits(source: ModelSource, token_ids: list[int]) -> torch.Tensor:
    """Logits [len(token_ids), vocab_size] of one prompt, in float32."""
    names, config, count = set(source.tensor_names()), source.config, len(token_ids)

    def tensor(name: str) -> torch.Tensor | None:
        if name not in names:
            return None
        values = torch.from_numpy(dequantise(source.tensor(name)))
        return values.reshape(-1) if name.endswith(("norm", ".bias")) else values

    weights = assemble(config, tensor)
    inverse, attention_factor = rope_frequencies(config)
    angles = torch.arange(count).float().unsqueeze(1) * torch.from_numpy(inverse)
    mask = _visible(count, count, config.sliding_window, torch.device("cpu"))
    step = StepTensors(
        token_ids=torch.tensor(token_ids),
        slot_blocks=torch.ones(count, dtype=torch.int64),
        slot_offsets=torch.arange(count),
        cos=(angles.cos() * attention_factor).unsqueeze(1),
        sin=(angles.sin() * attention_factor).unsqueeze(1),
        sequences=(SequenceView(0, count, count, torch.tensor([1]), mask),),
        last_rows=torch.arange(count),
    )
    size = (config.num_layers, 2, config.num_kv_heads, 64, config.head_dim)
    with torch.inference_mode():
        hidden = forward(config, weights, PagedCache(torch.zeros(size), torch.zeros(size)), step, TorchOps())
        return logits(weights, hidden, TorchOps())


@pytest.mark.parametrize(("family", "options"), FAMILIES, ids=lambda value: value if isinstance(value, str) else "")
@pytest.mark.parametrize("max_shard_size", ["1GB", "60KB"])
def test_logits_equal_transformers(tmp_path: Path, family: str, options: dict[str, Any], max_shard_size: str) -> None:
    model = save_checkpoint(tmp_path, family, max_shard_size=max_shard_size, **options)
    source = opened(tmp_path)
    assert (len(source.files) > 1) == (max_shard_size == "60KB")
    token_ids = [(7 * i + 3) % 400 for i in range(40)]
    with torch.inference_mode():
        expected = model(torch.tensor([token_ids])).logits[0]
    found = our_logits(source, token_ids)
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_tensor_is_the_stored_one(tmp_path: Path, dtype: torch.dtype) -> None:
    save_checkpoint(tmp_path, "qwen3", dtype=dtype, max_shard_size="60KB")
    source = opened(tmp_path)
    stored: dict[str, torch.Tensor] = {}
    for path in source.files:
        stored |= load_file(path)
    renamed = {"input_layernorm": "input_norm", "post_attention_layernorm": "post_attention_norm"}
    for theirs, tensor in stored.items():
        ours = theirs.removeprefix("model.").removesuffix(".weight").replace("self_attn.", "").replace("mlp.", "")
        for old, new in renamed.items():
            ours = ours.replace(old, new)
        found = source.tensor(ours)
        assert not found.data.flags.writeable
        assert not found.data.flags.owndata
        assert source.layout(ours).num_bytes == found.data.nbytes
        np.testing.assert_array_equal(dequantise(found), tensor.float().numpy().reshape(found.shape))
    assert len(stored) == len(source.tensor_names())
    assert source.total_bytes == sum(tensor.numel() * tensor.element_size() for tensor in stored.values())


def test_the_configuration_is_the_saved_one(tmp_path: Path) -> None:
    model = save_checkpoint(tmp_path, "qwen3", head_dim=32, rms_norm_eps=1e-5, rope_parameters=YARN)
    theirs, ours = model.config, opened(tmp_path).config
    assert (ours.name, ours.architecture, ours.qk_norm, ours.attention_bias) == (tmp_path.name, "qwen3", True, False)
    assert (ours.num_layers, ours.hidden_size, ours.intermediate_size, ours.vocab_size) == (
        theirs.num_hidden_layers,
        theirs.hidden_size,
        theirs.intermediate_size,
        theirs.vocab_size,
    )
    assert (ours.num_heads, ours.num_kv_heads, ours.head_dim) == (4, 2, 32)
    assert (ours.rope_theta, ours.rms_norm_eps, ours.tied_embeddings) == (1e6, 1e-5, False)
    assert (ours.rope_scaling.kind, ours.rope_scaling.factor, ours.rope_scaling.original_max_position) == (
        "yarn",
        4.0,
        128,
    )
    assert ours.num_parameters == sum(parameter.numel() for parameter in model.parameters())


def test_a_bare_decoder_as_embedding_models_have(tmp_path: Path) -> None:
    model = save_checkpoint(tmp_path, "qwen3", base=True, tie_word_embeddings=True)
    source = opened(tmp_path)
    assert source.config.tied_embeddings
    token_ids = [5, 9, 300, 2]
    with torch.inference_mode():
        hidden = model(torch.tensor([token_ids])).last_hidden_state[0]
        expected = hidden @ model.embed_tokens.weight.T
    assert (our_logits(source, token_ids) - expected).abs().max() <= 1e-4 * expected.abs().max()


def change_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    value = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: item for key, item in value.items() if item is not ...}))


def change_tensors(directory: Path, **changes: torch.Tensor | None) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path) | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)


def test_a_head_of_its_own_is_used_though_the_config_says_tied(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers does the same."""
    save_checkpoint(tmp_path, "llama")
    change_config(tmp_path, tie_word_embeddings=True)
    source = opened(tmp_path)
    assert not source.config.tied_embeddings
    assert "tie_word_embeddings is true, yet 'lm_head.weight' differs from the embedding" in caplog.text
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.inference_mode():
        expected = model(torch.tensor([[1, 2, 3]])).logits[0]
    assert (our_logits(source, [1, 2, 3]) - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("says", [True, False, ...])
def test_a_stored_copy_of_the_embedding_is_tied(tmp_path: Path, says: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = save_checkpoint(tmp_path, "llama")
    change_config(tmp_path, tie_word_embeddings=says)
    change_tensors(tmp_path, **{"lm_head.weight": model.model.embed_tokens.weight.detach().clone()})
    assert opened(tmp_path).config.tied_embeddings
    assert not caplog.records


def test_no_head_and_nothing_said_is_tied_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_checkpoint(tmp_path, "llama")
    change_config(tmp_path, tie_word_embeddings=...)
    change_tensors(tmp_path, **{"lm_head.weight": None})
    source = open_model(str(tmp_path), tmp_path)
    assert source.config.tied_embeddings
    assert "no 'lm_head.weight' and no tie_word_embeddings" in caplog.text


def test_no_head_where_the_config_says_untied_is_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "llama")
    change_config(tmp_path, tie_word_embeddings=False)
    change_tensors(tmp_path, **{"lm_head.weight": None})
    with pytest.raises(ModelFileError, match=r"tie_word_embeddings is false, yet .* 'lm_head.weight'; download incom"):
        open_model(str(tmp_path), tmp_path)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            {"model.layers.1.mlp.up_proj.weight": None},
            r"1 of \d+ tensors are missing, the first is 'model.layers.1.mlp.up_proj.weight' \(layers.1.up_proj\)",
        ),
        (
            {"model.norm.weight": torch.zeros(64, dtype=torch.int64)},
            "tensor 'model.norm.weight' has dtype I64, which is not supported",
        ),
        (
            {"model.layers.0.self_attn.q_proj.weight": torch.zeros(64, 32)},
            r"tensor 'model.layers.0.self_attn.q_proj.weight' \(layers.0.q_proj\) has shape \[64, 32\].*\[64, 64\]",
        ),
        ({"model.layers.9.mlp.up_proj.weight": torch.zeros(2)}, "1 tensors are not part of a llama model"),
        ({"model.layers.0.self_attn.q_proj.lora_A": torch.zeros(2)}, "not part of a llama model"),
        ({"norm.weight": torch.zeros(64)}, "tensors .* are the same part of the model"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    tmp_path: Path, tensors: dict[str, torch.Tensor | None], message: str
) -> None:
    save_checkpoint(tmp_path, "llama")
    change_tensors(tmp_path, **tensors)
    with pytest.raises(ModelFileError, match=message):
        opened(tmp_path)


def test_every_tensor_has_its_name_in_the_file(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "qwen3")
    whole = opened(tmp_path)
    for name in whole.tensor_names():
        assert safetensors_source._stored_name(name) == whole.stored_name(name)
        assert safetensors_source._canonical_name(whole.stored_name(name)) == name
    assert whole.stored_name("layers.0.q_proj.bias") == "model.layers.0.self_attn.q_proj.bias"


def test_frequencies_that_old_files_store_are_computed_instead(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "llama")
    change_tensors(tmp_path, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)})
    opened(tmp_path)


def test_the_digest_tells_models_apart(tmp_path: Path) -> None:
    first, same, other, renamed = (tmp_path / name for name in "abcd")
    for directory in (first, same, renamed):
        save_checkpoint(directory, "llama")
    save_checkpoint(other, "llama", initializer_range=0.07)
    change_config(renamed, rms_norm_eps=1e-4)
    digests = [open_model(str(directory), tmp_path).digest for directory in (first, same, other, renamed)]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def test_file_order_is_the_order_of_the_data(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "llama", max_shard_size="60KB")
    source = SafetensorsSource(tmp_path)
    order = source.file_order()
    assert sorted(order) == sorted(source.tensor_names())
    places = [source._find(name) for name in order]
    keys = [(file.path.name, tensor.offset) for file, tensor in places]
    assert keys == sorted(keys)
    for name in order:
        extent = source.extent(name)
        assert extent is not None
        stored = extent.path.read_bytes()[extent.offset : extent.offset + extent.num_bytes]
        assert stored == source.tensor(name).data.tobytes()


def test_a_download_cache_names_the_model(tmp_path: Path) -> None:
    """`snapshots/REVISION` holds links into `blobs`."""
    blobs = tmp_path / "models--org--tiny-1b" / "blobs"
    snapshot = tmp_path / "models--org--tiny-1b" / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    save_checkpoint(blobs, "llama")
    for index, path in enumerate(sorted(blobs.iterdir())):
        (snapshot / path.name).symlink_to(path.rename(blobs / f"blob{index}"))
    source = opened(snapshot)
    assert (source.name, source.config.name) == ("tiny-1b", "tiny-1b")
