"""The card of a GPU machine, and what a record says of it and of the programs there. Neither torch nor a context is needed."""

from __future__ import annotations

import importlib.metadata
import os
import platform

import pynvml

from dragoman_agent.pal.attributes import take_inventory
from dragoman_agent.pal.found import FoundDevice

_PACKAGES = ("torch", "triton")


def usable_gpu() -> FoundDevice:
    """The first one. Exits with the reason where there is none."""
    inventory = take_inventory()
    found = [device for device in inventory.devices if device.facts.kind == "cuda"]
    usable = next((device for device in found if not device.problem), None)
    if usable is None:
        reasons = [inventory.cuda_problem, *(device.problem for device in found)]
        raise SystemExit(f"no usable GPU: {'; '.join(filter(None, reasons))}; this benchmark needs one")
    return usable


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
