"""Models without files: the shapes of a known model, weights from a counter-based generator (`random:NAME`)."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property
from pathlib import Path
from statistics import NormalDist
from typing import Final

import numpy as np
import numpy.typing as npt

from dragoman_agent.model.config import ModelConfig
from dragoman_agent.model.embedding import PLAIN, QWEN3_EMBEDDING, EmbeddingSpec
from dragoman_agent.model.errors import ModelFileError
from dragoman_agent.model.generation import GenerationDefaults, read_json
from dragoman_agent.model.hf_config import config_from_hf
from dragoman_agent.model.layout import TensorExtent, TensorLayout
from dragoman_agent.model.registry import needed_tensors
from dragoman_kernels.tensor import QuantTensor
from dragoman_text.files import TokenizerFiles
from dragoman_text.tokenizer import byte_tokenizer_files

PREFIX: Final = "random:"
CONFIG_DIR: Final = Path(__file__).parent / "configs"
STANDARD_DEVIATION: Final = 0.02

_SCHEME: Final = "philox4x64/bf16-quantile/1"  # part of the digest: other numbers, another model
_CHUNK_VALUES: Final = 1 << 18
_BF16_ONE: Final = 0x3F80


def random_model_names() -> list[str]:
    """Models whose shapes come along."""
    return sorted(path.stem for path in CONFIG_DIR.glob("*.json"))


class RandomSource:
    """A model of real shape with random BF16 weights and a byte tokenizer.

    The same name and seed give the same weights everywhere. Nothing is stored: a tensor is made when it is asked for.
    """

    def __init__(self, name: str, seed: int = 0) -> None:
        """`name` is one of `random_model_names()`, `seed` 0 to 2^64 - 1. Raises ModelFileError for another name."""
        known = random_model_names()
        if name not in known:
            raise ModelFileError(PREFIX + name, "no such random model", f"choose one of: {', '.join(known)}")
        self.path = CONFIG_DIR / f"{name}.json"
        self.name = name
        self.random_seed: int | None = seed
        self._value = read_json(self.path)
        config = config_from_hf(self.path, self._value, name, byte_tokenizer_files().eos_token_ids)
        self.config: ModelConfig = dataclasses.replace(config, bos_token_id=None)
        self.generation = GenerationDefaults(eos_token_ids=config.eos_token_ids)
        self.embedding: EmbeddingSpec = QWEN3_EMBEDDING if name.startswith("qwen3-embedding") else PLAIN
        self._needed = needed_tensors(self.config)

    @cached_property
    def tokenizer(self) -> TokenizerFiles:
        """One token a byte and three control tokens, filled up to the model's vocabulary."""
        return padded_byte_tokenizer_files(self.config.vocab_size)

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) over generator, seed and shapes."""
        parts = [_SCHEME, self.random_seed, {**self._value, "name": self.name}]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    @property
    def total_bytes(self) -> int:
        """Bytes of all weights in BF16."""
        return 2 * self.config.num_parameters

    def tensor_names(self) -> list[str]:
        """Canonical names of the tensors the model needs, in the order of the layers."""
        return list(self._needed)

    def tensor(self, name: str) -> QuantTensor:
        """A BF16 tensor, made now: norms are 1, all else normal(0, 0.02). Raises ModelFileError for an unknown name."""
        rows, cols = self.layout(name).shape
        if name.endswith("norm"):
            values = np.full(rows * cols, _BF16_ONE, np.uint16)
        else:
            values = normal_bf16(self.random_seed or 0, name, rows * cols)
        return QuantTensor("BF16", (rows, cols), values.view(np.uint8).reshape(rows, 2 * cols))

    def stored_name(self, name: str) -> str:
        """There are no files: the canonical name."""
        return name

    def file_order(self) -> list[str]:
        """`tensor_names`: there is no file."""
        return self.tensor_names()

    def extent(self, name: str) -> TensorExtent | None:
        """None: weights are made."""

    @property
    def files(self) -> list[Path]:
        """None: weights are made."""
        return []

    def layout(self, name: str) -> TensorLayout:
        """Dtype and shape of a tensor without making it. Raises ModelFileError for an unknown name."""
        shape = self._needed.get(name)
        if shape is None:
            raise ModelFileError(PREFIX + self.name, f"tensor {name!r} is not part of the model", "ask for another")
        rows, cols = shape if len(shape) == 2 else (1, shape[0])
        return TensorLayout("BF16", (rows, cols), 2 * rows * cols)

    def check(self) -> None:
        """Nothing can be missing."""


def normal_bf16(seed: int, name: str, count: int) -> npt.NDArray[np.uint16]:
    """`count` BF16 values of normal(0, 0.02), a function of seed, name and position alone.

    Philox 4x64 (Salmon et al., SC 2011), keyed by SHA-256 of both, gives 16 random bits a value; these choose one of
    65536 equally likely quantiles, so that no rounding of a library's logarithm or square root can change a weight.
    Chunks have counters of their own and are made by several threads.
    """
    key = np.frombuffer(hashlib.sha256(f"{seed}\0{name}".encode()).digest()[:16], "<u8")
    table = _quantiles()
    values = np.empty(count, np.uint16)

    def fill(start: int) -> None:
        part = values[start : start + _CHUNK_VALUES]
        bits = np.random.Philox(key=key, counter=[0, start // _CHUNK_VALUES, 0, 0])
        words = np.asarray(bits.random_raw(-(-len(part) // 4)), "<u8")
        part[:] = table[words.view("<u2")[: len(part)]]

    starts = range(0, count, _CHUNK_VALUES)
    if len(starts) == 1:
        fill(0)
    else:
        with ThreadPoolExecutor(min(len(starts), os.cpu_count() or 1, 16)) as pool:
            list(pool.map(fill, starts))
    return values


@cache
def _quantiles() -> npt.NDArray[np.uint16]:
    """BF16 bits of the quantiles (i + 1/2) / 65536, i = 0 .. 65535, of normal(0, 0.02); the halves mirror exactly."""
    normal = NormalDist(0.0, STANDARD_DEVIATION)
    upper = np.array([normal.inv_cdf((i + 0.5) / 65536) for i in range(32768, 65536)], np.float32)
    bits = upper.view(np.uint32)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)  # to nearest, ties to even
    return np.concatenate([rounded[::-1] | np.uint16(0x8000), rounded])


def padded_byte_tokenizer_files(vocab_size: int) -> TokenizerFiles:
    """The byte tokenizer with a token for every id below `vocab_size`: ids from 259 on decode to `[id]`.

    No text encodes to them. Raises ValueError when the vocabulary is too small for all bytes and control tokens.
    """
    files = byte_tokenizer_files()
    value = json.loads(files.tokenizer_json)
    vocabulary = value["model"]["vocab"]
    # The library numbers added tokens after the model's unless the model has them too.
    vocabulary |= {token["content"]: token["id"] for token in value["added_tokens"]}
    first = len(vocabulary)
    if vocab_size < first:
        raise ValueError(
            f"a vocabulary of {vocab_size} tokens cannot hold the byte tokenizer's {first}; use a larger one"
        )
    vocabulary |= {f"[{token_id}]": token_id for token_id in range(first, vocab_size)}
    return dataclasses.replace(files, tokenizer_json=json.dumps(value, ensure_ascii=False).encode())
