"""Small GGUF files made with the `gguf` library."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.quants import quantize

HIDDEN, INTERMEDIATE, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, NUM_LAYERS = 64, 96, 4, 2, 16, 2

MakeModel = Callable[..., Path]


def byte_alphabet() -> list[str]:
    """GPT-2's 256 byte characters, from transformers."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return [character for _, character in sorted(bytes_to_unicode().items())]


TOKENS = [*byte_alphabet(), "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool>", "he", "ll"]


def tiny_tensors(
    rng: np.random.Generator, *, tied: bool = True, bias: bool = False, qk_norm: bool = False
) -> dict[str, Any]:
    """Random float32 weights under GGUF names, rows first."""
    q_rows, kv_rows = NUM_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (len(TOKENS), HIDDEN), "output_norm.weight": (HIDDEN,)}
    if not tied:
        shapes["output.weight"] = (len(TOKENS), HIDDEN)
    for index in range(NUM_LAYERS):
        layer: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (HIDDEN,),
            "attn_q.weight": (q_rows, HIDDEN),
            "attn_k.weight": (kv_rows, HIDDEN),
            "attn_v.weight": (kv_rows, HIDDEN),
            "attn_output.weight": (HIDDEN, q_rows),
            "ffn_norm.weight": (HIDDEN,),
            "ffn_gate.weight": (INTERMEDIATE, HIDDEN),
            "ffn_up.weight": (INTERMEDIATE, HIDDEN),
            "ffn_down.weight": (HIDDEN, INTERMEDIATE),
        }
        if bias:
            layer |= {"attn_q.bias": (q_rows,), "attn_k.bias": (kv_rows,), "attn_v.bias": (kv_rows,)}
        if qk_norm:
            layer |= {"attn_q_norm.weight": (HEAD_DIM,), "attn_k_norm.weight": (HEAD_DIM,)}
        shapes |= {f"blk.{index}.{name}": shape for name, shape in layer.items()}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def tiny_metadata(architecture: str = "llama") -> dict[str, Any]:
    """The keys of a complete file; values by their Python type, integers as uint32, floats as float32."""
    prefix = architecture
    return {
        f"{prefix}.block_count": NUM_LAYERS,
        f"{prefix}.context_length": 512,
        f"{prefix}.embedding_length": HIDDEN,
        f"{prefix}.feed_forward_length": INTERMEDIATE,
        f"{prefix}.attention.head_count": NUM_HEADS,
        f"{prefix}.attention.head_count_kv": NUM_KV_HEADS,
        f"{prefix}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{prefix}.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [1] * 256 + [3, 3, 3, 4, 1, 1],
        "tokenizer.ggml.merges": ["h e", "l l"],
        "tokenizer.ggml.bos_token_id": 257,
        "tokenizer.ggml.eos_token_id": 258,
    }


def write_gguf(
    path: Path,
    metadata: dict[str, Any],
    tensors: dict[str, Any],
    *,
    architecture: str = "llama",
    dtypes: dict[str, str] | None = None,
) -> Path:
    """Write with the `gguf` library; `dtypes` names the stored type of tensors that are not F32."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, values in tensors.items():
        kind = gguf.GGMLQuantizationType[(dtypes or {}).get(name, "F32")]
        writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="session")
def library_reader(embedded_model_path: Path) -> gguf.GGUFReader:
    """The embedded model opened by the `gguf` library, once: it takes seconds."""
    return gguf.GGUFReader(embedded_model_path)


@pytest.fixture
def make_model(tmp_path: Path) -> MakeModel:
    """Makes a tiny model file: `metadata` overrides keys (None removes), `tensors` likewise."""

    def make(
        name: str = "tiny.gguf",
        *,
        architecture: str = "llama",
        metadata: dict[str, Any] | None = None,
        tensors: dict[str, Any] | None = None,
        dtypes: dict[str, str] | None = None,
        **shape: bool,
    ) -> Path:
        keys = tiny_metadata(architecture) | (metadata or {})
        weights = tiny_tensors(np.random.default_rng(0), **shape) | (tensors or {})
        return write_gguf(
            tmp_path / name,
            {key: value for key, value in keys.items() if value is not None},
            {key: value for key, value in weights.items() if value is not None},
            architecture=architecture,
            dtypes=dtypes,
        )

    return make
