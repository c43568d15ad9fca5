"""One CUDA device from what the driver, NVML, the container and the runtime say of it; each remark with its remedy. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from dragoman_agent.pal import troubles
from dragoman_agent.pal.container import FINGERPRINT_VARIABLES, Limits, capabilities, limits_of
from dragoman_agent.pal.cuda_facts import CudaReading
from dragoman_agent.pal.found import FoundDevice
from dragoman_agent.pal.nvml_facts import NvmlReading
from dragoman_agent.pal.profile import Value, fingerprint
from dragoman_agent.pal.runtime import Runtime, driver_problem

# What a measurement is valid for. Never the name.
_FINGERPRINT_VALUES = (
    "driver.version",
    "driver.release",
    "compute.max_clock",
    "memory.max_clock",
    "link.max_generation",
    "link.max_width",
    "compute.multiprocessors",
    "memory.total",
    "partition.multiprocessors",
    "partition.memory",
)


def join(
    reading: CudaReading,
    nvml: NvmlReading,
    nvml_problem: str,
    *,
    environ: Mapping[str, str],
    kind_of_container: str,
    shared: Mapping[str, Value],
    runtime: Runtime,
) -> FoundDevice:
    """The device. `shared` are the container's values, `nvml_problem` says why NVML could not be asked at all."""
    if reading.problem:
        return FoundDevice(reading.facts, dict(reading.values), problem=reading.problem, address=reading.address)
    facts = replace(reading.facts, uuid=nvml.mig_uuid or reading.facts.uuid)
    values = {**nvml.values, **reading.values, **shared}
    _verify_capabilities(values, nvml_problem)
    notes = [*_nvml_notes(nvml, nvml_problem, environ)]
    if "memory.l2_size" in reading.unreported:
        notes.append(troubles.L2_NOT_REPORTED.text())
    notes.extend(_pinned(values, kind_of_container == "wsl"))
    notes.extend(_narrow_link(values))
    if "memory.free" not in values:
        why = nvml.refused.get("memory.free") or nvml.refused.get("device") or nvml_problem or "NVML does not list it"
        note = f"all of it, an upper bound: what others hold is unknown ({why})"
        values["memory.free"] = Value(facts.memory_bytes, "bytes", "derived", note=note)
    sms = values.get("compute.multiprocessors")
    limits = limits_of(
        environ, facts.index, int(sms.value) if sms and isinstance(sms.value, int) else 1, reading.under_mps
    )
    values.update(_partition(values, limits))
    parts = [f"uuid={facts.uuid}"]
    parts += [f"{name}={values[name].value}" for name in _FINGERPRINT_VALUES if name in values]
    parts += [f"{name}={environ[name]}" for name in FINGERPRINT_VARIABLES if name in environ]
    return FoundDevice(
        facts,
        values,
        fingerprint(parts),
        integrated=reading.integrated,
        notes=(*notes, *limits.notes),
        runtime_problem=driver_problem(runtime, str(values["driver.version"].value)),
        holders=nvml.holders,
        address=reading.address,
    )


def _verify_capabilities(values: dict[str, Value], nvml_problem: str) -> None:
    """Say of the container's capabilities which were seen to work: compute lists this device, utility is NVML."""
    given = values.get("container.driver_capabilities")
    if given is not None:
        utility = f"does not: {nvml_problem}" if nvml_problem else "works"
        values["container.driver_capabilities"] = replace(given, note=f"compute works, utility {utility}")


def _nvml_notes(nvml: NvmlReading, problem: str, environ: Mapping[str, str]) -> list[str]:
    if problem:
        given = capabilities(environ)
        if given is not None and "utility" not in given:
            value = environ.get("NVIDIA_DRIVER_CAPABILITIES", "")
            return [troubles.NVML_NOT_IN_CONTAINER.text(value=value)]
        return [troubles.NVML_MISSING.text(reason=problem)]
    # A card that lacks a counter is no news; one whose counter is closed, or whose free memory is unknown, is.
    by_reason: dict[str, list[str]] = {}
    for name, reason in nvml.refused.items():
        if name in ("memory.free", "device") or "support" not in reason.lower():
            by_reason.setdefault(reason, []).append(name)
    return [troubles.NVML_REFUSED.text(names=", ".join(names), reason=reason) for reason, names in by_reason.items()]


def _pinned(values: dict[str, Value], wsl: bool) -> list[str]:
    """Whether host memory can be pinned: the driver says so, and WSL limits it."""
    registration = values.get("link.host_registration")
    pinned = not wsl or (registration is not None and registration.value is True)
    note = "/proc/version names WSL" if wsl else "no WSL"
    if registration is not None:
        note += f", the driver {'registers' if registration.value is True else 'does not register'} host memory"
    values["link.pinned_memory"] = Value(pinned, "", "derived", note=note)
    if not wsl:
        return []
    return [(troubles.WSL_PINNED_LIMITED if pinned else troubles.WSL_NOT_PINNED).text()]


def _narrow_link(values: Mapping[str, Value]) -> list[str]:
    width, most = values.get("link.width"), values.get("link.max_width")
    if width is None or most is None or not isinstance(width.value, int) or not isinstance(most.value, int):
        return []
    if not 0 < width.value < most.value:
        return []
    return [troubles.NARROW_LINK.text(width=width.value, max_width=most.value)]


def _partition(values: Mapping[str, Value], limits: Limits) -> dict[str, Value]:
    """What a limit leaves: never more than a slice that the card was already cut into."""
    found = {}
    if limits.multiprocessors is not None:
        note = limits.origin["multiprocessors"]
        found["partition.multiprocessors"] = Value(limits.multiprocessors, "", "derived", note=note)
    if limits.memory_bytes is not None:
        note = limits.origin["memory"]
        found["partition.memory"] = Value(limits.memory_bytes, "bytes", "derived", note=note)
        free = values["memory.free"]
        if isinstance(free.value, int) and limits.memory_bytes < free.value:
            found["memory.free"] = Value(limits.memory_bytes, "bytes", "derived", note=f"limited by {note}")
    for name in ("partition.multiprocessors", "partition.memory"):
        held = values.get(name)
        new = found.get(name)
        if held is not None and new is not None and isinstance(held.value, int) and isinstance(new.value, int):
            found[name] = held if held.value < new.value else new
    return found
