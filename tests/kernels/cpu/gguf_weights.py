"""Reads a Llama-family GGUF file into the step's weights with the `gguf` library: a reader that is not our own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from dragoman_kernels.cpu.llama import LlamaShape
from dragoman_kernels.tensor import QuantTensor

LAYER_NAMES = {
    "attn_q": "q_proj",
    "attn_k": "k_proj",
    "attn_v": "v_proj",
    "attn_output": "o_proj",
    "ffn_gate": "gate_proj",
    "ffn_up": "up_proj",
    "ffn_down": "down_proj",
    "attn_norm": "input_norm",
    "ffn_norm": "post_attention_norm",
}
GLOBAL_NAMES = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}

Weights = dict[str, QuantTensor | npt.NDArray[np.float32]]


def read_gguf(path: Path) -> tuple[LlamaShape, Weights]:
    """Shape and weights of a `llama` GGUF without rope scaling. Raises ValueError naming what it cannot read."""
    reader = gguf.GGUFReader(path)

    def value(key: str, default: Any = None) -> Any:
        field = reader.fields.get(key)
        if field is None and default is None:
            raise ValueError(f"{path}: metadata {key} is missing")
        return default if field is None else field.contents()

    architecture = value("general.architecture")
    if architecture != "llama" or "rope_freqs.weight" in {t.name for t in reader.tensors}:
        raise ValueError(
            f"{path}: {architecture} with these rotary settings is not readable here; use an unscaled llama file"
        )
    num_heads, hidden_size = value("llama.attention.head_count"), value("llama.embedding_length")
    num_kv_heads = value("llama.attention.head_count_kv", num_heads)
    head_dim = value("llama.rope.dimension_count", hidden_size // num_heads)
    weights: Weights = {}
    for tensor in reader.tensors:
        name = _canonical(tensor.name)
        rows = np.array(tensor.data)
        if name.endswith(("q_proj", "k_proj")):
            rows = _unpermute(rows, num_heads if name.endswith("q_proj") else num_kv_heads)
        if rows.ndim == 1:
            weights[name] = rows.astype(np.float32)
        else:
            cols, count = (int(n) for n in tensor.shape)
            weights[name] = QuantTensor(tensor.tensor_type.name, (count, cols), rows.view(np.uint8).reshape(count, -1))
    shape = LlamaShape(
        num_layers=value("llama.block_count"),
        hidden_size=hidden_size,
        intermediate_size=value("llama.feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=weights["embed_tokens"].shape[0],
        max_context_tokens=value("llama.context_length"),
        rms_norm_eps=value("llama.attention.layer_norm_rms_epsilon"),
        inverse_frequencies=LlamaShape.default_frequencies(value("llama.rope.freq_base", 10000.0), head_dim),
    )
    return shape, weights


def _canonical(name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    if stem in GLOBAL_NAMES:
        return GLOBAL_NAMES[stem]
    parts = stem.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in LAYER_NAMES:
        return f"layers.{parts[1]}.{LAYER_NAMES[parts[2]]}" + (".bias" if suffix == "bias" else "")
    raise ValueError(f"tensor {name} has no place in a llama model")


def _unpermute(rows: npt.NDArray[Any], num_heads: int) -> npt.NDArray[Any]:
    """GGUF llama stores q and k rows as interleaved rotary pairs; back to the half-split order."""
    return rows.reshape(num_heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
