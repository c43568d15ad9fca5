"""The Llama family as one function over weights: llama, mistral, qwen2 (biases on q, k, v) and qwen3 (q and k norms)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import Tensor

from dragoman_agent.model.config import ModelConfig
from dragoman_agent.model.layers import Ops, PagedCache, Step

TensorFn = Callable[[str], Tensor | None]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. Matrices are [outputs, inputs]; q, k, v lie in one, gate and up in one."""

    input_norm: Tensor
    qkv: Tensor  # [(num_heads + 2 * num_kv_heads) * head_dim, hidden_size]
    qkv_bias: Tensor | None
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None
    out: Tensor  # [hidden_size, num_heads * head_dim]
    out_bias: Tensor | None
    post_attention_norm: Tensor
    gate_up: Tensor  # [2 * intermediate_size, hidden_size]
    down: Tensor  # [hidden_size, intermediate_size]


@dataclass(frozen=True, slots=True)
class LlamaWeights:
    """A whole model; `head` is the embedding itself when they are tied."""

    embedding: Tensor  # [vocab_size, hidden_size]
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor


def assemble(config: ModelConfig, tensor: TensorFn) -> LlamaWeights:
    """The weights from `tensor(canonical name)`, which gives None for a name the model does not have.

    Raises ValueError naming a missing tensor.
    """

    def need(name: str) -> Tensor:
        found = tensor(name)
        if found is None:
            raise ValueError(
                f"{config.name} lacks the tensor {name}; the file is incomplete or not of this architecture."
            )
        return found

    def stack_bias(names: list[str]) -> Tensor | None:
        parts = [tensor(f"{name}.bias") for name in names]
        present = [part for part in parts if part is not None]
        if len(present) not in (0, len(names)):
            raise ValueError(f"{config.name} has a bias on some of {', '.join(names)} but not on all of them.")
        return torch.cat(present) if present else None

    def layer(prefix: str) -> LayerWeights:
        attention = [f"{prefix}.{name}_proj" for name in "qkv"]
        return LayerWeights(
            input_norm=need(f"{prefix}.input_norm"),
            qkv=torch.cat([need(name) for name in attention]),
            qkv_bias=stack_bias(attention),
            q_norm=need(f"{prefix}.q_norm") if config.qk_norm else None,
            k_norm=need(f"{prefix}.k_norm") if config.qk_norm else None,
            out=need(f"{prefix}.o_proj"),
            out_bias=tensor(f"{prefix}.o_proj.bias"),
            post_attention_norm=need(f"{prefix}.post_attention_norm"),
            gate_up=torch.cat((need(f"{prefix}.gate_proj"), need(f"{prefix}.up_proj"))),
            down=need(f"{prefix}.down_proj"),
        )

    embedding = need("embed_tokens")
    return LlamaWeights(
        embedding=embedding,
        layers=tuple(layer(f"layers.{i}") for i in range(config.num_layers)),
        norm=need("norm"),
        head=embedding if config.tied_embeddings else need("lm_head"),
    )


def forward(config: ModelConfig, weights: LlamaWeights, cache: PagedCache, step: Step, ops: Ops[Step]) -> Tensor:
    """Hidden states after the final norm of the step's last rows, [num_rows, hidden_size]; writes the step's K and V."""
    eps = config.rms_norm_eps
    residual = functional.embedding(step.token_ids, weights.embedding)
    x = ops.rms_norm(residual, weights.layers[0].input_norm, eps)
    for index, layer in enumerate(weights.layers):
        qkv = ops.linear(x, layer.qkv, layer.qkv_bias)
        attended = ops.attention(qkv, layer.q_norm, layer.k_norm, cache, index, step, config)
        x = ops.linear(attended, layer.out, layer.out_bias)
        x, residual = ops.add_rms_norm(x, residual, layer.post_attention_norm, eps)
        x = ops.linear(ops.silu_mul(ops.linear(x, layer.gate_up, None)), layer.down, None)
        if index + 1 < config.num_layers:
            x, residual = ops.add_rms_norm(x, residual, weights.layers[index + 1].input_norm, eps)
    if step.last_rows is not None:
        x, residual = x[step.last_rows], residual[step.last_rows]
    return ops.add_rms_norm(x, residual, weights.norm, eps)[0]


def logits(weights: LlamaWeights, hidden: Tensor, ops: Ops[Step]) -> Tensor:
    """float32 [num_rows, vocab_size] of hidden states [num_rows, hidden_size]."""
    return ops.linear(hidden, weights.head, None).float()
