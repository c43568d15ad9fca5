"""What the device may be asked to time: kernels of a model with their shapes, configurations and predicted seconds. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from dragoman_agent.model.config import ModelConfig
from dragoman_agent.pal.plan import DecodeAttention, Plan, PrefillAttention
from dragoman_agent.pal.profile import Profile

KernelKind = Literal[
    "decode-attention", "prefill-attention", "gemm", "rms-norm", "add-rms-norm", "silu-mul", "rope-cache", "sample"
]


@dataclass(frozen=True, slots=True)
class TuningCase:
    """One kernel call to time. `key` is its name in Timings: equal keys are equal work.

    `shape` by kind: decode-attention batch, context, num_heads, num_kv_heads, head_dim, page_size; prefill-attention
    the same with `tokens` for batch (one sequence whose last `tokens` are computed); gemm m, n, k; rms-norm,
    add-rms-norm and silu-mul tokens, width; rope-cache tokens, num_heads, num_kv_heads, head_dim; sample rows,
    vocab_size.
    """

    key: str
    kind: KernelKind
    shape: Mapping[str, int]
    config: DecodeAttention | PrefillAttention | None
    predicted_seconds: float


def tuning_cases(profile: Profile, model: ModelConfig, plan: Plan) -> list[TuningCase]:
    """Every call worth timing for `plan`, each key once: the shortlists of its choices, then the rest of a step."""
    return []
