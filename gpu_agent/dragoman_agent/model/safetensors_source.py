"""A model in a directory of safetensors files with config.json and tokenizer.json, under canonical tensor names."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import re
from functools import cached_property
from pathlib import Path
from typing import Final

import numpy as np

from dragoman_agent.model.config import ModelConfig
from dragoman_agent.model.embedding import EmbeddingSpec, embedding_of_directory, spec_files
from dragoman_agent.model.errors import ModelFileError
from dragoman_agent.model.generation import GenerationDefaults, read_beside, read_json
from dragoman_agent.model.hf_config import config_from_hf, head_is_tied
from dragoman_agent.model.hf_tokenizer import HfTokenizer
from dragoman_agent.model.layout import TensorExtent, TensorLayout
from dragoman_agent.model.registry import needed_tensors
from dragoman_agent.model.safetensors_dir import open_shards
from dragoman_agent.model.safetensors_file import SafeTensor, SafetensorsFile
from dragoman_kernels.tensor import QuantTensor
from dragoman_text.files import TokenizerFiles

DIGEST_EDGE_BYTES: Final = 4096
SERVED_DTYPES: Final = ("F32", "F16", "BF16")

_COMPARE_BYTES: Final = 16 << 20
_GLOBAL_NAMES: Final = {"embed_tokens.weight": "embed_tokens", "norm.weight": "norm", "lm_head.weight": "lm_head"}
_LAYER_NAMES: Final = {
    "input_layernorm": "input_norm",
    "post_attention_layernorm": "post_attention_norm",
    **{f"self_attn.{part}": part for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")},
    **{f"mlp.{part}": part for part in ("gate_proj", "up_proj", "down_proj")},
}
_GLOBAL_STORED: Final = {"embed_tokens": "model.embed_tokens", "norm": "model.norm", "lm_head": "lm_head"}
_LAYER_STORED: Final = {canonical: stored for stored, canonical in _LAYER_NAMES.items()}
_LAYER_CANONICAL: Final = re.compile(r"layers\.(\d+)\.([a-z_]+)(\.bias)?")
_LAYER_TENSOR: Final = re.compile(r"layers\.(\d{1,4})\.([a-z_.]+)\.(weight|bias)")
_COMPUTED: Final = re.compile(r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")  # from the config instead
_log = logging.getLogger(__name__)


class SafetensorsSource:
    """A model read from a directory. Opening reads headers and JSON files; weights are mapped, never unpickled."""

    def __init__(self, directory: Path, name: str | None = None) -> None:
        """Raises ModelFileError when the directory is not a whole model that this agent knows."""
        self.path = directory
        self.name = name or model_name(directory)
        self.random_seed: int | None = None
        config_path = directory / "config.json"
        if not config_path.exists():
            raise ModelFileError(config_path, "is missing", "download incomplete? Fetch the model again")
        value = read_json(config_path)
        self._tokenizer = HfTokenizer(directory)
        self.generation: GenerationDefaults = read_beside(directory, GenerationDefaults(), self._tokenizer.token_ids)
        config = config_from_hf(config_path, value, self.name, self.generation.eos_token_ids)
        self._shards = open_shards(directory)
        self._stored = self._canonical()
        tied, warning = head_is_tied(
            config_path,
            value.get("tie_word_embeddings"),
            has_head="lm_head" in self._stored,
            head_equals_embedding=self._head_equals_embedding(),
            without_prefix=self._stored.get("embed_tokens") == "embed_tokens.weight",
        )
        if warning:
            _log.warning("%s", warning)
        self.warnings = (*self._shards.warnings, *([warning] if warning else []))
        self.config: ModelConfig = dataclasses.replace(config, tied_embeddings=tied)
        self._tokenizer.check(self.config.vocab_size, self.generation.eos_token_ids)
        self.embedding: EmbeddingSpec = embedding_of_directory(directory, config.hidden_size)

    @cached_property
    def tokenizer(self) -> TokenizerFiles:
        """Tokenizer and chat template; its end tokens are `generation`'s."""
        return self._tokenizer.files(self.generation.eos_token_ids, self.config.vocab_size)

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) of config.json, the files on embedding, the tokenizer and, file by file, the header and the first
        and last 4 KiB of each tensor. Quick on large files; it tells models apart, it does not prove integrity.
        """
        state = hashlib.sha256((self.path / "config.json").read_bytes())
        for path in spec_files(self.path):
            state.update(f"\0{path.relative_to(self.path)}\0".encode())
            state.update(path.read_bytes())
        state.update(self.tokenizer.digest.encode())
        for name, file in sorted(self._shards.files.items()):
            state.update(f"\0{name}\0".encode())
            state.update(file.mapped[: file.header_bytes])
            for tensor in file.tensors:
                data = file.data(tensor)
                state.update(data[:DIGEST_EDGE_BYTES].data)
                state.update(data[-DIGEST_EDGE_BYTES:].data)
        return state.hexdigest()

    @property
    def files(self) -> list[Path]:
        """The files that hold weights."""
        return [file.path for file in self._shards.files.values()]

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors the model needs."""
        return sum(self.layout(name).num_bytes for name in self.tensor_names() if name in self._stored)

    def tensor_names(self) -> list[str]:
        """Canonical names of the tensors the model needs, in the order of the layers."""
        return list(needed_tensors(self.config))

    def stored_name(self, name: str) -> str:
        """The name of a tensor in the files, where it is missing the one it should have."""
        return self._stored.get(name) or _stored_name(name)

    def file_order(self) -> list[str]:
        """`tensor_names` in the order in which their data lie in the files."""
        files = {name: position for position, name in enumerate(sorted(self._shards.files))}

        def place(name: str) -> tuple[int, int]:
            file, tensor = self._find(name)
            return files[file.path.name], tensor.offset

        return sorted(self.tensor_names(), key=place)

    def layout(self, name: str) -> TensorLayout:
        """Dtype, shape and size of a tensor, from the header. Raises ModelFileError when absent."""
        _, tensor = self._find(name)
        rows, cols = _matrix(tensor.shape)
        return TensorLayout(tensor.dtype, (rows, cols), tensor.num_bytes)

    def extent(self, name: str) -> TensorExtent | None:
        """Where a tensor lies, always as `tensor` gives it. Raises ModelFileError when absent."""
        file, tensor = self._find(name)
        return TensorExtent(file.path, tensor.offset, tensor.num_bytes)

    def tensor(self, name: str) -> QuantTensor:
        """A tensor as stored, [rows, cols] (a vector is one row), a read-only view of the file.

        Raises ModelFileError when absent or of a dtype that is not served.
        """
        file, tensor = self._find(name)
        if tensor.dtype not in SERVED_DTYPES:
            raise self._wrong_dtype(file, tensor)
        rows, cols = _matrix(tensor.shape)
        return QuantTensor(tensor.dtype, (rows, cols), file.data(tensor.name).reshape(rows, -1))

    def check(self) -> None:
        """Whether every needed tensor is there with the right shape and a readable dtype, from the headers alone.

        Raises ModelFileError naming what is missing, wrong or left over.
        """
        needed = needed_tensors(self.config)
        missing = [name for name in needed if name not in self._stored]
        if missing:
            raise ModelFileError(
                self.path,
                f"{len(missing)} of {len(needed)} tensors are missing, the first is {self.stored_name(missing[0])!r} ({missing[0]})",
                "download incomplete? Fetch the model again",
            )
        for name, shape in needed.items():
            file, tensor = self._find(name)
            if tensor.dtype not in SERVED_DTYPES:
                raise self._wrong_dtype(file, tensor)
            if tensor.shape != shape:
                raise file.fail(
                    f"tensor {tensor.name!r} ({name}) has shape {list(tensor.shape)}, config.json asks for {list(shape)}",
                    "use files of one model",
                )
        extra = sorted(self._stored.keys() - needed.keys() - {"lm_head"})
        if extra:
            file, tensor = self._find(extra[0])
            raise file.fail(
                f"{len(extra)} tensors are not part of a {self.config.architecture} model as config.json describes it, "
                f"the first is {tensor.name!r}; computing without them would be wrong",
                "use a model of a known architecture",
            )
        _ = self.tokenizer

    def _find(self, name: str) -> tuple[SafetensorsFile, SafeTensor]:
        if name not in self._stored:
            raise ModelFileError(
                self.path,
                f"tensor {self.stored_name(name)!r} ({name}) is missing",
                "download incomplete? Fetch the model again",
            )
        return self._shards.find(self._stored[name])

    def _wrong_dtype(self, file: SafetensorsFile, tensor: SafeTensor) -> ModelFileError:
        return file.fail(
            f"tensor {tensor.name!r} has dtype {tensor.dtype}, which is not supported (known: {', '.join(SERVED_DTYPES)})",
            "use a model in one of these",
        )

    def _canonical(self) -> dict[str, str]:
        """Canonical to stored names."""
        stored: dict[str, str] = {}
        for name in self._shards.file_of:
            if _COMPUTED.fullmatch(name):
                continue
            known = _canonical_name(name)
            if known in stored:
                raise ModelFileError(
                    self.path, f"tensors {stored[known]!r} and {name!r} are the same part of the model"
                )
            stored[known] = name
        return stored

    def _head_equals_embedding(self) -> bool:
        """Compared byte by byte, in pieces; unequal ones differ in the first."""
        if "lm_head" not in self._stored or "embed_tokens" not in self._stored:
            return False
        (head_file, head), (embedding_file, embedding) = self._find("lm_head"), self._find("embed_tokens")
        if (head.dtype, head.shape) != (embedding.dtype, embedding.shape):
            return False
        first, second = head_file.data(head.name), embedding_file.data(embedding.name)
        return all(
            np.array_equal(first[start : start + _COMPARE_BYTES], second[start : start + _COMPARE_BYTES])
            for start in range(0, len(first), _COMPARE_BYTES)
        )


def model_name(directory: Path) -> str:
    """The directory's name; in a download cache (`models--ORG--NAME/snapshots/REVISION`) NAME."""
    resolved = directory.resolve()
    if resolved.parent.name == "snapshots" and resolved.parent.parent.name.startswith("models--"):
        return resolved.parent.parent.name.rpartition("--")[2]
    return resolved.name


def _canonical_name(stored: str) -> str:
    """The canonical name of a stored tensor; one that has none keeps its own."""
    bare = stored.removeprefix("model.")
    match = _LAYER_TENSOR.fullmatch(bare)
    if match is None:
        return _GLOBAL_NAMES.get(bare, stored)
    part = _LAYER_NAMES.get(match[2])
    return stored if part is None else f"layers.{int(match[1])}.{part}{'.bias' if match[3] == 'bias' else ''}"


def _stored_name(name: str) -> str:
    """The stored name that `_canonical_name` would turn into `name`."""
    match = _LAYER_CANONICAL.fullmatch(name)
    if match is None or match[2] not in _LAYER_STORED:
        return f"{_GLOBAL_STORED[name]}.weight" if name in _GLOBAL_STORED else name
    return f"model.layers.{match[1]}.{_LAYER_STORED[match[2]]}.{'bias' if match[3] else 'weight'}"


def _matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    rows = 1
    for size in shape[:-1]:
        rows *= size
    return rows, shape[-1] if shape else 1
