"""What a record says of the card and the programs of a GPU machine. Needs NVML alone."""

from __future__ import annotations

import importlib.metadata
import os
import platform

import pynvml

_PACKAGES = ("torch", "triton")


def environment(index: int) -> dict[str, object]:
    """Driver, clocks under load and versions, for the record."""
    pynvml.nvmlInit()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    physical = int(visible[index]) if len(visible) > index and visible[index].isdigit() else index
    handle = pynvml.nvmlDeviceGetHandleByIndex(physical)
    clocks = [pynvml.nvmlDeviceGetClockInfo(handle, kind) for kind in (pynvml.NVML_CLOCK_SM, pynvml.NVML_CLOCK_MEM)]
    versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
    versions["python"] = platform.python_version()
    driver, name = pynvml.nvmlSystemGetDriverVersion(), pynvml.nvmlDeviceGetName(handle)
    return {"device": name, "driver": driver, "clocks_mhz": clocks, "versions": versions}
