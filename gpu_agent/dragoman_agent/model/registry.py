"""The architectures this agent knows: from a file's metadata to a ModelConfig, and the tensors it then needs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from dragoman_agent.model.config import ModelConfig, RopeScaling
from dragoman_agent.model.gguf import GgufFile
from dragoman_agent.model.metadata import Metadata
from dragoman_agent.model.rope import llama3_frequencies, plain_frequencies


@dataclass(frozen=True, slots=True)
class Architecture:
    """What sets one GGUF architecture apart."""

    name: str
    interleaved_rope: bool  # q and k rows are stored in interleaved pairs
    qk_norm: bool = False


ARCHITECTURES: Final = MappingProxyType(
    {
        "llama": Architecture("llama", interleaved_rope=True),  # Llama, SmolLM2, Mistral
        "qwen2": Architecture("qwen2", interleaved_rope=False),
        "qwen3": Architecture("qwen3", interleaved_rope=False, qk_norm=True),
    }
)

_LIMITS: Final = {
    "block_count": 1024,
    "context_length": 1 << 31,
    "embedding_length": 1 << 20,
    "feed_forward_length": 1 << 22,
    "attention.head_count": 1 << 12,
    "attention.head_count_kv": 1 << 12,
    "attention.key_length": 1 << 12,
    "attention.value_length": 1 << 12,
    "attention.sliding_window": 1 << 31,
    "rope.dimension_count": 1 << 12,
    "rope.scaling.original_context_length": 1 << 31,
    "vocab_size": 1 << 24,
}


def architecture_of(file: GgufFile) -> Architecture:
    """The file's architecture. Raises ModelFileError naming the known ones when it is not among them."""
    name = Metadata(file).required_text("general.architecture")
    known = ARCHITECTURES.get(name)
    if known is None:
        raise file.fail(
            f"architecture {name!r} is not supported (known: {', '.join(ARCHITECTURES)})",
            "use a model of a known architecture",
        )
    return known


def config_from_gguf(file: GgufFile, name: str, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    """Shapes and constants from the metadata alone. Raises ModelFileError for a missing, wrong or impossible value."""
    metadata = Metadata(file)
    architecture = architecture_of(file)
    if (metadata.integer(f"{architecture.name}.expert_count") or 0) > 0:
        raise file.fail("a mixture-of-experts model, which is not supported", "use a dense model")
    sizes = _Sizes(metadata, architecture.name)
    hidden_size, num_heads = sizes.required("embedding_length"), sizes.required("attention.head_count")
    num_kv_heads = sizes.optional("attention.head_count_kv", num_heads)
    head_dim = sizes.optional("attention.key_length", hidden_size // num_heads)
    if num_heads % num_kv_heads:
        raise file.fail(f"{num_heads} attention heads cannot share {num_kv_heads} key/value heads evenly")
    if head_dim < 2 or head_dim % 2:
        raise file.fail(f"head size {head_dim} is not an even number")
    for key in ("attention.value_length", "rope.dimension_count"):
        if sizes.optional(key, head_dim) != head_dim:
            raise file.fail(
                f"{architecture.name}.{key} differs from the head size {head_dim}, which is not supported",
                "use another model",
            )
    return ModelConfig(
        name=name,
        architecture=architecture.name,
        num_layers=sizes.required("block_count"),
        hidden_size=hidden_size,
        intermediate_size=sizes.required("feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=_vocab_size(file, sizes),
        max_context_tokens=sizes.required("context_length"),
        rope_theta=_positive(metadata, f"{architecture.name}.rope.freq_base", 10000.0),
        rms_norm_eps=_positive(metadata, f"{architecture.name}.attention.layer_norm_rms_epsilon", None),
        tied_embeddings="output.weight" not in file.tensors,
        rope_scaling=_rope_scaling(file, metadata, architecture.name, head_dim),
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        qk_norm=architecture.qk_norm,
        sliding_window=sizes.optional("attention.sliding_window", 0) or None,
        bos_token_id=metadata.integer("tokenizer.ggml.bos_token_id"),
        eos_token_ids=eos_token_ids,
    )


def needed_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Canonical name and shape (rows first) of every tensor the model is computed from."""
    hidden, head_dim = config.hidden_size, config.head_dim
    q_rows, kv_rows = config.num_heads * head_dim, config.num_kv_heads * head_dim
    needed: dict[str, tuple[int, ...]] = {"embed_tokens": (config.vocab_size, hidden), "norm": (hidden,)}
    if not config.tied_embeddings:
        needed["lm_head"] = (config.vocab_size, hidden)
    for index in range(config.num_layers):
        layer = {
            "input_norm": (hidden,),
            "q_proj": (q_rows, hidden),
            "k_proj": (kv_rows, hidden),
            "v_proj": (kv_rows, hidden),
            "o_proj": (hidden, q_rows),
            "post_attention_norm": (hidden,),
            "gate_proj": (config.intermediate_size, hidden),
            "up_proj": (config.intermediate_size, hidden),
            "down_proj": (hidden, config.intermediate_size),
        }
        if config.attention_bias:
            layer |= {"q_proj.bias": (q_rows,), "k_proj.bias": (kv_rows,), "v_proj.bias": (kv_rows,)}
        if config.attention_output_bias:
            layer["o_proj.bias"] = (hidden,)
        if config.qk_norm:
            layer |= {"q_norm": (head_dim,), "k_norm": (head_dim,)}
        needed |= {f"layers.{index}.{part}": shape for part, shape in layer.items()}
    return needed


class _Sizes:
    """Positive integers under an architecture's prefix, bounded before anything is sized by them."""

    def __init__(self, metadata: Metadata, prefix: str) -> None:
        self._metadata, self._prefix = metadata, prefix

    def required(self, key: str) -> int:
        value = self._read(key)
        if value is None:
            raise self._metadata.fail(
                f"metadata key '{self._prefix}.{key}' is missing", "convert the model with current tools"
            )
        if value == 0:
            raise self._metadata.fail(f"metadata key '{self._prefix}.{key}' is zero")
        return value

    def optional(self, key: str, default: int) -> int:
        value = self._read(key)
        return default if value is None or value == 0 else value

    def _read(self, key: str) -> int | None:
        value = self._metadata.integer(f"{self._prefix}.{key}")
        if value is not None and not 0 <= value <= _LIMITS[key]:
            raise self._metadata.fail(
                f"metadata key '{self._prefix}.{key}' is {value}, 0 to {_LIMITS[key]} are possible"
            )
        return value


def _vocab_size(file: GgufFile, sizes: _Sizes) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise file.fail("tensor 'token_embd.weight' is missing or not a matrix")
    vocab_size = embedding.shape[0]
    claimed = sizes.optional("vocab_size", vocab_size)
    if claimed != vocab_size:
        raise file.fail(f"the metadata names {claimed} tokens, the embedding has {vocab_size} rows")
    return vocab_size


def _positive(metadata: Metadata, key: str, default: float | None) -> float:
    value = metadata.number(key)
    value = default if value is None else value
    if value is None:
        raise metadata.fail(f"metadata key {key!r} is missing", "convert the model with current tools")
    if value <= 0:
        raise metadata.fail(f"metadata key {key!r} is {value}, a positive number was expected")
    return value


def _rope_scaling(file: GgufFile, metadata: Metadata, prefix: str, head_dim: int) -> RopeScaling:
    kind = metadata.text(f"{prefix}.rope.scaling.type", "none")
    original = metadata.integer(f"{prefix}.rope.scaling.original_context_length") or 0
    if "rope_freqs.weight" in file.tensors:
        return _llama3_scaling(file, metadata, prefix, head_dim)
    if kind == "none":
        return RopeScaling()
    if kind not in ("linear", "yarn"):
        raise file.fail(f"rotary scaling {kind!r} is not supported (none, linear, yarn are)", "use another model")
    factor = _positive(metadata, f"{prefix}.rope.scaling.factor", None)
    if kind == "linear":
        return RopeScaling(kind="linear", factor=factor)
    if original <= 0:
        raise file.fail(f"yarn rotary scaling without '{prefix}.rope.scaling.original_context_length'")
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_max_position=original,
        attention_factor=metadata.number(f"{prefix}.rope.scaling.attn_factor"),
        beta_fast=_positive(metadata, f"{prefix}.rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=_positive(metadata, f"{prefix}.rope.scaling.yarn_beta_slow", 1.0),
    )


def _llama3_scaling(file: GgufFile, metadata: Metadata, prefix: str, head_dim: int) -> RopeScaling:
    """Llama 3's scaling from the factors a GGUF stores per frequency; the parameters are not in the file, so they
    are found from the largest factor and checked against all of them.
    """
    tensor = file.tensors["rope_freqs.weight"]
    if tensor.dtype != "F32" or tensor.shape != (head_dim // 2,):
        raise file.fail(
            f"tensor 'rope_freqs.weight' is {tensor.dtype} {tensor.shape}, F32 ({head_dim // 2},) was expected"
        )
    factors = [float(factor) for factor in file.data("rope_freqs.weight").view("<f4").reshape(-1)]
    if not all(math.isfinite(factor) and factor > 0 for factor in factors):
        raise file.fail("tensor 'rope_freqs.weight' holds a factor that is not a positive number")
    theta = _positive(metadata, f"{prefix}.rope.freq_base", 10000.0)
    if max(factors) == 1.0:
        return RopeScaling()
    scaling = RopeScaling(kind="llama3", factor=max(factors), original_max_position=8192)
    plain = plain_frequencies(theta, head_dim)
    expected = plain / llama3_frequencies(plain, scaling)
    if any(abs(a - b) > 1e-3 * b for a, b in zip(factors, expected.tolist(), strict=True)):
        raise file.fail("tensor 'rope_freqs.weight' holds factors other than Llama 3's, which is not supported")
    return scaling
