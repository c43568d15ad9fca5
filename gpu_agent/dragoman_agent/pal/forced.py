"""A profile that is named instead of measured: found by name or file, held against the device, and bounded by it.

Pure but for reading the file.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from dataclasses import dataclass
from pathlib import Path

from dragoman_agent.pal.decisions import Decision, Input
from dragoman_agent.pal.library import library_names, load_library
from dragoman_agent.pal.profile import DeviceFacts, Profile, ProfileError, Value, load_profile
from dragoman_agent.pal.profile_schema import missing_values
from dragoman_agent.pal.words import value_text

# A sheet's size and the size a driver reports differ by what the driver and error correction keep.
MEMORY_TOLERANCE = 0.1

# What a foreign profile cannot give to a device: beyond these a kernel does not start or an allocation fails.
_HARD_NUMBERS = (
    "memory.free",
    "memory.total",
    "memory.shared_per_block",
    "memory.shared_per_multiprocessor",
    "memory.l2_persisting_max",
    "memory.access_window_max",
    "compute.max_threads_per_block",
    "compute.registers_per_block",
)
_HARD_FLAGS = ("compute.dependent_launch", "compute.cooperative_launch", "compute.cluster_launch")


@dataclass(frozen=True, slots=True)
class NamedProfile:
    """A profile that a user named, and where it was found."""

    profile: Profile
    origin: str  # "the library's rtx4090", or "the file cards/mine.json"


def find_profile(name_or_file: str) -> NamedProfile:
    """A profile of the library by its name, or one of a file. Raises ProfileError: neither, damaged, or incomplete."""
    name = _library_name(name_or_file)
    if name is not None:
        named = NamedProfile(load_library(name), f"the library's {name}")
    else:
        path = Path(name_or_file).expanduser()
        if not _looks_like_a_path(name_or_file, path):
            raise ProfileError(_unknown(name_or_file))
        named = NamedProfile(load_profile(path), f"the file {path}")
    profile = named.profile
    missing = missing_values(profile.device.kind, profile.values)
    if missing:
        raise ProfileError(
            f"profile {name_or_file} cannot be used: a plan for a {profile.device.kind} device needs "
            f"{', '.join(missing)}, which it lacks; probe that device again with `dragoman probe --full`"
        )
    return named


def mismatches(profile: Profile, device: DeviceFacts, fingerprint: str, reported: dict[str, Value]) -> tuple[str, ...]:
    """What differs between a profile and the device here, each as one phrase; empty where the profile is this device's.

    A profile without a fingerprint stands for a kind of card: kind, architecture, multiprocessors and memory must agree.
    """
    found = []
    if profile.device.kind != device.kind:
        found.append(f"it is of a {profile.device.kind} device, this is a {device.kind} device")
    if profile.device.architecture != device.architecture:
        found.append(f"architecture {profile.device.architecture}, this device has {device.architecture}")
    ours, theirs = reported.get("compute.multiprocessors"), profile.values.get("compute.multiprocessors")
    if ours is not None and theirs is not None and ours.value != theirs.value:
        found.append(f"{theirs.value} multiprocessors, this device has {ours.value}")
    sizes = (profile.device.memory_bytes, device.memory_bytes)
    if abs(sizes[0] - sizes[1]) > MEMORY_TOLERANCE * max(sizes):
        found.append(f"{_gib(sizes[0])} of memory, this device has {_gib(sizes[1])}")
    if not found and profile.fingerprint and profile.fingerprint != fingerprint:
        found.append(
            f"it was measured on another device or with another driver, clocks or limits "
            f"(fingerprint {profile.fingerprint[:8]}, here {fingerprint[:8]})"
        )
    return tuple(found)


def take_forced(
    named: NamedProfile, device: DeviceFacts, fingerprint: str, reported: dict[str, Value], *, force: bool
) -> tuple[Profile, Decision]:
    """The named profile for this device, within the device's hard limits, and the decision that says so.

    `reported` are the values that the device itself tells. Raises ProfileError where the profile is of another device
    and `force` is not set, or of another kind of device altogether.
    """
    found = mismatches(named.profile, device, fingerprint, reported)
    differs = "; ".join(found)
    if named.profile.device.kind != device.kind:
        raise ProfileError(
            f"--profile: {named.origin} does not match {device.name}: {differs}. A plan for one kind of device cannot "
            "run on another, whatever is forced: choose another profile, or the device with --device"
        )
    if found and not force:
        raise ProfileError(
            f"--profile: {named.origin} does not match {device.name}: {differs}. Leave --profile out to measure the "
            "device, or add --profile-force to plan from it all the same"
        )
    profile, bounded = _bounded(named.profile, device, reported) if found else (named.profile, [])
    if not found:
        profile = dataclasses.replace(profile, device=device, values={**profile.values, **_free(reported)})
    reason = f"asked for with --profile: {named.origin}"
    if found:
        reason += f"; forced with --profile-force although it differs: {differs}"
    if bounded:
        reason += f"; bounded by what this device has: {', '.join(bounded)}"
    return profile, Decision("profile", describe(named.profile), reason, inputs=_provenances(profile))


def describe(profile: Profile) -> str:
    """A profile in a few words: its name and where its values come from."""
    counts: dict[str, int] = {}
    for value in profile.values.values():
        counts[value.provenance] = counts.get(value.provenance, 0) + 1
    parts = ", ".join(f"{count} {provenance}" for provenance, count in sorted(counts.items()))
    return f"{profile.name} ({parts or 'no'} values)"


def _bounded(profile: Profile, device: DeviceFacts, reported: dict[str, Value]) -> tuple[Profile, list[str]]:
    """The profile under this device's index and identity, with no value that the device cannot keep."""
    values: dict[str, Value] = {}
    for name in _HARD_NUMBERS:
        ours, theirs = reported.get(name), profile.values.get(name)
        if ours is None or theirs is None or not _is_less(ours.value, theirs.value):
            continue
        values[name] = ours
    for name in _HARD_FLAGS:
        ours, theirs = reported.get(name), profile.values.get(name)
        if ours is not None and theirs is not None and theirs.value is True and ours.value is False:
            values[name] = ours
    capability = reported.get("compute.capability")
    if capability is not None and _version(capability.value) < _version(profile.values["compute.capability"].value):
        values["compute.capability"] = capability
    facts = dataclasses.replace(device, memory_bytes=min(device.memory_bytes, profile.device.memory_bytes))
    return dataclasses.replace(profile, device=facts, values={**profile.values, **values}), sorted(values)


def _free(reported: dict[str, Value]) -> dict[str, Value]:
    """The memory that is free now: a file knows that of another day."""
    return {"memory.free": reported["memory.free"]} if "memory.free" in reported else {}


def _is_less(ours: object, theirs: object) -> bool:
    return isinstance(ours, int | float) and isinstance(theirs, int | float) and 0 < ours < theirs


def _version(capability: object) -> tuple[int, ...]:
    return tuple(int(part) for part in str(capability).split("."))


def _provenances(profile: Profile) -> tuple[Input, ...]:
    """The values that weigh most, so that a person sees at once whether they were measured."""
    names = ("memory.read_bandwidth", "compute.matmul_bfloat16", "compute.matmul_float32", "scheduling.graph_node")
    return tuple(
        Input(name, value_text(value), value.provenance)
        for name in names
        if (value := profile.values.get(name)) is not None
    )


def _library_name(text: str) -> str | None:
    """The library's spelling of a name; None where the library has no such profile."""
    wanted = _shape(text)
    return next((name for name in library_names() if _shape(name) == wanted), None) if wanted else None


def _shape(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter not in " -_")


def _looks_like_a_path(text: str, path: Path) -> bool:
    return "/" in text or text.endswith(".json") or (text.strip() != "" and "\0" not in text and os.path.exists(path))


def _unknown(text: str) -> str:
    names = library_names()
    wanted = _shape(text)
    # "rtx4060" is nearer to rtx4090 by letters, and means rtx4060-laptop.
    longer = [name for name in names if wanted and _shape(name).startswith(wanted)]
    near = longer or difflib.get_close_matches(text.lower(), names, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]}?" if near else "."
    return (
        f"there is no profile {text[:100]!r} in the library and no such file{hint} "
        f"Give the path of a profile file, or one of: {', '.join(names)}"
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
