"""A model in one GGUF file under canonical tensor names."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dragoman_agent.model.config import ModelConfig
from dragoman_agent.model.embedded import EMBEDDED_BYTES, EMBEDDED_DEFAULTS, EMBEDDED_DIGEST, EMBEDDED_NAME
from dragoman_agent.model.embedding import EmbeddingSpec, embedding_of_gguf
from dragoman_agent.model.generation import GenerationDefaults, read_beside
from dragoman_agent.model.gguf import GgufFile, GgufTensor
from dragoman_agent.model.gguf_tokenizer import end_token_ids, tokenizer_files_from_gguf
from dragoman_agent.model.layout import TensorExtent, TensorLayout
from dragoman_agent.model.metadata import Metadata
from dragoman_agent.model.quant import FORMATS
from dragoman_agent.model.registry import architecture_of, config_from_gguf, needed_tensors
from dragoman_kernels.tensor import QuantTensor
from dragoman_text.files import TokenizerFiles

DIGEST_EDGE_BYTES = 4096

_GLOBAL_NAMES = {"token_embd.weight": "embed_tokens", "output_norm.weight": "norm", "output.weight": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_norm",
    "attn_q": "q_proj",
    "attn_k": "k_proj",
    "attn_v": "v_proj",
    "attn_output": "o_proj",
    "attn_q_norm": "q_norm",
    "attn_k_norm": "k_norm",
    "ffn_norm": "post_attention_norm",
    "ffn_gate": "gate_proj",
    "ffn_up": "up_proj",
    "ffn_down": "down_proj",
}
_GLOBAL_STORED = {canonical: stored for stored, canonical in _GLOBAL_NAMES.items()}
_LAYER_STORED = {canonical: stored for stored, canonical in _LAYER_NAMES.items()}
_LAYER_CANONICAL = re.compile(r"layers\.(\d+)\.([a-z_]+)(\.bias)?")
_LAYER_TENSOR = re.compile(r"blk\.(\d{1,4})\.([a-z_]+)\.(weight|bias)")
_HANDLED_ELSEWHERE = frozenset({"rope_freqs.weight"})  # becomes config.rope_scaling


class GgufSource:
    """A model read from one GGUF file. Opening reads the header; weights are mapped and read where they are used."""

    def __init__(self, path: Path, name: str | None = None, *, read_directory: bool = False) -> None:
        """`read_directory` also honours generation_config.json and its like beside the file.

        Raises ModelFileError when the file is not a model this agent knows.
        """
        self.path = path
        self.random_seed: int | None = None
        self._file = GgufFile(path)
        is_embedded = path.stat().st_size == EMBEDDED_BYTES and self.digest == EMBEDDED_DIGEST
        self.name = name or (EMBEDDED_NAME if is_embedded else path.stem)
        self._architecture = architecture_of(self._file)
        self._stored = {_canonical_name(stored): stored for stored in self._file.tensors}
        metadata = Metadata(self._file)
        tokens = metadata.strings("tokenizer.ggml.tokens")
        self.generation = _file_defaults(metadata, len(tokens))
        if is_embedded:
            self.generation = dataclasses.replace(EMBEDDED_DEFAULTS, eos_token_ids=self.generation.eos_token_ids)
        if read_directory:
            token_ids = {token: token_id for token_id, token in enumerate(tokens)}
            self.generation = read_beside(path.parent, self.generation, token_ids)
        self.config: ModelConfig = config_from_gguf(self._file, self.name, self.generation.eos_token_ids)
        self._check_vocabulary(len(tokens))
        self.embedding: EmbeddingSpec = embedding_of_gguf(metadata, self.config.architecture)

    @cached_property
    def tokenizer(self) -> TokenizerFiles:
        """Tokenizer and chat template; its end tokens are `generation`'s. Raises ModelFileError for an unknown kind."""
        files = tokenizer_files_from_gguf(self._file)
        return dataclasses.replace(
            files, eos_token_ids=self.generation.eos_token_ids, vocab_size=self.config.vocab_size
        )

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) of the file's header, then of each tensor, in the file's order: name, dtype, shape and the
        first and last 4 KiB of its data. Quick on large files; it tells models apart, it does not prove integrity.
        """
        state = hashlib.sha256(self._file.mapped[: self._file.header_bytes])
        for tensor in self._file.tensors.values():
            state.update(f"\0{tensor.name}\0{tensor.dtype}\0{tensor.shape}\0".encode())
            flat = self._file.data(tensor.name).reshape(-1)
            state.update(flat[:DIGEST_EDGE_BYTES].data)
            state.update(flat[-DIGEST_EDGE_BYTES:].data)
        return state.hexdigest()

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors' data."""
        return sum(tensor.num_bytes for tensor in self._file.tensors.values())

    def tensor_names(self) -> list[str]:
        """Canonical names of the tensors the model needs, in the order of the layers."""
        return list(needed_tensors(self.config))

    def stored_name(self, name: str) -> str:
        """The name of a tensor in the file, where it is missing the one it should have."""
        return self._stored.get(name) or _stored_name(name)

    def file_order(self) -> list[str]:
        """`tensor_names` in the order in which their data lie in the file."""
        return sorted(self.tensor_names(), key=lambda name: self._tensor(name).offset)

    def extent(self, name: str) -> TensorExtent | None:
        """Where a tensor lies in the file; None when its rows are reordered."""
        stored = self._tensor(name)
        return None if self._interleaved_heads(name) else TensorExtent(self.path, stored.offset, stored.num_bytes)

    @property
    def files(self) -> list[Path]:
        """The files that hold weights."""
        return [self.path]

    def layout(self, name: str) -> TensorLayout:
        """Dtype, shape and size of a tensor, from the header. Raises ModelFileError when absent."""
        stored = self._tensor(name)
        return TensorLayout(stored.dtype, (stored.num_rows, stored.shape[-1]), stored.num_bytes)

    def tensor(self, name: str) -> QuantTensor:
        """A tensor as stored, [rows, cols] (a vector is one row), q and k rows in half-split rotary order.

        The data is a read-only view of the file unless rows had to be reordered. Raises ModelFileError when absent.
        """
        stored = self._tensor(name)
        data = self._file.data(stored.name)
        num_heads = self._interleaved_heads(name)
        if num_heads:
            data = _to_half_split(data, num_heads, vector=len(stored.shape) == 1)
        cols = stored.shape[-1]
        return QuantTensor(stored.dtype, (stored.num_rows, cols), data)

    def check(self) -> None:
        """Whether every needed tensor is there with the right shape and a readable dtype, from the header alone.

        Raises ModelFileError naming what is missing, wrong or left over.
        """
        needed = needed_tensors(self.config)
        missing = [name for name in needed if name not in self._stored]
        if missing:
            raise self._file.fail(
                f"{len(missing)} of {len(needed)} tensors are missing, the first is {self.stored_name(missing[0])!r} ({missing[0]})",
                "the download is incomplete, fetch it again",
            )
        for name, shape in needed.items():
            self._check_tensor(name, self._file.tensors[self._stored[name]], shape)
        extra = sorted(self._stored.keys() - needed.keys() - _HANDLED_ELSEWHERE)
        if extra:
            raise self._file.fail(
                f"{len(extra)} tensors are not part of a {self.config.architecture} model, the first is "
                f"{self._stored[extra[0]]!r}; computing without them would be wrong",
                "use a model of a known architecture",
            )
        _ = self.tokenizer

    def _tensor(self, name: str) -> GgufTensor:
        stored = self._file.tensors.get(self._stored.get(name, ""))
        if stored is None:
            raise self._file.fail(
                f"tensor {self.stored_name(name)!r} ({name}) is missing", "the download is incomplete, fetch it again"
            )
        return stored

    def _check_tensor(self, name: str, stored: GgufTensor, shape: tuple[int, ...]) -> None:
        if stored.shape != shape:
            raise self._file.fail(
                f"tensor {stored.name!r} ({name}) has shape {list(stored.shape)}, the metadata asks for {list(shape)}"
            )
        if stored.dtype not in FORMATS:
            raise self._file.fail(
                f"tensor {stored.name!r} has dtype {stored.dtype}, which is not supported (known: {', '.join(FORMATS)})",
                "use a model quantised to one of these",
            )
        if len(shape) == 1 and stored.dtype not in ("F32", "F16", "BF16"):
            raise self._file.fail(f"tensor {stored.name!r} is a vector of dtype {stored.dtype}, a float was expected")

    def _check_vocabulary(self, num_tokens: int) -> None:
        if num_tokens > self.config.vocab_size:
            raise self._file.fail(
                f"the tokenizer has {num_tokens} tokens, the embedding only {self.config.vocab_size} rows"
            )
        outside = [token_id for token_id in self.generation.eos_token_ids if token_id >= num_tokens]
        if outside:
            raise self._file.fail(
                f"end token id {outside[0]} is outside the tokenizer's {num_tokens} tokens", "use files of one model"
            )

    def _interleaved_heads(self, name: str) -> int:
        """Heads whose rows are to be reordered in this tensor, 0 for none."""
        if not self._architecture.interleaved_rope:
            return 0
        part = name.partition(".")[2].partition(".")[2]
        if part in ("q_proj", "q_proj.bias"):
            return self.config.num_heads
        return self.config.num_kv_heads if part in ("k_proj", "k_proj.bias") else 0


def _file_defaults(metadata: Metadata, num_tokens: int) -> GenerationDefaults:
    defaults = GenerationDefaults(
        metadata.number("general.sampling.temp"),
        metadata.number("general.sampling.top_p"),
        metadata.integer("general.sampling.top_k"),
        eos_token_ids=tuple(sorted(end_token_ids(metadata, num_tokens))),
    )
    named = (defaults.temperature, defaults.top_p, defaults.top_k) != (None, None, None)
    return dataclasses.replace(defaults, origin="the model's file") if named else defaults


def _canonical_name(stored: str) -> str:
    """The canonical name of a stored tensor; one that has none keeps its own."""
    match = _LAYER_TENSOR.fullmatch(stored)
    if match is None:
        return _GLOBAL_NAMES.get(stored, stored)
    part = _LAYER_NAMES.get(match[2])
    return stored if part is None else f"layers.{int(match[1])}.{part}{'.bias' if match[3] == 'bias' else ''}"


def _stored_name(name: str) -> str:
    """The stored name that `_canonical_name` would turn into `name`."""
    match = _LAYER_CANONICAL.fullmatch(name)
    if match is None or match[2] not in _LAYER_STORED:
        return _GLOBAL_STORED.get(name, name)
    return f"blk.{match[1]}.{_LAYER_STORED[match[2]]}.{'bias' if match[3] else 'weight'}"


def _to_half_split(data: npt.NDArray[np.uint8], num_heads: int, *, vector: bool) -> npt.NDArray[np.uint8]:
    """Rows of each head from pairs (0, 1, 2, 3, …) to halves (0, 2, … then 1, 3, …): what the converter interleaved."""
    rows = data.reshape(-1, 4) if vector else data
    pairs = rows.reshape(num_heads, -1, 2, rows.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(data.shape)
