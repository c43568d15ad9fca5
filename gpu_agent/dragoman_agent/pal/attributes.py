"""Facts of every device of the host, from the CUDA driver, NVML and the operating system. No allocation, no context."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from dragoman_agent.pal.profile import DeviceFacts, Value, fingerprint


@dataclass(frozen=True, slots=True)
class FoundDevice:
    """A device that was looked at. `problem` is empty when nothing speaks against it."""

    facts: DeviceFacts
    values: dict[str, Value] = field(default_factory=dict)
    fingerprint: str = ""
    integrated: bool = False
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Inventory:
    """All devices, and what the driver said where it could not be asked."""

    devices: tuple[FoundDevice, ...]
    cuda_problem: str = ""


def take_inventory() -> Inventory:
    """Look at every device; never raises because one of them is broken."""
    cuda, problem = _cuda_devices()
    return Inventory((*cuda, cpu_device()), problem)


def cpu_device() -> FoundDevice:
    """The CPU backend's device: the cores and memory this process may use."""
    memory = psutil.virtual_memory()
    cores = usable_cores()
    limit = _cgroup_memory_limit()
    total = min(memory.total, limit) if limit else memory.total
    flags = _cpu_flags()
    isa = next((name for name in ("avx512_vnni", "avx512f", "avx2", "asimd") if name in flags), "scalar")
    name = _cpu_name()
    values = {
        "compute.cores": Value(cores, "", "reported"),
        "compute.instruction_set": Value(isa, "", "reported"),
        "memory.total": Value(total, "bytes", "reported"),
        "memory.free": Value(min(memory.available, total), "bytes", "reported"),
    }
    frequency = _max_frequency()
    if frequency:
        values["compute.max_clock"] = Value(frequency, "Hz", "reported")
    for level, size in _cache_sizes().items():
        values[f"memory.{level}_size"] = Value(size, "bytes", "reported")
    machine = platform.machine()
    facts = DeviceFacts("cpu", 0, name, f"{machine}-{isa}", total, _machine_id())
    return FoundDevice(facts, values, fingerprint([facts.uuid, name, isa, str(cores), platform.release()]))


def usable_cores() -> int:
    """Cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cuda_devices() -> tuple[list[FoundDevice], str]:
    """CUDA devices through the driver API, or the driver's own words why there are none."""
    try:
        from cuda.bindings import driver
    except ImportError:
        return [], "the cuda-bindings package is not installed"
    try:
        (status,) = driver.cuInit(0)
    except RuntimeError:  # the binding found no driver library
        return [], "no NVIDIA driver on this machine (libcuda was not found)"
    if status != driver.CUresult.CUDA_SUCCESS:
        return [], _driver_problem(driver, status)
    status, count = driver.cuDeviceGetCount()
    if status != driver.CUresult.CUDA_SUCCESS:
        return [], _driver_problem(driver, status)
    return [_cuda_device(driver, index) for index in range(count)], ""


def _cuda_device(driver: Any, index: int) -> FoundDevice:
    attribute = driver.CUdevice_attribute

    def get(name: str) -> int:
        status, value = driver.cuDeviceGetAttribute(getattr(attribute, "CU_DEVICE_ATTRIBUTE_" + name), device)
        return int(value) if status == driver.CUresult.CUDA_SUCCESS else 0

    _, device = driver.cuDeviceGet(index)
    _, raw_name = driver.cuDeviceGetName(128, device)
    _, total = driver.cuDeviceTotalMem(device)
    _, uuid = driver.cuDeviceGetUuid(device)
    _, version = driver.cuDriverGetVersion()
    name = raw_name.split(b"\0")[0].decode(errors="replace")
    major, minor = get("COMPUTE_CAPABILITY_MAJOR"), get("COMPUTE_CAPABILITY_MINOR")
    identity = bytes(uuid.bytes).hex()
    bus_id = f"{get('PCI_DOMAIN_ID'):08x}:{get('PCI_BUS_ID'):02x}:{get('PCI_DEVICE_ID'):02x}.0"
    values = {
        "compute.capability": Value(f"{major}.{minor}", "", "reported"),
        "compute.multiprocessors": Value(get("MULTIPROCESSOR_COUNT"), "", "reported"),
        "compute.max_clock": Value(get("CLOCK_RATE") * 1e3, "Hz", "reported"),
        "memory.total": Value(int(total), "bytes", "reported"),
        "memory.l2_size": Value(get("L2_CACHE_SIZE"), "bytes", "reported"),
        "memory.shared_per_block": Value(get("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"), "bytes", "reported"),
        "driver.version": Value(f"{version // 1000}.{version % 1000 // 10}", "", "reported"),
    }
    free = _nvml_free_memory(bus_id)
    if free is not None:
        values["memory.free"] = Value(free, "bytes", "reported")
    facts = DeviceFacts("cuda", index, name, f"sm_{major}{minor}", int(total), identity)
    print_parts = [identity, str(version), str(get("CLOCK_RATE")), str(get("MEMORY_CLOCK_RATE"))]
    return FoundDevice(facts, values, fingerprint(print_parts), integrated=bool(get("INTEGRATED")))


def _nvml_free_memory(bus_id: str) -> int | None:
    """Free bytes as NVML reports them, without a CUDA context; None where NVML cannot say."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        try:
            return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByPciBusId(bus_id.encode())).free)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None


_DRIVER_REMEDIES = {
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "the loaded driver is older than its library: reboot after the driver update",
    "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE": "remove the forward-compatibility package, this card does not take it",
    "CUDA_ERROR_NO_DEVICE": "the driver sees no GPU; check CUDA_VISIBLE_DEVICES and the rights on /dev/nvidia*",
    "CUDA_ERROR_OPERATING_SYSTEM": "check the rights on /dev/nvidia* (in a container: pass the GPU through)",
}


def _driver_problem(driver: Any, status: Any) -> str:
    _, name = driver.cuGetErrorName(status)
    code = name.decode() if isinstance(name, bytes) else str(status)
    remedy = _DRIVER_REMEDIES.get(code, "update the NVIDIA driver")
    return f"the NVIDIA driver answered {code} ({int(status)}); {remedy}"


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _cpu_flags() -> frozenset[str]:
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith(("flags", "Features")):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def _cpu_name() -> str:
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _machine_id() -> str:
    return _read("/etc/machine-id") or platform.node()


def _max_frequency() -> float:
    try:
        frequency = psutil.cpu_freq()
    except (OSError, NotImplementedError):
        return 0.0
    return (frequency.max or frequency.current) * 1e6 if frequency else 0.0


def _cache_sizes() -> dict[str, int]:
    sizes = {}
    for index in range(8):
        folder = f"/sys/devices/system/cpu/cpu0/cache/index{index}"
        size, level, kind = (_read(f"{folder}/{name}") for name in ("size", "level", "type"))
        if size and kind in ("Data", "Unified"):
            factor = {"K": 1 << 10, "M": 1 << 20}.get(size[-1], 1)
            sizes[f"l{level}"] = int(size.rstrip("KM")) * factor
    return sizes


def _cgroup_memory_limit() -> int:
    """The container's memory limit; 0 where there is none."""
    text = _read("/sys/fs/cgroup/memory.max")
    return int(text) if text.isdigit() else 0
