"""The Triton kernels' contracts: cost as functions of shapes, and what a compiled kernel may use. Needs no Triton.

Values are two bytes (bfloat16) where a name says nothing else. A kernel's contract is named after its function:
`_rms_norm_kernel` is `triton.rms_norm`.
"""

from __future__ import annotations

import importlib
from typing import Any

from dragoman_kernels.contract import Bound, KernelContract, ResourceBudget, Shape
from dragoman_kernels.registry import Registry

_VALUE = 2


def contract_name(function_name: str) -> str:
    """The registered name of the Triton function `function_name`."""
    return "triton." + function_name.strip("_").removesuffix("_kernel")


def _one(shape: Shape) -> int:
    return 1


def _norm_bytes(shape: Shape) -> int:
    """Input and output; with a residual, that is read and written too; the weights once."""
    passes = 4 if shape["has_residual"] else 2
    return _VALUE * shape["width"] * (passes * shape["num_tokens"] + 1)


def _rope_bytes(shape: Shape) -> int:
    """q, k and v read and written once, cosines and sines (float32) once a token."""
    values = (shape["num_heads"] + 2 * shape["num_kv_heads"]) * shape["head_dim"]
    return shape["num_tokens"] * (2 * _VALUE * values + 4 * shape["head_dim"] + 8)


def _context_bytes(shape: Shape) -> int:
    return 2 * _VALUE * shape["num_kv_heads"] * shape["head_dim"] * shape["num_context_tokens"]


def _decode_bytes(shape: Shape) -> int:
    """K and V of every context once, q, and the output (float32 parts and their log sums where it is split)."""
    rows = shape["num_seqs"] * shape["num_heads"]
    split = shape["num_splits"]
    out = _VALUE * shape["head_dim"] if split == 1 else split * 4 * (shape["head_dim"] + 1)
    return _context_bytes(shape) + rows * (_VALUE * shape["head_dim"] + out)


def _items_bytes(shape: Shape) -> int:
    """K and V of every context once, q and the output, and each item's part written and read, were every context cut."""
    rows = shape["num_seqs"] * shape["num_heads"]
    parts = shape["num_items"] * shape["num_heads"] * 4 * (shape["head_dim"] + 1)
    return _context_bytes(shape) + rows * 2 * _VALUE * shape["head_dim"] + 2 * parts


def _decode_flops(shape: Shape) -> int:
    return 4 * shape["num_heads"] * shape["head_dim"] * shape["num_context_tokens"]


def _merge_bytes(shape: Shape) -> int:
    rows = shape["num_seqs"] * shape["num_heads"]
    return rows * (shape["num_splits"] * 4 * (shape["head_dim"] + 1) + _VALUE * shape["head_dim"])


def _prefill_flops(shape: Shape) -> int:
    """`num_query_context` sums, over the queries, the context tokens each one sees."""
    return 4 * shape["num_heads"] * shape["head_dim"] * shape["num_query_context"]


def _prefill_bytes(shape: Shape) -> int:
    """K and V once from memory (their other reads stay in L2), q and the output."""
    return _context_bytes(shape) + 2 * _VALUE * shape["num_tokens"] * shape["num_heads"] * shape["head_dim"]


def _logits_bytes(shape: Shape) -> int:
    return _VALUE * shape["num_rows"] * shape["vocab_size"]


def _contract(
    bound: Bound,
    dimensions: str,
    bytes_moved: Any,
    flops: Any,
    registers: int,
    shared_bytes: int | None = None,
    spill_bytes: int = 0,
) -> KernelContract:
    budget = ResourceBudget(registers, max_spill_bytes=spill_bytes, max_shared_bytes=shared_bytes)
    return KernelContract(bound, tuple(dimensions.split()), bytes_moved, flops, _one, resources=budget)


# Two registers: ptxas puts them aside for one launch in fifty on sm_80 or sm_120, though it has registers left.
_SPILL = 8
# The sum of the parts before rests there while a part is summed: written and read once in 256 tokens.
_FIXED_SPILL = 352

_ATTENTION = "num_seqs num_heads num_kv_heads head_dim num_context_tokens num_splits"

# Name -> (module, wrapper, contract). A row-wise kernel needs shared memory only to reduce across its
# warps, the stream to keep three blocks under way.
TRITON_CONTRACTS: dict[str, tuple[str, str, KernelContract]] = {
    "triton.rms_norm": (
        "norm", "rms_norm",
        _contract("bandwidth", "num_tokens width has_residual", _norm_bytes,
                  lambda s: 5 * s["num_tokens"] * s["width"], 64, 1 << 10),
    ),
    "triton.silu_mul": (
        "activation", "silu_mul",
        _contract("bandwidth", "num_tokens width", lambda s: 3 * _VALUE * s["num_tokens"] * s["width"],
                  lambda s: 5 * s["num_tokens"] * s["width"], 64, 1 << 10),
    ),
    "triton.rope_cache": (
        "rope_cache", "rope_and_cache",
        _contract("bandwidth", "num_tokens num_heads num_kv_heads head_dim", _rope_bytes,
                  lambda s: 6 * s["num_tokens"] * (s["num_heads"] + s["num_kv_heads"]) * s["head_dim"], 64, 1 << 10),
    ),
    "triton.gemm_decode": (
        "gemm_decode", "gemm_decode",
        _contract("bandwidth", "m n k", lambda s: _VALUE * (s["n"] * s["k"] + s["m"] * (s["n"] + s["k"])),
                  lambda s: 2 * s["m"] * s["n"] * s["k"], 255, spill_bytes=_SPILL),
    ),
    "triton.decode_split": (
        "attention_decode", "paged_decode_attention",
        _contract("bandwidth", _ATTENTION, _decode_bytes, _decode_flops, 255, spill_bytes=_SPILL),
    ),
    "triton.decode_merge": (
        "attention_decode", "paged_decode_attention",
        _contract("latency", "num_seqs num_heads head_dim num_splits", _merge_bytes,
                  lambda s: 3 * s["num_seqs"] * s["num_heads"] * s["num_splits"] * s["head_dim"], 128, 8 << 10),
    ),
    "triton.decode_list": (
        "attention_list", "listed_decode_attention",
        _contract("latency", "num_seqs num_items", lambda s: 4 * (s["num_seqs"] + 6 * s["num_items"]),
                  lambda s: 8 * s["num_seqs"] * s["num_items"], 168, 16 << 10),
    ),
    "triton.decode_items": (
        "attention_list", "listed_decode_attention",
        _contract("bandwidth", "num_seqs num_heads num_kv_heads head_dim num_context_tokens num_items",
                  _items_bytes, _decode_flops, 255, spill_bytes=_SPILL),
    ),
    "triton.prefill": (
        "attention_prefill", "paged_prefill_attention",
        _contract("compute", "num_tokens num_heads num_kv_heads head_dim num_context_tokens num_query_context",
                  _prefill_bytes, _prefill_flops, 255),
    ),
    "triton.prefill_tma": (
        "attention_prefill_tma", "prefill_by_descriptors",
        _contract("compute", "num_tokens num_heads num_kv_heads head_dim num_context_tokens num_query_context",
                  _prefill_bytes, _prefill_flops, 168),
    ),
    "triton.prefill_ws": (
        "attention_prefill_ws", "prefill_with_roles",
        _contract("compute", "num_tokens num_heads num_kv_heads head_dim num_context_tokens num_query_context",
                  _prefill_bytes, _prefill_flops, 168),
    ),
    "triton.gemm_fixed": (
        "gemm_fixed", "gemm_fixed",
        _contract("compute", "m n k", lambda s: _VALUE * (s["n"] * s["k"] + s["m"] * (s["n"] + s["k"])),
                  lambda s: 2 * s["m"] * s["n"] * s["k"], 255, spill_bytes=5 * _SPILL),
    ),
    "triton.attention_fixed": (
        "attention_fixed", "fixed_prefill_attention",
        _contract("compute", "num_tokens num_heads num_kv_heads head_dim num_context_tokens num_query_context",
                  _prefill_bytes, _prefill_flops, 255, spill_bytes=_FIXED_SPILL),
    ),
    "triton.fold_fixed": (
        "attention_fixed", "fixed_decode_attention",
        _contract("latency", "num_seqs num_heads head_dim num_splits", _merge_bytes,
                  lambda s: 3 * s["num_seqs"] * s["num_heads"] * s["num_splits"] * s["head_dim"], 128, 8 << 10),
    ),
    "triton.block_max": (
        "sampling", "sample_rows",
        _contract("bandwidth", "num_rows vocab_size", _logits_bytes, lambda s: s["num_rows"] * s["vocab_size"], 128, 8 << 10),
    ),
    "triton.block_sum": (
        "sampling", "sample_rows",
        _contract("bandwidth", "num_rows vocab_size", _logits_bytes,
                  lambda s: 4 * s["num_rows"] * s["vocab_size"], 128, 8 << 10),
    ),
    "triton.pick": (
        "sampling", "sample_rows",
        _contract("latency", "num_rows vocab_size", lambda s: s["num_rows"] * (_VALUE * 4096 + s["vocab_size"] // 256),
                  lambda s: s["num_rows"] * 8 * 4096, 255, 64 << 10),
    ),
    "triton.filter_coarse": (
        "filters", "draw_rows",
        _contract("bandwidth", "num_rows vocab_size", _logits_bytes,
                  lambda s: 40 * s["num_rows"] * s["vocab_size"], 128, 8 << 10),
    ),
    "triton.filter_gather": (
        "filters", "draw_rows",
        _contract("bandwidth", "num_rows vocab_size", _logits_bytes,
                  lambda s: 8 * s["num_rows"] * s["vocab_size"], 128, 32 << 10),
    ),
    # At worst it looks at a whole row twice for each bit of a key; at flat logits at a quarter of it, a few times.
    "triton.filter_search": (
        "filters", "draw_rows",
        _contract("latency", "num_rows vocab_size", lambda s: 4 * s["num_rows"] * s["vocab_size"],
                  lambda s: 8 * s["num_rows"] * s["vocab_size"], 128, 64 << 10),
    ),
    "triton.kept_sum": (
        "filters", "draw_rows",
        _contract("bandwidth", "num_rows vocab_size", _logits_bytes,
                  lambda s: 5 * s["num_rows"] * s["vocab_size"], 128, 8 << 10, spill_bytes=_SPILL),
    ),
    "triton.kept_pick": (
        "filters", "draw_rows",
        _contract("latency", "num_rows vocab_size", lambda s: s["num_rows"] * (_VALUE * 4096 + s["vocab_size"] // 256),
                  lambda s: s["num_rows"] * 9 * 4096, 255, 64 << 10, spill_bytes=_SPILL),
    ),
    "triton.edit_lists": (
        "edits", "edit_rows",
        _contract("latency", "num_rows num_entries", lambda s: 32 * s["num_rows"] * s["num_entries"],
                  lambda s: 8 * s["num_rows"] * s["num_entries"], 128, 8 << 10),
    ),
    "triton.edit_rows": (
        "edits", "edit_rows",
        _contract("bandwidth", "num_rows vocab_size", lambda s: (_VALUE + 8) * s["num_rows"] * s["vocab_size"],
                  lambda s: 4 * s["num_rows"] * s["vocab_size"], 128, 32 << 10, spill_bytes=2 * _SPILL),
    ),
    "triton.unpack": (
        "step_inputs", "StepInputs",
        _contract("latency", "num_rows width", lambda s: 8 * s["num_rows"] * (7 + s["width"]), lambda s: 0, 64, 1 << 10),
    ),
    "triton.resolve": (
        "step_inputs", "resolve_tokens",
        _contract("latency", "num_tokens", lambda s: 12 * s["num_tokens"], lambda s: 0, 64, 1 << 10),
    ),
    "triton.stream_read": (
        "stream_read", "stream_read",
        _contract("bandwidth", "num_items", lambda s: 4 * s["num_items"], lambda s: s["num_items"], 128, 64 << 10),
    ),
}  # fmt: skip


def register_triton(registry: Registry) -> None:
    """Register every Triton kernel; loading one imports torch and triton and returns what launches it."""
    for name, (module, wrapper, contract) in TRITON_CONTRACTS.items():
        registry.register(name, contract=contract)(_factory(module, wrapper))


def _factory(module: str, wrapper: str) -> Any:
    def load() -> Any:
        return getattr(importlib.import_module(f"dragoman_kernels.triton.{module}"), wrapper)

    return load
