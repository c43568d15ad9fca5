"""Facts of the CPU backend's device: the cores, caches and memory this process may use."""

from __future__ import annotations

import os
import platform

import psutil

from dragoman_agent.pal.found import FoundDevice
from dragoman_agent.pal.host import Host, this_host
from dragoman_agent.pal.profile import DeviceFacts, Value, fingerprint

_INSTRUCTION_SETS = ("avx512_vnni", "avx512f", "avx2", "asimd")
_CACHE_FACTORS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def cpu_device(host: Host | None = None) -> FoundDevice:
    """The CPU backend's device."""
    host = host or this_host()
    memory = psutil.virtual_memory()
    cores = usable_cores()
    limit, used = cgroup_memory(host)
    total = min(memory.total, limit) if limit else memory.total
    free = min(memory.available, max(limit - used, 0)) if limit else memory.available
    isa = next((name for name in _INSTRUCTION_SETS if name in _cpu_flags(host)), "scalar")
    name = _cpu_name(host)
    values = {
        "compute.cores": Value(cores, "", "reported"),
        "compute.instruction_set": Value(isa, "", "reported"),
        "memory.total": Value(total, "bytes", "reported"),
        "memory.free": Value(min(free, total), "bytes", "reported"),
    }
    frequency = _max_frequency()
    if frequency:
        values["compute.max_clock"] = Value(frequency, "Hz", "reported")
    for level, size in _cache_sizes(host).items():
        values[f"memory.{level}_size"] = Value(size, "bytes", "reported")
    facts = DeviceFacts("cpu", 0, name, f"{platform.machine()}-{isa}", total, _machine_id(host))
    parts = [facts.uuid, name, isa, str(cores), platform.release(), str(limit)]
    return FoundDevice(facts, values, fingerprint(parts))


def usable_cores() -> int:
    """Cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_flags(host: Host) -> frozenset[str]:
    for line in host.read("/proc/cpuinfo").splitlines():
        if line.startswith(("flags", "Features")):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def _cpu_name(host: Host) -> str:
    for line in host.read("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _machine_id(host: Host) -> str:
    return host.read("/etc/machine-id") or platform.node()


def _max_frequency() -> float:
    try:
        frequency = psutil.cpu_freq()
    except (OSError, NotImplementedError):  # psutil where the system tells no frequency
        return 0.0
    return (frequency.max or frequency.current) * 1e6 if frequency else 0.0


def _cache_sizes(host: Host) -> dict[str, int]:
    sizes = {}
    for index in range(8):
        folder = f"/sys/devices/system/cpu/cpu0/cache/index{index}"
        size, level, kind = (host.read(f"{folder}/{name}") for name in ("size", "level", "type"))
        if size and kind in ("Data", "Unified") and size.rstrip("KMG").isdigit():
            sizes[f"l{level}"] = int(size.rstrip("KMG")) * _CACHE_FACTORS.get(size[-1], 1)
    return sizes


def free_host_bytes(host: Host) -> int:
    """Host memory that can be had without swapping, inside the container's limit."""
    available: int = psutil.virtual_memory().available
    limit, used = cgroup_memory(host)
    return min(available, max(limit - used, 0)) if limit else available


def cgroup_memory(host: Host) -> tuple[int, int]:
    """The container's memory limit and what is used of it, in bytes; zeros where there is no limit.

    Page cache that can be dropped is not counted as used: reading a model's file would otherwise eat the limit.
    """
    text = host.read("/sys/fs/cgroup/memory.max")
    if not text.isdigit():
        return 0, 0
    used = host.read("/sys/fs/cgroup/memory.current")
    inactive = next(
        (
            line.split()[1]
            for line in host.read("/sys/fs/cgroup/memory.stat").splitlines()
            if line.startswith("inactive_file ")
        ),
        "0",
    )
    return int(text), max(int(used or 0) - int(inactive), 0)
