"""Facts of a real card: at least 30 values a device, under 50 ms a card once the driver is up, no context, equal to torch's.

python tests/gpu/check_facts.py     prints a line a check, JSON to $OUT/facts.json; exit code 1 when a check fails
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from dragoman_agent.pal.attributes import take_inventory
from dragoman_agent.pal.cuda_facts import read_cuda
from dragoman_agent.pal.found import FoundDevice
from dragoman_agent.pal.host import this_host
from dragoman_agent.pal.matrix import capability_matrix
from dragoman_agent.pal.nvml_facts import open_nvml

MAX_SECONDS = 0.05
_TORCH = """
import json, torch
p = torch.cuda.get_device_properties(0)
free, total = torch.cuda.mem_get_info(0)
print(json.dumps({"name": p.name, "multiprocessors": p.multi_processor_count, "total": p.total_memory,
 "l2": p.L2_cache_size, "capability": f"{p.major}.{p.minor}", "free": free}))
"""


def main() -> int:
    """Look, compare, print."""
    inventory = take_inventory()  # libraries are loaded and the driver is up after it
    seconds = _timed()
    devices = [device for device in inventory.devices if device.facts.kind == "cuda" and device.usable]
    checks = (
        {"a CUDA device is found": True, **_checks(devices, seconds)} if devices else {"a CUDA device is found": False}
    )
    report = {
        "checks": checks,
        "seconds": seconds,
        "num_values": [len(device.values) for device in devices],
        "matrix": capability_matrix(inventory, [], from_cache=False),
    }
    if "OUT" in os.environ:
        (Path(os.environ["OUT"]) / "facts.json").write_text(json.dumps(report, indent=1))
    for name, good in checks.items():
        print(f"{'ok' if good else 'OFF'} {name}")
    print(f"values {report['num_values']}, seconds {seconds}")
    return 0 if all(checks.values()) else 1


def _timed() -> dict[str, float]:
    """Seconds of each part a second time, for all devices together."""
    host = this_host()
    start = time.perf_counter()
    readings, _ = read_cuda(host)
    driver = time.perf_counter() - start
    start = time.perf_counter()
    with open_nvml(host) as nvml:
        for reading in readings:
            nvml.read(f"GPU-{reading.uuid_body}", reading.address)
    counters = time.perf_counter() - start
    start = time.perf_counter()
    take_inventory(host)
    return {"driver": driver, "nvml": counters, "inventory": time.perf_counter() - start}


def _checks(devices: list[FoundDevice], seconds: dict[str, float]) -> dict[str, bool]:
    first = devices[0]
    numbers: dict[str, Any] = {name: value.value for name, value in first.values.items()}
    torch = json.loads(subprocess.run([sys.executable, "-c", _TORCH], capture_output=True, check=True).stdout)
    return {
        "at least 30 attributes": all(len(device.values) >= 30 for device in devices),
        "under 50 ms a card": max(seconds["driver"], seconds["nvml"]) / len(devices) < MAX_SECONDS,
        "no context": _no_context(),
        "multiprocessors as torch": numbers["compute.multiprocessors"] == torch["multiprocessors"],
        "memory as torch": numbers["memory.total"] == torch["total"],
        "L2 as torch": numbers.get("memory.l2_size") == torch["l2"],
        "capability as torch": numbers["compute.capability"] == torch["capability"],
        "free memory near torch's": abs(numbers["memory.free"] - torch["free"]) < 2 << 30,
        "fingerprint is stable": first.fingerprint == _again(first),
    }


def _no_context() -> bool:
    """Whether this process still has no context, although it looked at every device three times."""
    from cuda.bindings import driver

    status, _, active = driver.cuDevicePrimaryCtxGetState(0)
    return bool(status == driver.CUresult.CUDA_SUCCESS and active == 0)


def _again(device: FoundDevice) -> str:
    return next(other.fingerprint for other in take_inventory().devices if other.facts.uuid == device.facts.uuid)


if __name__ == "__main__":
    sys.exit(main())
