"""The model in plain float64 numpy over whole sequences: what the native step must compute. Slow; for tests."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from dragoman_kernels.cpu.llama import LlamaShape

Float64Array = npt.NDArray[np.float64]


def _rms_norm(x: Float64Array, weight: Float64Array, eps: float) -> Float64Array:
    normed: Float64Array = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight
    return normed


def _rotate(x: Float64Array, cosines: Float64Array, sines: Float64Array) -> Float64Array:
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate((first * cosines - second * sines, second * cosines + first * sines), axis=-1)


def llama_reference(
    shape: LlamaShape, weights: Mapping[str, npt.NDArray[np.floating]], token_ids: npt.NDArray[np.integer]
) -> tuple[Float64Array, Float64Array]:
    """Logits [num_tokens, vocab_size] and normed hidden states [num_tokens, hidden_size] of one sequence.

    `weights` are plain arrays under the canonical names; matrices [rows, cols].
    """
    w = {name: np.asarray(value, dtype=np.float64) for name, value in weights.items()}

    def linear(x: Float64Array, name: str) -> Float64Array:
        out: Float64Array = x @ w[name].T + w.get(f"{name}.bias", np.float64(0))
        return out

    num_tokens, dim = len(token_ids), shape.head_dim
    angles = np.arange(num_tokens, dtype=np.float64)[:, None] * shape.inverse_frequencies.astype(np.float64)
    cosines = np.cos(angles)[:, None] * shape.rope_attention_factor
    sines = np.sin(angles)[:, None] * shape.rope_attention_factor
    future = np.triu(np.ones((num_tokens, num_tokens), dtype=bool), 1)
    x = w["embed_tokens"][token_ids]
    for layer in range(shape.num_layers):
        at = f"layers.{layer}."
        normed = _rms_norm(x, w[at + "input_norm"], shape.rms_norm_eps)
        q = linear(normed, at + "q_proj").reshape(num_tokens, shape.num_heads, dim)
        k = linear(normed, at + "k_proj").reshape(num_tokens, shape.num_kv_heads, dim)
        v = linear(normed, at + "v_proj").reshape(num_tokens, shape.num_kv_heads, dim)
        if at + "q_norm" in w:
            q = _rms_norm(q, w[at + "q_norm"], shape.rms_norm_eps)
        if at + "k_norm" in w:
            k = _rms_norm(k, w[at + "k_norm"], shape.rms_norm_eps)
        group = shape.num_heads // shape.num_kv_heads
        q, k = _rotate(q, cosines, sines), np.repeat(_rotate(k, cosines, sines), group, axis=1)
        scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(dim)
        scores = np.where(future, -np.inf, scores)
        probabilities = np.exp(scores - scores.max(axis=-1, keepdims=True))
        probabilities /= probabilities.sum(axis=-1, keepdims=True)
        mixed = np.einsum("hts,shd->thd", probabilities, np.repeat(v, group, axis=1))
        x = x + linear(mixed.reshape(num_tokens, -1), at + "o_proj")
        normed = _rms_norm(x, w[at + "post_attention_norm"], shape.rms_norm_eps)
        gate = linear(normed, at + "gate_proj")
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(normed, at + "up_proj"), at + "down_proj")
    hidden = _rms_norm(x, w["norm"], shape.rms_norm_eps)
    head = "lm_head" if "lm_head" in w else "embed_tokens"
    return linear(hidden, head), hidden
