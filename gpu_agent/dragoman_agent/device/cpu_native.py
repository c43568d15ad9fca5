"""The compiled roads: builds a LlamaStep from a model's stored tensors."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dragoman_agent.device.base import (
    BlockFormat,
    Float32Array,
    Int32Array,
    LoadProgress,
    ProgressFn,
    StepBatch,
    UInt8Array,
)
from dragoman_agent.device.cpu_road import NATIVE_INT8
from dragoman_agent.model.config import ModelConfig
from dragoman_agent.model.quant import dequantise
from dragoman_agent.model.rope import rope_frequencies
from dragoman_agent.model.source import ModelSource
from dragoman_agent.pal.plan import Plan
from dragoman_kernels.cpu.llama import BLOCKS, LlamaShape, LlamaStep, QuantTensor


class NativeRoad:
    """One compiled step a call. Weights stay as stored; a dtype without a kernel is widened to float32, exactly."""

    def __init__(self, model: ModelSource, plan: Plan, cache_dir: Path, progress: ProgressFn) -> None:
        """Raises KernelBuildError, MemoryError or ValueError."""
        self._step = LlamaStep(
            llama_shape(model.config, plan.max_context_tokens),
            read_weights(model, progress),
            num_blocks=plan.num_blocks,
            page_size=plan.page_size,
            num_threads=plan.num_threads,
            activation="int8" if plan.road == NATIVE_INT8 else "float32",
            max_batch_tokens=plan.max_batch_tokens,
            max_num_seqs=plan.max_num_seqs,
            cache_dir=cache_dir,
        )
        self._block_format = BlockFormat(
            "float16" if plan.road == NATIVE_INT8 else "float32",
            "layer, k[head, dim, token] v[head, token, dim]",
            self._step.block_bytes,
        )
        self.max_num_head_rows = self._step.max_num_head_rows
        self.detail = f"compiled for {self._step.instruction_set}"

    def run(self, batch: StepBatch) -> tuple[Float32Array, Float32Array]:
        """Logits [num_samples, vocab_size] and final hidden states [num_pooled + num_scores, hidden_size]. Raises ValueError."""
        return self._step.run(
            batch.token_ids,
            batch.positions,
            batch.slot_mapping,
            batch.query_starts,
            batch.context_lens,
            batch.block_tables,
            batch.sample_seqs,
            batch.pool_seqs,
            batch.score_rows,
        )

    def head(self, hidden: Float32Array) -> Float32Array:
        """Logits [n, vocab_size] of at most `max_num_head_rows` hidden states."""
        return self._step.head(hidden)

    @property
    def block_format(self) -> BlockFormat:
        """See BlockDevice."""
        return self._block_format

    def read_blocks(self, blocks: Int32Array) -> UInt8Array:
        """See BlockDevice. Raises ValueError."""
        return self._step.read_blocks(blocks)

    def write_blocks(self, blocks: Int32Array, data: UInt8Array) -> None:
        """See BlockDevice. Raises ValueError."""
        self._step.write_blocks(blocks, data)

    def close(self) -> None:
        """Free weights and cache."""
        self._step.close()


def llama_shape(config: ModelConfig, max_context_tokens: int) -> LlamaShape:
    """What the compiled step needs to know of a model."""
    frequencies, attention_factor = rope_frequencies(config)
    return LlamaShape(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        max_context_tokens=max_context_tokens,
        rms_norm_eps=config.rms_norm_eps,
        inverse_frequencies=frequencies,
        rope_attention_factor=attention_factor,
    )


def read_weights(model: ModelSource, progress: ProgressFn) -> dict[str, QuantTensor | Float32Array]:
    """The model's tensors by canonical name: matrices as stored where there is a kernel for that, else in float32."""
    weights: dict[str, QuantTensor | Float32Array] = {}
    done = 0
    for name in model.tensor_names():
        tensor = model.tensor(name)
        is_vector = name.endswith(("norm", ".bias"))
        if is_vector:
            weights[name] = dequantise(tensor).reshape(-1)
        elif tensor.dtype in BLOCKS:
            weights[name] = QuantTensor(tensor.dtype, tensor.shape, tensor.data)
        else:
            weights[name] = QuantTensor.from_float32(dequantise(tensor))
        np.max(tensor.data.reshape(-1)[::4096])  # brings the mapped pages in, which is what takes the time
        done += tensor.data.nbytes
        progress(LoadProgress("weights", done, max(model.total_bytes, done), "bytes"))
    return weights
