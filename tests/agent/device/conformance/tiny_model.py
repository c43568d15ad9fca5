"""A Llama of a few thousand weights from a seed, which every backend loads; no file, no transformers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dragoman_agent.model.config import ModelConfig
from dragoman_agent.model.layout import TensorLayout
from dragoman_agent.model.registry import needed_tensors
from dragoman_kernels.tensor import QuantTensor

CONFIG = ModelConfig(
    name="tiny",
    architecture="llama",
    num_layers=1,
    hidden_size=64,
    intermediate_size=96,
    num_heads=2,
    num_kv_heads=1,
    head_dim=32,
    vocab_size=96,
    max_context_tokens=256,
    rope_theta=10000.0,
    rms_norm_eps=1e-5,
    tied_embeddings=False,
)
POISONED = 77  # token whose embedding is NaN in a poisoned model


class TinyModel:
    """What a device reads of a ModelSource. Weights are BF16 numbers, so that every backend holds the same ones."""

    def __init__(self, *, poisoned: bool = False, flat: bool = False, without: str = "") -> None:
        """`poisoned`: one token's embedding is NaN. `flat`: every logit is 0. `without`: a tensor that is missing."""
        self.config, self.name = CONFIG, CONFIG.name
        rng = np.random.default_rng(7)
        self.values: dict[str, npt.NDArray[np.float32]] = {}
        for name, shape in needed_tensors(CONFIG).items():
            values = rng.normal(0, 0.15, shape) if len(shape) == 2 else rng.uniform(0.7, 1.3, shape)
            self.values[name] = _bfloat16(values.astype(np.float32))
        if poisoned:
            self.values["embed_tokens"][POISONED] = np.nan
        if flat:
            self.values["lm_head"][:] = 0
        self.values.pop(without, None)

    @property
    def total_bytes(self) -> int:
        return sum(2 * values.size for values in self.values.values())

    def tensor_names(self) -> list[str]:
        return list(self.values)

    def file_order(self) -> list[str]:
        return list(self.values)

    def stored_name(self, name: str) -> str:
        """The same: there is no file."""
        return name

    def extent(self, name: str) -> None:
        """Nowhere: weights are made."""

    def layout(self, name: str) -> TensorLayout:
        values = np.atleast_2d(self.values[name])
        return TensorLayout("BF16", (values.shape[0], values.shape[1]), 2 * values.size)

    def tensor(self, name: str) -> QuantTensor:
        values = np.atleast_2d(self.values[name])
        bits = np.ascontiguousarray(values).view(np.uint32) >> 16
        data = bits.astype(np.uint16).view(np.uint8).reshape(len(values), -1)
        return QuantTensor("BF16", (values.shape[0], values.shape[1]), data)


def _bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Cut to what bfloat16 holds."""
    return (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
