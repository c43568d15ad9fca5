"""Devices: where steps run. `open_device` imports only the one asked for."""

from __future__ import annotations

from pathlib import Path

from dragoman_agent.device.base import Device, DeviceError

DEVICE_KINDS = ("cpu", "cuda", "hip", "xpu", "null")


def open_device(
    kind: str, *, index: int = 0, cache_dir: Path | None = None, null_oracle: str = "hash", null_speed: float = 0.0
) -> Device:
    """The device of `kind`, with no model loaded. Raises DeviceError for a kind this version does not have.

    `index` is among devices of the kind; `cache_dir` holds compiled kernels; `null_oracle` and `null_speed` concern the null device only.
    """
    if kind == "null":
        from dragoman_agent.device.null import NullDevice

        return NullDevice(null_oracle, null_speed)
    if kind == "cpu":
        from dragoman_agent.device.cpu import CpuDevice

        return CpuDevice(cache_dir)
    if kind == "cuda":
        from dragoman_agent.device.cuda import CudaDevice

        return CudaDevice(index)
    if kind == "hip":
        from dragoman_agent.device.hip import HipDevice

        return HipDevice(index)
    if kind == "xpu":
        from dragoman_agent.device.xpu import XpuDevice

        return XpuDevice(index)
    raise DeviceError(f"device {kind!r} is not one of {', '.join(DEVICE_KINDS)}; choose one of these")


__all__ = ["DEVICE_KINDS", "Device", "DeviceError", "open_device"]
