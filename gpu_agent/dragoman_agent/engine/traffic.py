"""Bytes that the kernels of a step ask for, and those of them that must come from memory: the model behind the L2 hit rate.

A kernel asks for each of its operands once (its contract says how many bytes). Weights and KV are read once a step and come from
memory; what one kernel writes and the next reads stays in L2 as long as it fits.
"""

from __future__ import annotations

from dataclasses import dataclass

from dragoman_agent.model.config import ModelConfig
from dragoman_kernels.contract import Shape
from dragoman_kernels.triton.contracts import TRITON_CONTRACTS

ONE_TILE_TOKENS = 128  # rows of the largest tile of a matrix product
_VALUE = 2  # bytes of a bfloat16


@dataclass(frozen=True, slots=True)
class Traffic:
    """Of one step, or summed over several."""

    asked_bytes: float = 0.0
    dram_bytes: float = 0.0
    is_certain: bool = (
        True  # False: a product's operands are larger than L2, how often memory is read is the library's choice
    )

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.asked_bytes + other.asked_bytes,
            self.dram_bytes + other.dram_bytes,
            self.is_certain and other.is_certain,
        )

    @property
    def hit_ratio(self) -> float | None:
        """The share that is predicted to be served from L2; None when nothing is asked for."""
        return 1.0 - self.dram_bytes / self.asked_bytes if self.asked_bytes > 0 else None


@dataclass(frozen=True, slots=True)
class TrafficModel:
    """Linear in what a step computes, so that a step costs the caller a few multiplications."""

    weight_bytes: float  # read by every step
    kv_token_bytes: float  # of K and V of one token, all layers
    token_bytes: float  # activations that a token's kernels read and write, all layers
    live_token_bytes: float  # activations of a token that are alive at once
    logits_row_bytes: float  # written and read again for each sampled row
    largest_weight_bytes: float  # of one matrix product of a layer
    l2_bytes: float

    def step(self, num_decodes: int, num_prefill_tokens: int, context_tokens: int) -> Traffic:
        """One step; `context_tokens` sums the contexts of the sequences that run. Attention of a chunk reads its own once."""
        num_tokens = num_decodes + num_prefill_tokens
        if num_tokens == 0:
            return Traffic()
        activations = num_tokens * self.token_bytes + max(num_decodes, 1) * self.logits_row_bytes
        written = num_tokens * self.kv_token_bytes
        read = self.weight_bytes + context_tokens * self.kv_token_bytes
        asked = read + written + activations
        # What is larger than L2 is written out and read back; what is smaller never leaves.
        spilt = activations if num_tokens * self.live_token_bytes > self.l2_bytes else 0.0
        kept = read + num_tokens * self.live_token_bytes <= self.l2_bytes
        dram = written + spilt + (0.0 if kept else read)
        # Few rows are one tile: each weight is read once whatever its size.
        fits = self.largest_weight_bytes + num_tokens * self.live_token_bytes <= self.l2_bytes
        return Traffic(asked, min(dram, asked), fits or num_tokens <= ONE_TILE_TOKENS)


def traffic_model(model: ModelConfig, weight_bytes: float, l2_bytes: float) -> TrafficModel:
    """The model of `model` computed by the Triton kernels in bfloat16. `weight_bytes` is what is resident.

    The embedding table is not read through: a step takes a row a token.
    """
    embedding = 0 if model.tied_embeddings else _VALUE * model.vocab_size * model.hidden_size
    queries, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    # Matrix products: input and output of qkv, output, gate with up, and down.
    products = _VALUE * (
        (model.hidden_size + queries + 2 * kv)
        + (queries + model.hidden_size)
        + (model.hidden_size + 2 * model.intermediate_size)
        + (model.intermediate_size + model.hidden_size)
    )
    attention = 2 * _VALUE * queries  # q read, output written
    layer = (
        products
        + attention
        + 2 * _a_token("triton.rms_norm", {"width": model.hidden_size, "has_residual": 1})
        + _a_token(
            "triton.rope_cache",
            {"num_heads": model.num_heads, "num_kv_heads": model.num_kv_heads, "head_dim": model.head_dim},
        )
        + _a_token("triton.silu_mul", {"width": model.intermediate_size})
    )
    return TrafficModel(
        weight_bytes=max(weight_bytes - embedding, 0.0),
        kv_token_bytes=model.kv_bytes_per_token,
        token_bytes=model.num_layers * layer,
        live_token_bytes=_VALUE * (2 * model.intermediate_size + 2 * model.hidden_size),
        logits_row_bytes=3 * _VALUE * model.vocab_size,
        largest_weight_bytes=_VALUE * 2 * model.intermediate_size * model.hidden_size,
        l2_bytes=l2_bytes,
    )


def _a_token(kernel: str, shape: Shape) -> int:
    """What one more token adds to a kernel's bytes: weights that do not depend on it are left out."""
    contract = TRITON_CONTRACTS[kernel][2]
    one, two = (contract.cost({**shape, "num_tokens": count}).num_bytes for count in (1, 2))
    return two - one
