"""The torch road: the reference model in float32 on the CPU, for machines without a compiler and for odd shapes."""

from __future__ import annotations

import torch

from dragoman_agent.device import torch_blocks
from dragoman_agent.device.base import (
    BlockFormat,
    Float32Array,
    Int32Array,
    LoadProgress,
    ProgressFn,
    StepBatch,
    UInt8Array,
)
from dragoman_agent.device.checks import check_batch
from dragoman_agent.model.layers import PagedCache, TorchOps, step_tensors
from dragoman_agent.model.llama import LlamaWeights, assemble, forward, logits
from dragoman_agent.model.quant import dequantise
from dragoman_agent.model.rope import rope_frequencies
from dragoman_agent.model.source import ModelSource
from dragoman_agent.pal.plan import Plan
from dragoman_kernels.tensor import QuantTensor


class TorchRoad:
    """Weights dequantised to float32, float32 K and V."""

    detail = "torch operations"
    dtype = torch.float32  # of activations, K and V
    max_num_head_rows = 64

    def __init__(self, model: ModelSource, plan: Plan, progress: ProgressFn) -> None:
        """Raises ValueError on an incomplete model, MemoryError or RuntimeError when memory is short."""
        torch.set_num_threads(plan.num_threads)
        config = self._config = model.config
        self._plan = plan
        self._ops = self._make_ops()
        self._weights = self._read_weights(model, progress)
        size = (config.num_layers, plan.num_blocks, config.num_kv_heads, plan.page_size, config.head_dim)
        self._cache = PagedCache(torch.zeros(size, dtype=self.dtype), torch.zeros(size, dtype=self.dtype))
        frequencies, self._attention_factor = rope_frequencies(config)
        self._frequencies = torch.from_numpy(frequencies)

    def _make_ops(self) -> TorchOps:
        return TorchOps()

    def _read_weights(self, model: ModelSource, progress: ProgressFn) -> LlamaWeights:
        """The weights, a tensor at a time."""
        names = frozenset(model.tensor_names())
        done = 0

        def tensor(name: str) -> torch.Tensor | None:
            nonlocal done
            if name not in names:
                return None
            stored = model.tensor(name)
            values = self._values(name, stored, model)
            done += stored.data.nbytes
            progress(LoadProgress("weights", done, max(model.total_bytes, done), "bytes"))
            return values.reshape(-1) if name.endswith(("norm", ".bias")) else values

        return assemble(model.config, tensor)

    def _values(self, name: str, stored: QuantTensor, model: ModelSource) -> torch.Tensor:
        return torch.from_numpy(dequantise(stored))

    def run(self, batch: StepBatch) -> tuple[Float32Array, Float32Array]:
        """Logits [num_samples, vocab_size] and final hidden states [num_pooled + num_scores, hidden_size]. Raises ValueError."""
        check_batch(batch, self._config, self._plan)
        with torch.inference_mode():
            step = step_tensors(
                batch,
                page_size=self._plan.page_size,
                frequencies=self._frequencies,
                attention_factor=self._attention_factor,
                sliding_window=self._config.sliding_window,
            )
            hidden = forward(self._config, self._weights, self._cache, step, self._ops)
            num_samples = len(batch.sample_seqs)
            scores = logits(self._weights, hidden[:num_samples], self._ops)
            return scores.float().numpy(), hidden[num_samples:].float().numpy()

    def head(self, hidden: Float32Array) -> Float32Array:
        """Logits [n, vocab_size] of at most `max_num_head_rows` hidden states."""
        with torch.inference_mode():
            rows = torch.from_numpy(hidden).to(self.dtype)
            values: Float32Array = logits(self._weights, rows, self._ops).float().numpy()
            return values

    @property
    def block_format(self) -> BlockFormat:
        """See BlockDevice."""
        return torch_blocks.block_format(self._cache)

    def read_blocks(self, blocks: Int32Array) -> UInt8Array:
        """See BlockDevice."""
        with torch.inference_mode():
            return torch_blocks.read_blocks(self._cache, blocks)

    def write_blocks(self, blocks: Int32Array, data: UInt8Array) -> None:
        """See BlockDevice. Raises ValueError."""
        with torch.inference_mode():
            torch_blocks.write_blocks(self._cache, blocks, data)

    def close(self) -> None:
        """Nothing to stop: memory goes with the object."""
