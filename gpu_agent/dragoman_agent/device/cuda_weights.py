"""Weights into a GPU's memory in bfloat16."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dragoman_agent.device.base import LoadProgress, ProgressFn
from dragoman_agent.model.llama import LlamaWeights, assemble
from dragoman_agent.model.quant import dequantise
from dragoman_agent.model.source import ModelSource

_TORCH_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def load_weights(model: ModelSource, device: torch.device, progress: ProgressFn) -> LlamaWeights:
    """The model's weights on `device`. Raises ValueError naming a missing tensor, ModelFileError for a broken file."""
    names = frozenset(model.tensor_names())
    total = max(model.total_bytes, 1)
    done = 0

    def tensor(name: str) -> Tensor | None:
        nonlocal done
        if name not in names:
            return None
        value, size = _stored(model, name, device)
        done += size
        progress(LoadProgress("weights", min(done, total), total, "bytes"))
        return value.reshape(-1) if name.endswith(("norm", ".bias")) else value

    return assemble(model.config, tensor)


def _stored(model: ModelSource, name: str, device: torch.device) -> tuple[Tensor, int]:
    stored = model.tensor(name)
    dtype = _TORCH_DTYPES.get(stored.dtype)
    if dtype is None:
        return torch.from_numpy(dequantise(stored)).to(device).to(torch.bfloat16), stored.data.nbytes
    raw = torch.from_numpy(np.ascontiguousarray(stored.data)).to(device)
    return raw.view(dtype).view(stored.shape).to(torch.bfloat16), stored.data.nbytes
