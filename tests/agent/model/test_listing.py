"""The list of models in the cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.agent.model.checkpoints import save_checkpoint

from dragoman_agent.model.gguf_source import GgufSource
from dragoman_agent.model.listing import list_models
from dragoman_agent.model.registry import needed_tensors


def test_models_are_listed_and_damaged_ones_say_why(make_model: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "models" / "x").mkdir(parents=True)
    good = make_model("models/x/good.gguf", tied=False)
    (tmp_path / "models" / "bad.gguf").write_bytes(b"GGUF" + bytes(9))
    (tmp_path / "models" / "notes.txt").touch()
    bad, listed = list_models(tmp_path)
    assert (bad.name, bad.architecture, bad.num_bytes) == ("bad", None, 13)
    assert bad.problem is not None
    assert "13 bytes are too few" in bad.problem
    assert (listed.name, listed.path, listed.architecture, listed.problem) == ("good", good, "llama", None)
    assert listed.num_bytes == good.stat().st_size


def test_safetensors_directories_are_listed(tmp_path: Path) -> None:
    model = save_checkpoint(tmp_path / "models" / "whole", "qwen2", max_shard_size="60KB")
    save_checkpoint(tmp_path / "models" / "cut", "llama", max_shard_size="60KB")
    next((tmp_path / "models" / "cut").glob("*.safetensors")).unlink()
    cut, whole = list_models(tmp_path)
    assert (cut.name, cut.architecture) == ("cut", None)
    assert cut.problem is not None
    assert "is missing" in cut.problem
    assert (whole.name, whole.architecture, whole.problem) == ("whole", "qwen2", None)
    assert whole.num_parameters == sum(parameter.numel() for parameter in model.parameters())


def test_an_empty_cache_has_none(tmp_path: Path) -> None:
    assert list_models(tmp_path) == []


def test_parameters_are_the_sum_of_the_tensors(make_model: Callable[..., Path]) -> None:
    config = GgufSource(make_model(tied=False)).config
    sizes = [rows * (rest[0] if rest else 1) for rows, *rest in needed_tensors(config).values()]
    assert sum(sizes) == config.num_parameters
