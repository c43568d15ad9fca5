"""The backend for Intel cards: torch's XPU build and our Triton kernels. Never compiled for one or run on one."""

from __future__ import annotations

from dragoman_agent.device.hip import HipDevice


class XpuDevice(HipDevice):
    """Implements Device."""

    kind = "xpu"
    library = "oneDNN"
