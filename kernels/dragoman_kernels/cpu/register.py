"""The CPU kernels' contracts and their registration."""

from __future__ import annotations

from typing import Any

from dragoman_kernels.contract import KernelContract, Shape
from dragoman_kernels.registry import Registry

LLAMA_STEP = "cpu.llama_step"


def _attention_values(shape: Shape) -> int:
    return shape["num_layers"] * shape["num_kv_heads"] * shape["head_dim"] * shape["num_context_tokens"]


def llama_step_bytes(shape: Shape) -> int:
    """Weights once a step, K and V of every sequence's context once, the logits.

    Prefill reads the context once for each tile of query rows; that traffic stays in the last-level cache.
    """
    cached = 2 * _attention_values(shape) * shape["kv_value_bytes"]
    return shape["weight_bytes"] + cached + 4 * shape["num_logit_seqs"] * shape["vocab_size"]


def llama_step_flops(shape: Shape) -> int:
    """Two a weight and token, two for scores and two for values a query, head, context token and dimension.

    `num_context_tokens` sums the sequences' contexts; attention counts the mean number of queries a sequence has.
    """
    queries = max(1, shape["num_tokens"] // max(1, shape["num_seqs"]))
    group = shape["num_heads"] // shape["num_kv_heads"]
    attention = 4 * _attention_values(shape) * group * queries
    head = 2 * shape["num_logit_seqs"] * shape["vocab_size"] * shape["hidden_size"]
    return 2 * shape["num_tokens"] * shape["layer_parameters"] + attention + head


def llama_step_phases(shape: Shape) -> int:
    """Barriers of a step: up to eight a layer, and the embedding, the final norm and the head.

    A pure decode step stores K and V in its attention phase; up to two tokens are normed by every thread for itself.
    """
    per_layer = 8 - (shape["num_tokens"] == shape["num_seqs"]) - 2 * (shape["num_tokens"] <= 2)
    return per_layer * shape["num_layers"] + 3


LLAMA_STEP_CONTRACT = KernelContract(
    bound="bandwidth",
    dimensions=(
        "num_layers",
        "hidden_size",
        "vocab_size",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "num_tokens",
        "num_seqs",
        "num_logit_seqs",
        "num_context_tokens",
        "weight_bytes",
        "layer_parameters",
        "kv_value_bytes",
    ),
    bytes_moved=llama_step_bytes,
    flops=llama_step_flops,
    phases=llama_step_phases,
)


def register_cpu(registry: Registry) -> None:
    """Register every CPU kernel."""

    @registry.register(LLAMA_STEP, contract=LLAMA_STEP_CONTRACT)
    def load() -> Any:
        from dragoman_kernels.cpu.llama import LlamaStep

        return LlamaStep
