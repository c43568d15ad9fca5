"""What a model is, independent of the file it came from. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

RopeKind = Literal["none", "linear", "llama3", "yarn"]


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Rotary scaling; fields a kind does not use keep their default."""

    kind: RopeKind = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shapes and constants of a decoder-only transformer.

    Rotary embedding is the "half split" form (first half paired with second half of `head_dim`);
    loaders of files that store interleaved pairs permute the q and k rows.
    """

    name: str
    architecture: str  # "llama", "qwen2", "qwen3", "mistral"
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_context_tokens: int
    rope_theta: float
    rms_norm_eps: float
    tied_embeddings: bool
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    attention_bias: bool = False  # on q, k and v
    attention_output_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    kv_item_bytes: int = 2  # of a number of K or V, as a plan counts them

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V a token."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.kv_item_bytes

    @property
    def num_parameters(self) -> int:
        """Parameters of embedding, layers, norms, biases and head (a tied head counted once)."""
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        if self.attention_bias:
            attention += self.head_dim * (self.num_heads + 2 * self.num_kv_heads)
        if self.attention_output_bias:
            attention += self.hidden_size
        mlp = 3 * self.hidden_size * self.intermediate_size
        norms = 2 * self.hidden_size + (2 * self.head_dim if self.qk_norm else 0)
        heads = 1 if self.tied_embeddings else 2
        return (
            self.num_layers * (attention + mlp + norms) + heads * self.vocab_size * self.hidden_size + self.hidden_size
        )
