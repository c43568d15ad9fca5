"""The null device's model and plan: a byte tokenizer, no weights, and step times like those of a small model on one H200."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NoReturn

from dragoman.step_model import StepModel
from dragoman_agent.model.config import ModelConfig
from dragoman_agent.model.embedding import QWEN3_EMBEDDING
from dragoman_agent.model.errors import ModelFileError
from dragoman_agent.model.generation import GenerationDefaults
from dragoman_agent.pal.plan import MemoryLine, Plan
from dragoman_text import TokenizerFiles, byte_tokenizer_files

DEFAULT_NAME = "null"
_VOCAB_SIZE = 259  # 256 bytes and three control tokens


class NullModel:
    """Implements ModelSource: a model of bytes without a single weight. Equal names are equal models."""

    def __init__(self, name: str = DEFAULT_NAME, max_context_tokens: int = 32768) -> None:
        self.path = Path(name)
        self.name = name
        self.tokenizer: TokenizerFiles = byte_tokenizer_files()
        self.config = ModelConfig(
            name=name,
            architecture="null",
            num_layers=1,
            hidden_size=64,
            intermediate_size=128,
            num_heads=1,
            num_kv_heads=1,
            head_dim=64,
            vocab_size=_VOCAB_SIZE,
            max_context_tokens=max_context_tokens,
            rope_theta=10000.0,
            rms_norm_eps=1e-5,
            tied_embeddings=True,
            eos_token_ids=self.tokenizer.eos_token_ids,
        )
        self.generation = GenerationDefaults(eos_token_ids=self.tokenizer.eos_token_ids)
        self.embedding = QWEN3_EMBEDDING
        self.digest = hashlib.sha256(f"null model {name} {self.tokenizer.digest}".encode()).hexdigest()
        self.total_bytes = 0
        self.random_seed: int | None = None
        self.files: list[Path] = []

    def tensor_names(self) -> list[str]:
        """None."""
        return []

    def file_order(self) -> list[str]:
        """None."""
        return []

    def stored_name(self, name: str) -> str:
        """There are no files: the canonical name."""
        return name

    def extent(self, name: str) -> NoReturn:
        """Raises: there are no weights."""
        self.tensor(name)

    def layout(self, name: str) -> NoReturn:
        """Raises: there are no weights."""
        self.tensor(name)

    def tensor(self, name: str) -> NoReturn:
        """Raises: there are no weights."""
        raise ModelFileError(self.name, f"has no tensor {name!r}: it is the null model", "use --device null")

    def check(self) -> None:
        """Nothing can be missing."""


def is_null_spec(spec: str) -> bool:
    """Whether a `--model` value names the null model."""
    return spec == DEFAULT_NAME or spec.startswith(DEFAULT_NAME + ":")


def open_null_model(spec: str) -> NullModel:
    """The model of `null` or `null:NAME`. Raises ModelFileError for another spec or an empty name."""
    name = spec.removeprefix(DEFAULT_NAME + ":")
    if not is_null_spec(spec) or not name:
        raise ModelFileError(spec, "the null device serves only the null model", "use --model null or null:NAME")
    return NullModel(name)


def default_null_plan(
    model: NullModel,
    *,
    page_size: int = 64,
    num_blocks: int = 8192,
    max_context_tokens: int | None = None,
    max_batch_tokens: int = 8192,
    company_tokens: int = 0,
    max_num_seqs: int = 256,
    max_num_waiting: int = 256,
    step_model: StepModel | None = None,
) -> Plan:
    """A plan for the null device; each value can be set. The arena takes 12 bytes a token."""
    context = min(max_context_tokens or model.config.max_context_tokens, (num_blocks - 1) * page_size)
    arena_bytes = num_blocks * page_size * 12
    return Plan(
        device_kind="null",
        model_name=model.name,
        page_size=page_size,
        num_blocks=num_blocks,
        max_context_tokens=context,
        max_batch_tokens=max_batch_tokens,
        company_tokens=company_tokens,
        max_num_seqs=max_num_seqs,
        max_num_waiting=max_num_waiting,
        num_threads=1,
        road="null",
        kv_dtype="uint64",
        memory=(MemoryLine("kv blocks", arena_bytes),),
        step_model=step_model or default_step_model(),
    )


def default_step_model() -> StepModel:
    """Decode and prefill times in the range of a model of about a billion parameters on one H200."""
    batch_sizes = (1, 8, 64, 256)
    contexts = (0, 4096, 32768)
    base = (0.00080, 0.00090, 0.00140, 0.00300)
    return StepModel(
        batch_sizes=batch_sizes,
        context_tokens=contexts,
        decode_seconds_grid=tuple(
            seconds + batch * context * 8e-12
            for batch, seconds in zip(batch_sizes, base, strict=True)
            for context in contexts
        ),
        prefill_tokens_per_second=250_000.0,
        prefill_base_seconds=0.001,
    )
