"""Batches and logits for tests of samplers."""

from typing import Any

import numpy as np
import torch

from dragoman_agent.device.base import SamplingBatch


def make_batch(num: int, **values: Any) -> SamplingBatch:
    """A batch of `num` rows; scalars are repeated."""

    def column(name: str, default: float, dtype: type) -> np.ndarray:
        return np.broadcast_to(np.asarray(values.pop(name, default), dtype), (num,)).copy()

    return SamplingBatch(
        temperatures=column("temperature", 1.0, np.float32),
        top_ks=column("top_k", 0, np.int32),
        top_ps=column("top_p", 1.0, np.float32),
        min_ps=column("min_p", 0.0, np.float32),
        seeds=column("seed", 1234, np.uint64),
        choices=column("choice", 0, np.int32),
        cursors=column("cursor", 0, np.int32),
        num_logprobs=column("num_logprobs", -1, np.int32),
        **values,
    )


def random_logits(rows: int, vocab_size: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def packed(may: np.ndarray) -> np.ndarray:
    """Rows of booleans as int32 words."""
    padded = np.zeros((len(may), -(-may.shape[1] // 32) * 32), bool)
    padded[:, : may.shape[1]] = may
    return np.packbits(padded, axis=1, bitorder="little").view("<i4")
