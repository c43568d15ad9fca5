"""Where a model comes from: one interface over model files, and how a `--model` value finds one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Protocol, runtime_checkable

from dragoman_agent.model.config import ModelConfig
from dragoman_agent.model.embedded import EMBEDDED_NAME, KNOWN_MODELS, embedded_path
from dragoman_agent.model.embedding import EmbeddingSpec
from dragoman_agent.model.errors import ModelFileError
from dragoman_agent.model.generation import GenerationDefaults
from dragoman_agent.model.gguf_source import GgufSource
from dragoman_agent.model.layout import TensorExtent, TensorLayout
from dragoman_agent.model.random_source import PREFIX as RANDOM_PREFIX
from dragoman_agent.model.random_source import RandomSource
from dragoman_agent.model.safetensors_dir import PICKLE_SUFFIXES, holds_safetensors, refuse_pickles
from dragoman_agent.model.safetensors_source import SafetensorsSource
from dragoman_kernels.tensor import QuantTensor
from dragoman_text.files import TokenizerFiles

_SPLIT_FILE = re.compile(r"-\d{5}-of-\d{5}\.gguf$")


@runtime_checkable
class ModelSource(Protocol):
    """An opened model: what it is, and its tensors on demand. Errors are ModelFileError."""

    path: Path
    name: str
    config: ModelConfig
    generation: GenerationDefaults
    embedding: EmbeddingSpec
    random_seed: int | None  # of generated weights, which a device may make by itself; None for real files

    @property
    def tokenizer(self) -> TokenizerFiles:
        """Tokenizer and chat template."""

    @property
    def digest(self) -> str:
        """Hex digest that tells this model's files from others; says how it is made."""

    @property
    def total_bytes(self) -> int:
        """Bytes of all weights as stored."""

    def tensor_names(self) -> list[str]:
        """Canonical names of the tensors the model needs."""

    @property
    def files(self) -> list[Path]:
        """The files that hold weights; none for generated ones."""

    def stored_name(self, name: str) -> str:
        """The name that a tensor has, or should have, in the model's files: what messages show beside the canonical one."""

    def file_order(self) -> list[str]:
        """`tensor_names` in the order in which their data lie in the files."""

    def extent(self, name: str) -> TensorExtent | None:
        """Where a tensor's bytes can be read from; None when they are not stored as `tensor` gives them."""

    def layout(self, name: str) -> TensorLayout:
        """Dtype, shape and size of a tensor without reading it."""

    def tensor(self, name: str) -> QuantTensor:
        """One tensor as stored, by canonical name."""

    def check(self) -> None:
        """Raise unless everything needed is there and usable, judged before weights are read."""


def open_model(spec: str, cache_dir: Path) -> ModelSource:
    """Open a model by `embedded` (or its bare name), `random:NAME`, a GGUF file, or a directory with GGUF or safetensors.

    Reads headers only. Raises ModelFileError: nothing there, several models, a damaged file, an unknown architecture.
    """
    if not spec.strip():
        known = ", ".join(KNOWN_MODELS)
        raise ModelFileError("--model", "is empty", f"give a path or one of: {known}")
    if spec.startswith(RANDOM_PREFIX):
        return RandomSource(spec.removeprefix(RANDOM_PREFIX))
    if spec.lower() in KNOWN_MODELS:
        return GgufSource(embedded_path(cache_dir), EMBEDDED_NAME)
    try:
        path = Path(spec).expanduser()
        is_directory, is_there, is_file = path.is_dir(), path.exists(), path.is_file()
    except (OSError, RuntimeError, ValueError) as error:  # no rights, no such user, no name that a file can have
        what = getattr(error, "strerror", None) or str(error)
        raise ModelFileError(spec, f"cannot be reached ({what})", "check the path and the rights on it") from None
    if is_directory:
        return _open_directory(path)
    if not is_there:
        known = ", ".join(KNOWN_MODELS)
        raise ModelFileError(spec, "no such file, directory or known model", f"give a path or one of: {known}")
    if not is_file:  # opening a pipe would wait for ever
        raise ModelFileError(path, "is not a regular file", "give a GGUF file, or the directory of a model")
    if _SPLIT_FILE.search(path.name):
        raise ModelFileError(path, "one part of a split model", "merge the parts into one file first")
    if path.suffix == ".safetensors":
        raise ModelFileError(path, "a safetensors file by itself", f"give its directory: {path.parent}")
    if path.suffix in PICKLE_SUFFIXES:
        raise ModelFileError(
            path, "a pickle, which can run code when loaded and is never read", "give safetensors or GGUF files"
        )
    return GgufSource(path)


def _open_directory(directory: Path) -> ModelSource:
    try:
        found = sorted(directory.glob("*.gguf"))
        if holds_safetensors(directory):
            if found:
                raise ModelFileError(
                    directory,
                    f"holds safetensors files and {found[0].name}: two models",
                    "give the path of the GGUF file, or move it elsewhere",
                )
            return SafetensorsSource(directory)
        if not found:
            refuse_pickles(directory)
    except OSError as error:
        raise ModelFileError(directory, f"cannot be listed ({error.strerror or error})", "check the path") from None
    return GgufSource(_only_file(directory, found), _directory_name(directory), read_directory=True)


def _only_file(directory: Path, found: list[Path]) -> Path:
    if any(_SPLIT_FILE.search(path.name) for path in found):
        raise ModelFileError(directory, "holds a split model", "merge the parts into one file first")
    if len(found) > 1:
        names = ", ".join(path.name for path in found[:5])
        raise ModelFileError(directory, f"holds {len(found)} models ({names})", "give the path of one of them")
    if found:
        return found[0]
    raise ModelFileError(
        directory, "holds no model file (*.safetensors, *.gguf)", "check the path, or fetch the model again"
    )


def _directory_name(directory: Path) -> str:
    return directory.resolve().name


__all__ = ["ModelFileError", "ModelSource", "open_model"]
