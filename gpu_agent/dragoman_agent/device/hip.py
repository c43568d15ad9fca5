"""The backend for AMD cards: torch's ROCm build and our Triton kernels. Compiled for gfx942 and gfx1100, never run on one."""

from __future__ import annotations

from dragoman_agent.device.base import ProgressFn
from dragoman_agent.device.cuda import CudaDevice
from dragoman_agent.device.torch_weights import load_through, torch_sinks
from dragoman_agent.model.llama import LlamaWeights
from dragoman_agent.model.source import ModelSource


class HipDevice(CudaDevice):
    """Implements Device. What ROCm has no part in, such as the driver's own copies, is left to torch."""

    kind = "hip"
    library = "hipBLASLt"

    def _read_weights(self, model: ModelSource, progress: ProgressFn) -> LlamaWeights:
        return load_through(model, self._device, progress, torch_sinks(self._runtime), dtype=self.dtype)
