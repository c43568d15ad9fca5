"""The models in the cache, as `dragoman models ls` shows them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dragoman_agent.model.errors import ModelFileError
from dragoman_agent.model.gguf import GgufFile
from dragoman_agent.model.registry import config_from_gguf
from dragoman_agent.model.safetensors_dir import holds_safetensors
from dragoman_agent.model.safetensors_source import SafetensorsSource, model_name


@dataclass(frozen=True, slots=True)
class ModelListing:
    """One model: a GGUF file or a directory of safetensors files."""

    name: str
    path: Path
    num_bytes: int
    architecture: str | None  # None when `problem` says why it cannot be read
    num_parameters: int | None
    problem: str | None = None


def list_models(cache_dir: Path) -> list[ModelListing]:
    """Every model below `cache_dir`/models, by path; unreadable ones are listed with their problem."""
    root = cache_dir / "models"
    found = [_file_listing(path) for path in root.rglob("*.gguf")]
    folders = {path.parent for pattern in ("*.safetensors", "*.safetensors.index.json") for path in root.rglob(pattern)}
    found += [_directory_listing(path) for path in folders if holds_safetensors(path)]
    return sorted(found, key=lambda listing: listing.path)


def _file_listing(path: Path) -> ModelListing:
    num_bytes = path.stat().st_size
    try:
        config = config_from_gguf(GgufFile(path), path.stem, ())
    except ModelFileError as error:
        return ModelListing(path.stem, path, num_bytes, None, None, error.what)
    return ModelListing(path.stem, path, num_bytes, config.architecture, config.num_parameters)


def _directory_listing(path: Path) -> ModelListing:
    num_bytes = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    try:
        config = SafetensorsSource(path).config
    except ModelFileError as error:
        return ModelListing(model_name(path), path, num_bytes, None, None, error.what)
    return ModelListing(config.name, path, num_bytes, config.architecture, config.num_parameters)
