"""Models from files: canonical tensors, configuration, checks before weights are read, and every bad input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from dragoman_agent.model import gguf_source
from dragoman_agent.model.embedded import EMBEDDED_BYTES, embedded_target
from dragoman_agent.model.errors import ModelFileError
from dragoman_agent.model.quant import dequantise
from dragoman_agent.model.source import ModelSource, open_model
from dragoman_text import ChatTemplate, TextTokenizer

MakeModel = Callable[..., Path]


def opened(path: Path, tmp_path: Path) -> ModelSource:
    source = open_model(str(path), tmp_path / "cache")
    source.check()
    return source


def test_the_embedded_model(embedded_model_path: Path) -> None:
    source = open_model("embedded", embedded_model_path.parents[2])
    source.check()
    assert isinstance(source, ModelSource)
    config = source.config
    assert (config.architecture, config.num_layers, config.hidden_size, config.intermediate_size) == (
        "llama",
        30,
        576,
        1536,
    )
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (9, 3, 64, 49152)
    assert (config.max_context_tokens, config.rope_theta, config.tied_embeddings) == (8192, 100000.0, True)
    assert config.rms_norm_eps == pytest.approx(1e-5)
    assert config.num_parameters == 134_515_008
    assert (source.name, config.bos_token_id, config.eos_token_ids) == ("SmolLM2-135M-Instruct", 1, (2,))
    assert source.total_bytes == 96_576_768
    assert len(source.tensor_names()) == 272
    assert source.digest == "9181239f35bff3d510f50408d048fc80c5aaf749f45cd8c05b004f6dc8568ce6"
    assert open_model("smollm2-135m-instruct", embedded_model_path.parents[2]).digest == source.digest
    chat = ChatTemplate(source.tokenizer)
    assert chat.encode(TextTokenizer.from_files(source.tokenizer), [{"role": "user", "content": "hi"}])[0] == 1


def test_q_and_k_equal_transformers(embedded_model_path: Path, library_reader: gguf.GGUFReader) -> None:
    """transformers un-permutes with its own code; so are the rows here, bit for bit."""
    from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor

    processor = LlamaTensorProcessor({"num_attention_heads": 9, "num_key_value_heads": 3})
    stored = {tensor.name: tensor for tensor in library_reader.tensors}
    source = open_model("embedded", embedded_model_path.parents[2])
    for part in "qkv":
        name = f"blk.29.attn_{part}.weight"
        values = gguf.quants.dequantize(stored[name].data, stored[name].tensor_type)
        expected = processor.process(values, name).weights
        np.testing.assert_array_equal(dequantise(source.tensor(f"layers.29.{part}_proj")), expected)
        assert np.array_equal(values, expected) == (part == "v")


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("llama", {}),
        ("llama", {"tied": False}),
        ("llama", {"bias": True}),
        ("qwen2", {"bias": True, "tied": False}),
        ("qwen3", {"qk_norm": True}),
    ],
)
def test_every_architecture_is_complete(
    make_model: MakeModel, tmp_path: Path, architecture: str, options: dict[str, bool]
) -> None:
    path = make_model(architecture=architecture, **options)
    source = opened(path, tmp_path)
    config = source.config
    assert (config.architecture, config.head_dim, config.attention_bias) == (
        architecture,
        16,
        options.get("bias", False),
    )
    assert (config.tied_embeddings, config.qk_norm) == (options.get("tied", True), options.get("qk_norm", False))
    assert len(source.tensor_names()) == len(gguf.GGUFReader(path).tensors)
    for name in source.tensor_names():
        stored = source.tensor(name)
        assert stored.data.shape == (stored.shape[0], stored.shape[1] * 4)


@pytest.mark.parametrize(("architecture", "permuted"), [("llama", True), ("qwen2", False)])
def test_q_and_k_rows_are_in_half_split_order(
    make_model: MakeModel, tmp_path: Path, architecture: str, permuted: bool
) -> None:
    """The converter's permutation, applied to known rows, is undone for llama and never applied to others."""
    rows = np.arange(4 * 16, dtype=np.float32)
    half_split = np.repeat(rows[:, None], 64, axis=1)
    stored = half_split
    if permuted:
        stored = half_split.reshape(4, 2, 8, 64).swapaxes(1, 2).reshape(64, 64)
    path = make_model(
        architecture=architecture,
        tensors={"blk.0.attn_q.weight": stored, "blk.0.attn_k.weight": stored[:32], "blk.0.attn_q.bias": stored[:, 0]},
        bias=True,
    )
    source = opened(path, tmp_path)
    np.testing.assert_array_equal(dequantise(source.tensor("layers.0.q_proj")), half_split)
    np.testing.assert_array_equal(dequantise(source.tensor("layers.0.k_proj")), half_split[:32])
    np.testing.assert_array_equal(dequantise(source.tensor("layers.0.q_proj.bias")), rows[None])


def test_the_digest_sees_header_and_data_edges(make_model: MakeModel, tmp_path: Path) -> None:
    first = open_model(str(make_model("a.gguf")), tmp_path)
    same = open_model(str(make_model("b.gguf")), tmp_path)
    key = open_model(str(make_model("c.gguf", metadata={"x": 1})), tmp_path)
    data = open_model(str(make_model("d.gguf", tensors={"output_norm.weight": np.ones(64, np.float32)})), tmp_path)
    assert first.digest == same.digest
    assert len({first.digest, key.digest, data.digest}) == 3


def test_a_directory_joins_every_end_token(make_model: MakeModel, tmp_path: Path) -> None:
    """The GGUF names one, generation_config.json two, tokenizer_config.json another by its text (case B25)."""
    path = make_model()
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 5}))
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [5, 7], "temperature": 0.6, "top_p": 0.9, "top_k": 20})
    )
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|endoftext|>"}}))
    source = opened(tmp_path, tmp_path)
    assert source.path == path
    assert source.name == tmp_path.name
    assert source.generation.eos_token_ids == (5, 7, 256, 258)
    assert source.config.eos_token_ids == source.tokenizer.eos_token_ids == (5, 7, 256, 258)
    assert TextTokenizer.from_files(source.tokenizer).eos_ids == {5, 7, 256, 258}
    assert (source.generation.temperature, source.generation.top_p, source.generation.top_k) == (0.6, 0.9, 20)
    alone = opened(path, tmp_path)
    assert alone.generation.eos_token_ids == (258,)


def test_ends_of_turn_and_message_and_sampling_come_from_the_metadata(make_model: MakeModel, tmp_path: Path) -> None:
    metadata = {
        "tokenizer.ggml.eot_token_id": 256,
        "tokenizer.ggml.eom_token_id": 259,
        "general.sampling.temp": 0.5,
        "general.sampling.top_k": 40,
    }
    source = opened(make_model(metadata=metadata), tmp_path)
    assert source.generation.eos_token_ids == (256, 258, 259)
    assert (source.generation.temperature, source.generation.top_p, source.generation.top_k) == (0.5, None, 40)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("generation_config.json", "{", "not valid JSON"),
        ("config.json", "[]", "a JSON object was expected"),
        ("generation_config.json", '{"eos_token_id": "x"}', "eos_token_id holds 'x'"),
        ("generation_config.json", '{"eos_token_id": [true]}', "eos_token_id holds True"),
        ("generation_config.json", '{"eos_token_id": 262}', "end token id 262 is outside the tokenizer's 262"),
        ("generation_config.json", '{"temperature": NaN}', "temperature is nan"),
        ("generation_config.json", '{"top_p": -1}', "top_p is -1"),
        ("tokenizer_config.json", '{"eos_token": "<none>"}', "'<none>' is not in the vocabulary"),
    ],
)
def test_bad_files_beside_the_model_are_named(
    make_model: MakeModel, tmp_path: Path, name: str, value: str, message: str
) -> None:
    make_model()
    (tmp_path / name).write_text(value)
    with pytest.raises(ModelFileError, match=message):
        open_model(str(tmp_path), tmp_path)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.block_count": None}, "'llama.block_count' is missing"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon' is missing"),
        ({"llama.block_count": "two"}, "'llama.block_count' is 'two', an integer was expected"),
        ({"llama.block_count": 2.0}, "'llama.block_count' is 2.0, an integer was expected"),
        ({"llama.block_count": True}, "'llama.block_count' is True, an integer was expected"),
        ({"llama.block_count": [2]}, "'llama.block_count' is an array of 1, an integer"),
        ({"llama.block_count": 0}, "'llama.block_count' is zero"),
        ({"llama.block_count": 4_000_000_000}, "'llama.block_count' is 4000000000, 0 to 1024"),
        ({"llama.block_count": 3}, "9 of 29 tensors are missing, the first is 'blk.2.attn_norm.weight'"),
        ({"llama.block_count": 1}, "9 tensors are not part of a llama model, the first is 'blk.1"),
        ({"llama.embedding_length": 32}, r"'token_embd.weight' .embed_tokens. has shape \[262, 64\], .* \[262, 32\]"),
        ({"llama.attention.head_count": 3}, "3 attention heads cannot share 2"),
        ({"llama.attention.key_length": 15}, "head size 15 is not an even number"),
        ({"llama.attention.value_length": 8}, "value_length differs from the head size 16"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count differs from the head size 16"),
        ({"llama.rope.freq_base": float("nan")}, "rope.freq_base' is nan, a finite number"),
        ({"llama.rope.freq_base": 0.0}, "rope.freq_base' is 0.0, a positive number"),
        ({"llama.rope.scaling.type": "spiral"}, "rotary scaling 'spiral' is not supported"),
        ({"llama.rope.scaling.type": "linear"}, "rope.scaling.factor' is missing"),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}, "original_context_length"),
        ({"llama.vocab_size": 999}, "names 999 tokens, the embedding has 262 rows"),
        ({"llama.expert_count": 8}, "mixture-of-experts"),
        ({"tokenizer.ggml.tokens": None}, "'tokenizer.ggml.tokens' is missing"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "an array of 2, an array of strings was expected"),
        ({"tokenizer.ggml.tokens": ["a"] * 262}, "names a token twice"),
        ({"tokenizer.ggml.tokens": [str(i) for i in range(263)]}, "has 263 tokens, the embedding only 262"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "262 tokens but 2 token types"),
        ({"tokenizer.ggml.merges": None}, "'tokenizer.ggml.merges' is missing"),
        ({"tokenizer.ggml.merges": ["h e", "h x"]}, "merge 'h x' names a token that is not in the vocabulary"),
        ({"tokenizer.ggml.model": "wordpiece"}, "tokenizer model 'wordpiece' is not supported"),
        ({"tokenizer.ggml.pre": None}, "'tokenizer.ggml.pre' is missing"),
        ({"tokenizer.ggml.pre": "klingon"}, "'klingon' is not supported .known: default, gpt-2, .*smollm, .*qwen2"),
        ({"tokenizer.ggml.eos_token_id": 262}, "eos_token_id' is 262, the tokenizer has 262 tokens"),
        ({"tokenizer.ggml.bos_token_id": 9999}, "bos_token_id' is 9999"),
        ({"tokenizer.chat_template": 5}, "chat_template' is 5, a string was expected"),
    ],
)
def test_metadata_that_cannot_be_is_named(
    make_model: MakeModel, tmp_path: Path, metadata: dict[str, Any], message: str
) -> None:
    path = make_model(metadata=metadata)
    with pytest.raises(ModelFileError, match=message) as caught:
        opened(path, tmp_path)
    assert str(path) in str(caught.value)
    assert "; " in str(caught.value)


@pytest.mark.parametrize(
    ("tensors", "dtypes", "message"),
    [
        ({"token_embd.weight": None}, {}, "'token_embd.weight' is missing"),
        (
            {"blk.1.ffn_up.weight": None},
            {},
            r"1 of 20 tensors are missing, the first is 'blk.1.ffn_up.weight' \(layers.1.up_proj\)",
        ),
        ({"blk.1.ffn_up.weight": np.zeros((64, 96), np.float32)}, {}, r"has shape \[64, 96\], .* asks for \[96, 64\]"),
        ({"blk.0.ffn_gate_inp.weight": np.zeros((4, 64), np.float32)}, {}, "'blk.0.ffn_gate_inp.weight'; computing"),
        ({}, {"blk.0.ffn_up.weight": "Q5_1"}, "dtype Q5_1, which is not supported .known: F32, F16"),
        ({"rope_freqs.weight": np.full(8, 3.0, np.float32)}, {}, "factors other than Llama 3's"),
        ({"rope_freqs.weight": np.full(8, np.nan, np.float32)}, {}, "a factor that is not a positive number"),
        ({"rope_freqs.weight": np.ones(4, np.float32)}, {}, r"F32 \(8,\) was expected"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    make_model: MakeModel, tmp_path: Path, tensors: dict[str, Any], dtypes: dict[str, str], message: str
) -> None:
    path = make_model(tensors=tensors, dtypes=dtypes)
    with pytest.raises(ModelFileError, match=message):
        opened(path, tmp_path)


def test_every_tensor_has_its_name_in_the_file(make_model: MakeModel, tmp_path: Path) -> None:
    whole = opened(make_model(), tmp_path)
    for name in whole.tensor_names():
        assert gguf_source._stored_name(name) == whole.stored_name(name)
        assert gguf_source._canonical_name(whole.stored_name(name)) == name
    assert whole.stored_name("layers.0.q_proj.bias") == "blk.0.attn_q.bias"
    assert whole.stored_name("not one of ours") == "not one of ours"


def test_an_unknown_architecture_is_named(make_model: MakeModel, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"architecture 'mamba' is not supported .known: llama, qwen2, qwen3."):
        open_model(str(make_model(architecture="mamba")), tmp_path)


def test_llama_3_scaling_is_found_from_its_factors(make_model: MakeModel, tmp_path: Path) -> None:
    """The factors come from transformers' own computation of scaled inverse frequencies."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        max_position_embeddings=131072,
        rope_parameters={**scaling, "original_max_position_embeddings": 8192, "rope_theta": 500000.0},
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 500000.0 ** -(np.arange(8) / 8)
    factors = (plain / scaled.numpy()).astype(np.float32)
    path = make_model(metadata={"llama.rope.freq_base": 500000.0}, tensors={"rope_freqs.weight": factors})
    found = opened(path, tmp_path).config.rope_scaling
    assert (found.kind, found.factor, found.original_max_position) == ("llama3", pytest.approx(32.0), 8192)


def test_yarn_and_linear_scaling(make_model: MakeModel, tmp_path: Path) -> None:
    keys = {"type": "yarn", "factor": 4.0, "original_context_length": 128}
    path = make_model("y.gguf", metadata={f"llama.rope.scaling.{key}": value for key, value in keys.items()})
    scaling = opened(path, tmp_path).config.rope_scaling
    assert (scaling.kind, scaling.factor, scaling.original_max_position) == ("yarn", 4.0, 128)
    path = make_model("l.gguf", metadata={"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0})
    assert opened(path, tmp_path).config.rope_scaling.kind == "linear"


def test_tensors_by_a_name_that_is_not_there(make_model: MakeModel, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"tensor 'output.weight' \(lm_head\) is missing"):
        opened(make_model(), tmp_path).tensor("lm_head")


def test_a_missing_path_names_what_is_known(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"no-such: no such file, directory or known model; .*embedded"):
        open_model("no-such", tmp_path)


@pytest.mark.parametrize(
    ("spec", "why"), [("x" * 300, "File name too long"), ("~no-such-user-here/m.gguf", "home directory")]
)
def test_a_path_that_cannot_be_looked_at_says_why(tmp_path: Path, spec: str, why: str) -> None:
    with pytest.raises(ModelFileError, match=rf"cannot be reached \(.*{why}.*\); check the path and the rights on it"):
        open_model(spec, tmp_path)


def test_a_pipe_and_a_device_are_no_model(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    for path in (str(tmp_path / "pipe.gguf"), "/dev/zero"):
        with pytest.raises(ModelFileError, match="is not a regular file; give a GGUF file"):
            open_model(path, tmp_path)


def test_a_cache_that_cannot_be_looked_at_says_why(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"cannot be reached \(File name too long\); check the rights"):
        open_model("embedded", tmp_path / ("x" * 300))


def test_the_embedded_model_is_only_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ModelFileError, match=f"not been fetched; run `dragoman models fetch embedded --cache-dir {tmp_path}`"
    ):
        open_model("embedded", tmp_path)
    monkeypatch.setenv("DRAGOMAN_CACHE_DIR", str(tmp_path))
    with pytest.raises(ModelFileError, match="not been fetched; run `dragoman models fetch embedded`"):
        open_model("embedded", tmp_path)
    target = embedded_target(tmp_path)
    target.parent.mkdir(parents=True)
    target.write_bytes(b"GGUF")
    with pytest.raises(ModelFileError, match=f"has 4 bytes, the embedded model has {EMBEDDED_BYTES}"):
        open_model("embedded", tmp_path)


def test_directories_that_do_not_hold_one_model(make_model: MakeModel, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ModelFileError, match=r"holds no model file \(\*.safetensors, \*.gguf\)"):
        open_model(str(empty), tmp_path)
    (empty / "pytorch_model.bin").touch()
    with pytest.raises(ModelFileError, match=r"only as pickles \(pytorch_model.bin\), which can run code"):
        open_model(str(empty), tmp_path)
    (empty / "model.safetensors").touch()
    with pytest.raises(ModelFileError, match=r"config.json: is missing; download incomplete\?"):
        open_model(str(empty), tmp_path)
    make_model("empty/a.gguf")
    with pytest.raises(ModelFileError, match=r"holds safetensors files and a.gguf: two models"):
        open_model(str(empty), tmp_path)
    make_model("a.gguf")
    make_model("b.gguf")
    with pytest.raises(ModelFileError, match=r"holds 2 models \(a.gguf, b.gguf\)"):
        open_model(str(tmp_path), tmp_path)


def test_split_and_foreign_files(make_model: MakeModel, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="one part of a split model"):
        open_model(str(make_model("m-00001-of-00002.gguf")), tmp_path)
    foreign = tmp_path / "model.safetensors"
    foreign.touch()
    with pytest.raises(ModelFileError, match=f"a safetensors file by itself; give its directory: {tmp_path}"):
        open_model(str(foreign), tmp_path)
    foreign = tmp_path / "consolidated.00.pth"
    foreign.touch()
    with pytest.raises(ModelFileError, match="a pickle, which can run code when loaded"):
        open_model(str(foreign), tmp_path)


def test_opening_imports_no_torch(embedded_model_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from dragoman_agent.model.source import open_model;"
        f"s = open_model({str(embedded_model_path)!r}, Path('.')); s.check(); s.tensor('layers.0.q_proj');"
        "print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {"torch", "gguf", "transformers", "grpc"}.isdisjoint(loaded)


def test_an_empty_spec_and_a_short_text_file_are_told_as_what_they_are(tmp_path: Path) -> None:
    for spec in ("", " "):
        with pytest.raises(ModelFileError, match="--model: is empty; give a path or one of: embedded"):
            open_model(spec, tmp_path)
    text = tmp_path / "notes.txt"
    text.write_text("hi there")
    with pytest.raises(ModelFileError, match="not a GGUF file: it begins with b'hi t'"):
        open_model(str(text), tmp_path)
