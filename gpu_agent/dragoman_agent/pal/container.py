"""What a container, WSL or a partition takes away: visible devices, driver capabilities, multiprocessors, memory."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from dragoman_agent.device.partition import (
    MEMORY_LIMIT,
    SM_LIMIT,
    PartitionError,
    PartitionLimits,
    limits_from_environ,
)
from dragoman_agent.pal import troubles
from dragoman_agent.pal.host import Host
from dragoman_agent.pal.profile import Value

# Without the variable the NVIDIA container runtime gives these two.
_DEFAULT_CAPABILITIES = frozenset({"compute", "utility"})
# Everything that changes what a measurement is valid for.
FINGERPRINT_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "NVIDIA_VISIBLE_DEVICES",
    "NVIDIA_DRIVER_CAPABILITIES",
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
    "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT",
    SM_LIMIT,
    MEMORY_LIMIT,
)
_SIZE = re.compile(r"(\d+)\s*([KMGT]?)B?", re.IGNORECASE)
_FACTORS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True, slots=True)
class Limits:
    """What one device may use of itself; None where nothing limits it. `notes` say what was not applied."""

    multiprocessors: int | None = None
    memory_bytes: int | None = None
    origin: dict[str, str] = field(default_factory=dict)  # "multiprocessors" or "memory" -> the variable
    notes: tuple[str, ...] = ()


def container_kind(host: Host) -> str:
    """ "wsl", "docker", "podman" or "kubernetes"; empty on a plain system."""
    if "microsoft" in host.read("/proc/version").lower():
        return "wsl"
    if host.environ.get("KUBERNETES_SERVICE_HOST"):
        return "kubernetes"
    if host.path("/run/.containerenv").exists():
        return "podman"
    return "docker" if host.path("/.dockerenv").exists() else ""


def capabilities(environ: Mapping[str, str]) -> frozenset[str] | None:
    """Driver capabilities that the container was given; None where no container runtime says."""
    text = environ.get("NVIDIA_DRIVER_CAPABILITIES", "").strip().lower()
    if not text:
        return _DEFAULT_CAPABILITIES if environ.get("NVIDIA_VISIBLE_DEVICES") else None
    if text == "all":
        return frozenset({"compute", "utility", "graphics", "video", "display", "ngx", "compat32"})
    return frozenset(part.strip() for part in text.split(",") if part.strip())


def container_values(host: Host) -> dict[str, Value]:
    """The container's values; only those that are set."""
    values = {}
    if kind := container_kind(host):
        values["container.kind"] = Value(kind, "", "reported")
    for name in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"):
        if name in host.environ:
            values["container.visible_devices"] = Value(host.environ[name], "", "reported", note=name)
            break
    if "NVIDIA_DRIVER_CAPABILITIES" in host.environ:
        given = host.environ["NVIDIA_DRIVER_CAPABILITIES"]
        values["container.driver_capabilities"] = Value(given, "", "reported")
    return values


def limits_of(environ: Mapping[str, str], index: int, multiprocessors: int, under_mps: bool | None) -> Limits:
    """Limits on device `index` that has `multiprocessors`. `under_mps` is None where the driver cannot say."""
    notes: list[str] = []
    origin: dict[str, str] = {}
    share = _mps_share(environ, under_mps, notes)
    count = None if share is None else max(int(multiprocessors * share), 1)
    if count is not None:
        origin["multiprocessors"] = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
    size = _mps_memory(environ, index, under_mps, notes)
    if size is not None:
        origin["memory"] = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
    own = _own(environ, notes)
    if own.num_multiprocessors is not None and own.num_multiprocessors < (count or multiprocessors):
        count, origin["multiprocessors"] = own.num_multiprocessors, SM_LIMIT
    if own.memory_bytes is not None and (size is None or own.memory_bytes < size):
        size, origin["memory"] = own.memory_bytes, MEMORY_LIMIT
    return Limits(count, size, origin, tuple(notes))


def size_of(text: str) -> int | None:
    """Bytes of "512M", "1G" or "8GB" (powers of 1024, as the multi-process service reads them); None if it is no size."""
    match = _SIZE.fullmatch(text.strip())
    return int(match[1]) * _FACTORS[match[2].upper()] if match else None


def _mps_share(environ: Mapping[str, str], under_mps: bool | None, notes: list[str]) -> float | None:
    name = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
    text = environ.get(name)
    if text is None:
        return None
    try:
        percent = float(text)
    except ValueError:
        percent = 0.0
    if not 0 < percent <= 100:
        notes.append(troubles.BAD_LIMIT.text(name=name, value=text, expected="a percentage over 0 and up to 100"))
        return None
    if under_mps is False:
        notes.append(troubles.MPS_NOT_RUNNING.text(name=name))
        return None
    return percent / 100 if percent < 100 else None


def _mps_memory(environ: Mapping[str, str], index: int, under_mps: bool | None, notes: list[str]) -> int | None:
    name = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
    text = environ.get(name)
    if text is None:
        return None
    limit = None
    for part in filter(None, (entry.strip() for entry in text.split(","))):
        device, _, amount = part.partition("=")
        size = size_of(amount)
        if not size or not device.strip().isdigit():
            notes.append(troubles.BAD_LIMIT.text(name=name, value=text, expected="a list such as 0=4G,1=512M"))
            return None
        if int(device) == index:
            limit = size
    if limit is not None and under_mps is False:
        notes.append(troubles.MPS_NOT_RUNNING.text(name=name))
        return None
    return limit


def _own(environ: Mapping[str, str], notes: list[str]) -> PartitionLimits:
    """The limits that we set ourselves; the measurement and the engine refuse to start with a bad one, so it is told here."""
    try:
        return limits_from_environ(environ)
    except PartitionError as error:
        notes.append(str(error))
        return PartitionLimits()
