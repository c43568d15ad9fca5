"""Rotary frequencies of every scaling, on the host. Torch-free."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from dragoman_agent.model.config import ModelConfig, RopeScaling

Float64Array = npt.NDArray[np.float64]


def rope_frequencies(config: ModelConfig) -> tuple[npt.NDArray[np.float32], float]:
    """Inverse frequencies [head_dim / 2] and the factor on cosines and sines.

    theta^(-2i / head_dim) (RoFormer, arXiv 2104.09864), scaled as the config says: linear (arXiv 2306.15595), llama3
    (Llama 3.1's published scheme) or yarn (arXiv 2309.00071). Raises ValueError on a scaling without its constants.
    """
    plain = plain_frequencies(config.rope_theta, config.head_dim)
    scaling = config.rope_scaling
    if scaling.kind in ("llama3", "yarn") and scaling.original_max_position <= 0:
        raise ValueError(
            f"RoPE scaling {scaling.kind} of {config.name} lacks the original context length "
            "(original_max_position_embeddings); the model's configuration is incomplete."
        )
    if scaling.kind == "linear":
        return (plain / scaling.factor).astype(np.float32), 1.0
    if scaling.kind == "llama3":
        return llama3_frequencies(plain, scaling).astype(np.float32), 1.0
    if scaling.kind == "yarn":
        return _yarn(plain, scaling, config).astype(np.float32), _yarn_attention_factor(scaling)
    return plain.astype(np.float32), 1.0


def plain_frequencies(theta: float, head_dim: int) -> Float64Array:
    """theta^(-2i / head_dim), [head_dim / 2]."""
    return np.asarray(float(theta) ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim))


def llama3_frequencies(plain: Float64Array, scaling: RopeScaling) -> Float64Array:
    """Llama 3.1's rule: slow rotations are slowed by the factor, fast ones kept, a smooth passage between."""
    turns = scaling.original_max_position * plain / (2 * math.pi)
    kept = np.clip((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor), 0.0, 1.0)
    return np.asarray(kept * plain + (1 - kept) * plain / scaling.factor)


def _yarn(plain: Float64Array, scaling: RopeScaling, config: ModelConfig) -> Float64Array:
    """Interpolation by parts; the ramp runs over whole pair indices, as in the paper's own code."""

    def pair_of(turns: float) -> float:
        ratio = scaling.original_max_position / (turns * 2 * math.pi)
        return config.head_dim * math.log(ratio) / (2 * math.log(config.rope_theta))

    low = max(math.floor(pair_of(scaling.beta_fast)), 0)
    high = min(math.ceil(pair_of(scaling.beta_slow)), config.head_dim - 1)
    ramp = np.clip((np.arange(len(plain)) - low) / (high - low if high != low else 0.001), 0.0, 1.0)
    return np.asarray(plain / scaling.factor * ramp + plain * (1 - ramp))


def _yarn_attention_factor(scaling: RopeScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0
