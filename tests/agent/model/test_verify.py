"""Full reads: damage is found and named, sound models give the digests that other tools give."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.agent.model.checkpoints import save_checkpoint

from dragoman_agent.model.describe import describe
from dragoman_agent.model.embedded import EMBEDDED_NAME, EMBEDDED_SHA256
from dragoman_agent.model.errors import ModelFileError
from dragoman_agent.model.gguf_source import GgufSource
from dragoman_agent.model.random_source import RandomSource
from dragoman_agent.model.source import open_model
from dragoman_agent.model.verify import verify


def test_the_embedded_model_is_the_published_file(embedded_model_path: Path) -> None:
    source = open_model("embedded", embedded_model_path.parents[2])
    seen: dict[str, tuple[int, int]] = {}
    found = verify(source, lambda phase, done, total: seen.update({phase: (done, total)}))
    assert [(file.sha256, file.matches) for file in found.files] == [(EMBEDDED_SHA256, True)]
    assert (found.num_tensors, found.num_values) == (272, 134_515_008)
    assert found.dtypes == {"Q8_0": 1, "F32": 61, "Q4_1": 210}
    assert seen == {"hash": (98_362_432, 98_362_432), "values": (96_576_768, 96_576_768)}


def test_another_file_under_the_published_name(make_model: Callable[..., Path]) -> None:
    source = GgufSource(make_model(), EMBEDDED_NAME)
    with pytest.raises(ModelFileError, match=f"has SHA-256 [0-9a-f]{{64}}, the published file has {EMBEDDED_SHA256}"):
        verify(source)


def test_sha256_of_every_shard(tmp_path: Path) -> None:
    model = save_checkpoint(tmp_path, "qwen3", max_shard_size="60KB", dtype=torch.bfloat16)
    found = verify(open_model(str(tmp_path), tmp_path))
    assert len(found.files) > 2
    for file in found.files:
        line = subprocess.run(["sha256sum", file.path], capture_output=True, text=True, check=True).stdout
        assert (line.split()[0], file.matches) == (file.sha256, None)
    assert found.num_values == sum(parameter.numel() for parameter in model.parameters())
    assert found.dtypes == {"BF16": found.num_tensors}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_value_that_is_not_finite_is_named(tmp_path: Path, value: float, dtype: torch.dtype) -> None:
    save_checkpoint(tmp_path, "llama", dtype=dtype)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.up_proj.weight"][17, 5] = value
    save_file(tensors, path)
    with pytest.raises(
        ModelFileError,
        match=rf"tensor 'model.layers.1.mlp.up_proj.weight' \(layers.1.up_proj\) holds {value} at row 17, column 5 \(1 such",
    ):
        verify(open_model(str(tmp_path), tmp_path))


def test_an_incomplete_model_is_refused_before_it_is_read(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "llama")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    save_file(tensors, path)
    with pytest.raises(ModelFileError, match=r"the first is 'model.norm.weight'"):
        verify(open_model(str(tmp_path), tmp_path), lambda *report: pytest.fail(f"read something: {report}"))


def test_a_description_is_json_and_tells_the_essentials(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "qwen2", tie_word_embeddings=True)
    facts = describe(open_model(str(tmp_path), tmp_path))
    assert json.loads(json.dumps(facts)) == facts
    assert (facts["architecture"], facts["attention_bias"], facts["chat_template"]) == ("qwen2", True, True)
    assert (facts["eos_token_ids"], facts["rope_scaling"], facts["files"]) == ([2], None, ["model.safetensors"])
    assert facts["dtypes"] == {"F32": 2 + 2 * 12}
    llama = describe(RandomSource("llama-3.2-1b"))
    assert llama["rope_scaling"]["kind"] == "llama3"
    assert (llama["random_seed"], llama["files"], llama["total_bytes"]) == (0, [], 2_471_628_800)
