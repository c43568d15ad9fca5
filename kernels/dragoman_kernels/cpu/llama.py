"""A whole prefill and decode step of a Llama-family model on the CPU, as one native call."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from dragoman_kernels.cpu import native
from dragoman_kernels.cpu.build import build
from dragoman_kernels.tensor import QuantTensor

__all__ = ["BLOCKS", "KEY_CHUNK", "MAX_HEAD_DIM", "Activation", "LlamaShape", "LlamaStep", "QuantTensor"]

Float32Array = npt.NDArray[np.float32]
Int32Array = npt.NDArray[np.int32]
Activation = Literal["int8", "float32"]

# GGUF block layouts: values a block, bytes a block.
BLOCKS: dict[str, tuple[int, int]] = {
    "F32": (1, 4),
    "F16": (1, 2),
    "Q8_0": (32, 34),
    "Q4_1": (32, 20),
    "Q4_0": (32, 18),
}
KEY_CHUNK = 16  # keys a vector holds; a page is a whole number of them
MAX_HEAD_DIM = 256

_MIN_HEAD_ROWS = 64  # kMinHeadRows of csrc/cpu/llama.h
_NO_ROWS = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class LlamaShape:
    """Shapes and constants. Rotary embedding is the half-split form at `inverse_frequencies` [head_dim / 2]."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_context_tokens: int
    rms_norm_eps: float
    inverse_frequencies: Float32Array
    rope_attention_factor: float = 1.0  # multiplies cosines and sines (YaRN, arXiv 2309.00071)

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "vocab_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.max_context_tokens < 1:
            raise ValueError(f"max_context_tokens is {self.max_context_tokens}; it must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % KEY_CHUNK or not 0 < self.head_dim <= MAX_HEAD_DIM:
            raise ValueError(
                f"head_dim is {self.head_dim}; the CPU kernels need a multiple of {KEY_CHUNK} up to {MAX_HEAD_DIM}"
            )
        if self.inverse_frequencies.shape != (self.head_dim // 2,):
            raise ValueError(
                f"inverse_frequencies has shape {self.inverse_frequencies.shape}; it must be ({self.head_dim // 2},)"
            )

    @staticmethod
    def default_frequencies(rope_theta: float, head_dim: int) -> Float32Array:
        """theta^(-2i / head_dim) (RoFormer, arXiv 2104.09864), unscaled."""
        exponents: Float32Array = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
        frequencies: Float32Array = (1.0 / np.power(np.float32(rope_theta), exponents)).astype(np.float32)
        return frequencies

    def matrix_shapes(self) -> dict[str, tuple[int, int]]:
        """Rows and columns of a layer's matrices by name."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "q_proj": (q, self.hidden_size),
            "k_proj": (kv, self.hidden_size),
            "v_proj": (kv, self.hidden_size),
            "o_proj": (self.hidden_size, q),
            "gate_proj": (self.intermediate_size, self.hidden_size),
            "up_proj": (self.intermediate_size, self.hidden_size),
            "down_proj": (self.hidden_size, self.intermediate_size),
        }


class LlamaStep:
    """A loaded model with its paged KV cache. Owns copies of the weights; the caller may drop its own.

    `activation="int8"` rounds activations to 8 bits a block of 32 where the weights are quantised and keeps K and V in
    half precision; `"float32"` computes in fp32 throughout. Both are row-invariant: a sequence's results are bit-equal
    whatever shares its steps and however its prefill is cut. Blocks are numbered from 1; 0 is the null block.
    """

    def __init__(
        self,
        shape: LlamaShape,
        weights: Mapping[str, QuantTensor | Float32Array],
        *,
        num_blocks: int,
        page_size: int,
        num_threads: int,
        activation: Activation,
        max_batch_tokens: int,
        max_num_seqs: int,
        cache_dir: Path,
        compiler: str | None = None,
        march: str = "native",
    ) -> None:
        """Compile if needed, allocate, copy the weights. Raises ValueError, KernelBuildError or MemoryError."""
        _check_limits(num_blocks, page_size, num_threads, activation, max_batch_tokens, max_num_seqs)
        placed = _place_weights(shape, weights)
        self.shape = shape
        self.page_size = page_size
        self.num_blocks = num_blocks
        self.max_batch_tokens = max_batch_tokens
        self.max_num_seqs = max_num_seqs
        self._lock = threading.Lock()
        self._handle: int | None = None
        self._library = native.load_library(build(cache_dir, compiler=compiler, march=march))
        config = native.Config(
            num_layers=shape.num_layers,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            vocab_size=shape.vocab_size,
            max_context_tokens=shape.max_context_tokens,
            num_blocks=num_blocks,
            page_size=page_size,
            num_threads=num_threads,
            max_batch_tokens=max_batch_tokens,
            max_num_seqs=max_num_seqs,
            int8_activations=activation == "int8",
            rms_norm_eps=shape.rms_norm_eps,
            rope_attention_factor=shape.rope_attention_factor,
        )
        frequencies = np.ascontiguousarray(shape.inverse_frequencies, dtype=np.float32)
        handle = self._library.dragoman_llama_create(ctypes.byref(config), frequencies.ctypes.data)
        if not handle:
            raise MemoryError(_no_memory(shape, num_blocks, page_size, activation))
        self._handle = handle
        try:
            for item in placed:
                self._upload(item)
        except BaseException:
            self.close()
            raise

    @property
    def instruction_set(self) -> str:
        """What the build uses: "avx512-vnni", "avx512", "avx2-vnni", "avx2" or "generic"."""
        return str(self._library.dragoman_simd_name().decode())

    def _upload(self, item: _Placed) -> None:
        if isinstance(item.value, QuantTensor):
            data = np.ascontiguousarray(item.value.data)
            code = self._library.dragoman_llama_set_matrix(
                self._handle,
                item.layer,
                item.index,
                native.DTYPE_CODES[item.value.dtype],
                *item.value.shape,
                data.ctypes.data,
            )
            if code == native.NO_MEMORY:
                raise MemoryError(
                    f"No memory for {item.name} ({item.value.data.nbytes} bytes); free some or use a smaller model."
                )
            return
        values = np.ascontiguousarray(item.value, dtype=np.float32)
        setter = self._library.dragoman_llama_set_bias if item.is_bias else self._library.dragoman_llama_set_vector
        setter(self._handle, item.layer, item.index, values.size, values.ctypes.data)

    def run(
        self,
        token_ids: Int32Array,
        positions: Int32Array,
        slot_mapping: Int32Array,
        query_starts: Int32Array,
        context_lens: Int32Array,
        block_tables: Int32Array,
        logit_seqs: Int32Array,
        hidden_seqs: Int32Array,
        hidden_rows: Int32Array | None = None,
    ) -> tuple[Float32Array, Float32Array]:
        """One step: writes K and V of the step's tokens, returns logits and final hidden states.

        Arrays are `StepBatch`'s: token_ids, positions, slot_mapping [num_tokens]; query_starts [num_seqs + 1];
        context_lens [num_seqs]; block_tables [num_seqs, max_num_blocks]; logit_seqs and hidden_seqs list sequences,
        hidden_rows query tokens. Returns float32 [num_logit_seqs, vocab_size] and [num_hidden_seqs + num_hidden_rows,
        hidden_size] (after the final norm) of each listed sequence's last query token, then of each row. Raises ValueError naming the array and index, before anything is written.
        """
        arrays = {
            "token_ids": _as_int32("token_ids", token_ids, 1),
            "positions": _as_int32("positions", positions, 1),
            "slot_mapping": _as_int32("slot_mapping", slot_mapping, 1),
            "query_starts": _as_int32("query_starts", query_starts, 1),
            "context_lens": _as_int32("context_lens", context_lens, 1),
            "block_tables": _as_int32("block_tables", block_tables, 2),
            "logit_seqs": _as_int32("logit_seqs", logit_seqs, 1),
            "hidden_seqs": _as_int32("hidden_seqs", hidden_seqs, 1),
            "hidden_rows": _as_int32("hidden_rows", _NO_ROWS if hidden_rows is None else hidden_rows, 1),
        }
        self._check_sizes(arrays)
        num_logits, num_hidden = len(arrays["logit_seqs"]), len(arrays["hidden_seqs"])
        num_rows = len(arrays["hidden_rows"])
        logits = np.empty((num_logits, self.shape.vocab_size), dtype=np.float32)
        hidden = np.empty((num_hidden + num_rows, self.shape.hidden_size), dtype=np.float32)
        batch = native.Batch(
            num_tokens=len(arrays["token_ids"]),
            num_seqs=len(arrays["context_lens"]),
            max_num_blocks=arrays["block_tables"].shape[1],
            num_logit_seqs=num_logits,
            num_hidden_seqs=num_hidden,
            num_hidden_rows=num_rows,
            **{name: array.ctypes.data for name, array in arrays.items()},
        )
        report = native.Report()
        with self._lock:
            if self._handle is None:
                raise ValueError("this LlamaStep is closed; make a new one")
            code = self._library.dragoman_llama_run(
                self._handle, ctypes.byref(batch), logits.ctypes.data, hidden.ctypes.data, ctypes.byref(report)
            )
        if code == native.NO_MEMORY:
            raise MemoryError("No memory for the step's bookkeeping; free some or lower max_batch_tokens.")
        if code:
            raise ValueError(native.refusal(report))
        return logits, hidden

    @property
    def max_num_head_rows(self) -> int:
        """Rows `head` takes at once."""
        return max(self.max_num_seqs, _MIN_HEAD_ROWS)

    def head(self, hidden: Float32Array) -> Float32Array:
        """Logits float32 [n, vocab_size] of hidden states [n, hidden_size] that `run` gave; n up to `max_num_head_rows`."""
        if hidden.ndim != 2 or hidden.shape[1] != self.shape.hidden_size or len(hidden) > self.max_num_head_rows:
            raise ValueError(
                f"hidden is of shape {hidden.shape}; at most {self.max_num_head_rows} rows of {self.shape.hidden_size} fit"
            )
        rows = np.ascontiguousarray(hidden, dtype=np.float32)
        logits = np.empty((len(rows), self.shape.vocab_size), dtype=np.float32)
        with self._lock:
            if self._handle is None:
                raise ValueError("this LlamaStep is closed; make a new one")
            self._library.dragoman_llama_head(self._handle, len(rows), rows.ctypes.data, logits.ctypes.data)
        return logits

    @property
    def block_bytes(self) -> int:
        """Bytes of K and V of all layers in one block."""
        with self._lock:
            if self._handle is None:
                raise ValueError("this LlamaStep is closed; make a new one")
            return int(self._library.dragoman_llama_block_bytes(self._handle))

    def read_blocks(self, blocks: Int32Array) -> npt.NDArray[np.uint8]:
        """Contents of blocks as the cache keeps them, [num_blocks, block_bytes]. Raises ValueError."""
        ids = self._checked_blocks(blocks)
        data = np.empty((len(ids), self.block_bytes), dtype=np.uint8)
        with self._lock:
            if self._handle is None:
                raise ValueError("this LlamaStep is closed; make a new one")
            self._library.dragoman_llama_read_blocks(self._handle, len(ids), ids.ctypes.data, data.ctypes.data)
        return data

    def write_blocks(self, blocks: Int32Array, data: npt.NDArray[np.uint8]) -> None:
        """Put contents of `read_blocks`, of this model, page size and activation, into blocks. Raises ValueError."""
        ids = self._checked_blocks(blocks)
        values = np.ascontiguousarray(data, dtype=np.uint8)
        if values.shape != (len(ids), self.block_bytes):
            raise ValueError(f"data has shape {values.shape}; it must be ({len(ids)}, {self.block_bytes})")
        with self._lock:
            if self._handle is None:
                raise ValueError("this LlamaStep is closed; make a new one")
            self._library.dragoman_llama_write_blocks(self._handle, len(ids), ids.ctypes.data, values.ctypes.data)

    def _checked_blocks(self, blocks: Int32Array) -> Int32Array:
        ids = _as_int32("blocks", blocks, 1)
        bad = ids[(ids < 1) | (ids >= self.num_blocks)]
        if len(bad):
            raise ValueError(f"blocks holds {bad[0]}; a block lies in [1, {self.num_blocks}) (0 is the null block)")
        return ids

    def _check_sizes(self, arrays: Mapping[str, Int32Array]) -> None:
        num_tokens, num_seqs = len(arrays["token_ids"]), len(arrays["context_lens"])
        if not 1 <= num_tokens <= self.max_batch_tokens:
            raise ValueError(
                f"token_ids has {num_tokens} tokens; a step takes 1 to max_batch_tokens ({self.max_batch_tokens})"
            )
        if not 1 <= num_seqs <= self.max_num_seqs:
            raise ValueError(
                f"context_lens has {num_seqs} sequences; a step takes 1 to max_num_seqs ({self.max_num_seqs})"
            )
        expected = {
            "positions": num_tokens,
            "slot_mapping": num_tokens,
            "query_starts": num_seqs + 1,
            "block_tables": num_seqs,
        }
        for name, count in expected.items():
            if len(arrays[name]) != count:
                raise ValueError(
                    f"{name} has {len(arrays[name])} rows; {num_tokens} tokens of {num_seqs} sequences need {count}"
                )
        for name in ("logit_seqs", "hidden_seqs"):
            if len(arrays[name]) > self.max_num_seqs:
                raise ValueError(f"{name} has {len(arrays[name])} entries; at most max_num_seqs ({self.max_num_seqs})")
        if len(arrays["hidden_rows"]) > num_tokens:
            raise ValueError(f"hidden_rows has {len(arrays['hidden_rows'])} entries; the step has {num_tokens} tokens")

    def close(self) -> None:
        """Free weights, cache and threads. Waits for a running step; safe to call twice."""
        with self._lock:
            handle, self._handle = self._handle, None
        if handle is not None:
            self._library.dragoman_llama_destroy(handle)

    def __enter__(self) -> LlamaStep:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class _Placed:
    name: str
    layer: int  # -1 outside the layers
    index: int
    value: QuantTensor | Float32Array
    is_bias: bool = False


def _check_limits(
    num_blocks: int, page_size: int, num_threads: int, activation: str, max_batch_tokens: int, max_num_seqs: int
) -> None:
    if activation not in ("int8", "float32"):
        raise ValueError(f"activation is {activation!r}; use 'int8' or 'float32'")
    if page_size < KEY_CHUNK or page_size % KEY_CHUNK:
        raise ValueError(f"page_size is {page_size}; the CPU kernels need a multiple of {KEY_CHUNK} tokens")
    limits = {
        "num_blocks": (num_blocks, 2),  # the null block and one to use
        "num_threads": (num_threads, 1),
        "max_batch_tokens": (max_batch_tokens, 1),
        "max_num_seqs": (max_num_seqs, 1),
    }
    for name, (value, least) in limits.items():
        if value < least:
            raise ValueError(f"{name} is {value}; it must be at least {least}")
    if num_blocks * page_size > np.iinfo(np.int32).max:
        raise ValueError(f"num_blocks {num_blocks} x page_size {page_size} does not fit 32-bit slot numbers")


def _check_matrix(name: str, tensor: QuantTensor) -> None:
    if tensor.dtype not in BLOCKS:
        raise ValueError(f"weight {name} is {tensor.dtype}, which has no CPU kernel; supported: {', '.join(BLOCKS)}")
    values, block_bytes = BLOCKS[tensor.dtype]
    rows, cols = tensor.shape
    if cols % values:
        raise ValueError(f"weight {name} is {tensor.dtype} with {cols} columns; its blocks need a multiple of {values}")
    expected = (rows, cols // values * block_bytes)
    if tensor.data.dtype != np.uint8 or tensor.data.shape != expected:
        found = f"{tensor.data.dtype} {tensor.data.shape}"
        raise ValueError(f"weight {name}: {tensor.dtype} data of {rows} x {cols} is uint8 {expected}, not {found}")


def _place_weights(shape: LlamaShape, weights: Mapping[str, QuantTensor | Float32Array]) -> list[_Placed]:
    """Every weight with its place, shapes checked. Raises ValueError on a missing, unknown or misshapen one."""
    placed: list[_Placed] = []
    remaining = dict(weights)

    def take(
        name: str, layer: int, index: int, expected: tuple[int, ...], *, optional: bool = False, bias: bool = False
    ) -> None:
        value = remaining.pop(name, None)
        if value is None:
            if optional:
                return
            raise ValueError(f"weight {name} is missing")
        if tuple(value.shape) != expected:
            raise ValueError(f"weight {name} has shape {tuple(value.shape)}; the model needs {expected}")
        if len(expected) == 2:
            value = value if isinstance(value, QuantTensor) else QuantTensor.from_float32(value)
            _check_matrix(name, value)
        elif len(expected) == 1 and isinstance(value, QuantTensor):
            raise ValueError(f"weight {name} must be a float array of {expected[0]} values, not a {value.dtype} matrix")
        placed.append(_Placed(name, layer, index, value, bias))

    table = (shape.vocab_size, shape.hidden_size)
    take("embed_tokens", -1, 0, table)
    take("lm_head", -1, 1, table, optional=True)
    take("norm", -1, 0, (shape.hidden_size,))
    for layer in range(shape.num_layers):
        for index, (name, expected) in enumerate(shape.matrix_shapes().items()):
            take(f"layers.{layer}.{name}", layer, index, expected)
            take(f"layers.{layer}.{name}.bias", layer, index, expected[:1], optional=True, bias=True)
        for index, name in enumerate(native.LAYER_VECTORS):
            size = shape.hidden_size if index < 2 else shape.head_dim
            take(f"layers.{layer}.{name}", layer, index, (size,), optional=index >= 2)
    if remaining:
        raise ValueError(f"weight {min(remaining)} is not one this model has ({len(remaining)} unknown)")
    return placed


def _as_int32(name: str, value: Any, ndim: int) -> Int32Array:
    array = np.asarray(value)
    if array.ndim != ndim or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise ValueError(f"{name} must be an int32 array of {ndim} dimension(s), not {array.dtype} {array.shape}")
    if array.dtype != np.int32 and array.size:
        limits = np.iinfo(np.int32)
        if array.min() < limits.min or array.max() > limits.max:
            raise ValueError(f"{name} holds {array.max()}, which does not fit 32 bits")
    return np.ascontiguousarray(array, dtype=np.int32)


def _no_memory(shape: LlamaShape, num_blocks: int, page_size: int, activation: str) -> str:
    value_bytes = 2 if activation == "int8" else 4
    cache = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * num_blocks * page_size * value_bytes
    return (
        f"No memory or threads for the model: its KV cache of {num_blocks} blocks of {page_size} tokens takes {cache} bytes. "
        "Lower num_blocks, max_batch_tokens or num_threads."
    )
