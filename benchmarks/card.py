"""The card of a GPU machine, what a record says of it and of the programs there, and the raw results that `record_gpu` records.

Neither torch nor a context is needed.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path

import pynvml
from benchmarks.record import cpu_name

from dragoman_agent.pal.attributes import take_inventory
from dragoman_agent.pal.found import FoundDevice

_PACKAGES = ("torch", "triton")

Result = dict[str, object]


def usable_gpu() -> FoundDevice:
    """The first one. Exits with the reason where there is none."""
    inventory = take_inventory()
    found = [device for device in inventory.devices if device.facts.kind == "cuda"]
    usable = next((device for device in found if not device.problem), None)
    if usable is None:
        reasons = [inventory.cuda_problem, *(device.problem for device in found)]
        raise SystemExit(f"no usable GPU: {'; '.join(filter(None, reasons))}; this benchmark needs one")
    return usable


def environment(index: int | None) -> dict[str, object]:
    """Driver, clocks under load and versions, for the record. None: no card was measured, and no record is made of it."""
    versions = {"python": platform.python_version()}
    if index is None:
        return {"device": cpu_name(), "driver": "", "clocks_mhz": [], "versions": versions}
    pynvml.nvmlInit()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    physical = int(visible[index]) if len(visible) > index and visible[index].isdigit() else index
    handle = pynvml.nvmlDeviceGetHandleByIndex(physical)
    clocks = [pynvml.nvmlDeviceGetClockInfo(handle, kind) for kind in (pynvml.NVML_CLOCK_SM, pynvml.NVML_CLOCK_MEM)]
    versions |= {name: importlib.metadata.version(name) for name in _PACKAGES}
    driver, name = pynvml.nvmlSystemGetDriverVersion(), pynvml.nvmlDeviceGetName(handle)
    return {"device": name, "driver": driver, "clocks_mhz": clocks, "versions": versions}


def result(bench: str, case: str, metric: str, unit: str, samples: Sequence[float], **more: object) -> Result:
    """One raw result. `more`: `predicted`, `note`, `peer`, and `value`, "min" or "max", where the record's is not the median."""
    return {
        "bench": bench, "case": case, "metric": metric, "unit": unit, "samples": [float(one) for one in samples], **more,
    }  # fmt: skip


def keep(path: Path | None, model: str, index: int | None, results: Sequence[Result], **more: object) -> None:
    """What was measured so far on card `index`, for `benchmarks.record_gpu`: a run that is ended has it. No `path`, no file.

    `model` stands before each case, "" where cases are whole names; `command` among `more` is what the records name.
    """
    if path is not None:
        body = {"model": model, **more, "results": list(results), **environment(index)}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(body, indent=1, default=str) + "\n")
