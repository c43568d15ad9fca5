"""The capability matrix: every device that was looked at, as plain JSON values. `capability_matrix.schema.json` describes it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dragoman_agent.device.base import DeviceError
from dragoman_agent.device.capabilities import capabilities_of
from dragoman_agent.pal.found import FoundDevice, Inventory
from dragoman_agent.pal.profile import Profile, Value
from dragoman_agent.pal.select import Needs, NoDeviceError, Selection, Verdict, choose_device

SCHEMA_VERSION = 3
SCHEMA_FILE = Path(__file__).with_name("capability_matrix.schema.json")


def any_model_selection(inventory: Inventory) -> Selection | None:
    """What would be chosen for a model that fits everywhere; None where no device can be used at all."""
    try:
        return choose_device(inventory, "auto", Needs("any model", 0, 0))
    except NoDeviceError:
        return None


def verdicts(inventory: Inventory) -> tuple[Verdict, ...]:
    """Every device with its verdict, the chosen one first; without a usable one each with its problem."""
    selection = any_model_selection(inventory)
    if selection is not None:
        return selection.verdicts
    return tuple(
        Verdict(device, False, device.problem or device.runtime_problem, "probe" if device.problem else "runtime")
        for device in inventory.devices
    )


def capability_matrix(inventory: Inventory, profiles: Iterable[Profile], *, from_cache: bool) -> dict[str, Any]:
    """The whole matrix. `profiles` are those of the devices that could be measured."""
    held = list(profiles)
    measured = {profile.fingerprint: profile.values for profile in held if profile.fingerprint}
    return {
        "schema_version": SCHEMA_VERSION,
        "cuda_problem": inventory.cuda_problem,
        "from_cache": from_cache,
        "devices": [_device(verdict, measured.get(verdict.device.fingerprint, {})) for verdict in verdicts(inventory)],
        "profiles": [json.loads(profile.to_json()) for profile in held],
    }


def _device(verdict: Verdict, measured: Mapping[str, Value]) -> dict[str, Any]:
    device: FoundDevice = verdict.device
    facts = device.facts
    return {
        "kind": facts.kind,
        "index": facts.index,
        "name": facts.name,
        "architecture": facts.architecture,
        "memory_bytes": facts.memory_bytes,
        "uuid": facts.uuid,
        "address": device.address,
        "fingerprint": device.fingerprint,
        "integrated": device.integrated,
        "usable": device.usable,
        "chosen": verdict.chosen,
        "reason": verdict.reason,
        "refused_at": verdict.step,
        "problem": device.problem,
        "runtime_problem": device.runtime_problem,
        "notes": list(device.notes),
        "holders": [
            {"pid": holder.pid, "name": holder.name, "held_bytes": holder.held_bytes} for holder in device.holders
        ],
        "values": {name: _value(value) for name, value in sorted(device.values.items())},
        "capabilities": _capabilities(device, measured),
    }


def _capabilities(device: FoundDevice, measured: Mapping[str, Value]) -> dict[str, Any] | None:
    """What its backend provides on it; None for a device that cannot be used."""
    if not device.usable:
        return None
    try:
        return capabilities_of(device.facts.kind, {**measured, **device.values}).to_json()
    except DeviceError as error:
        return {"problem": str(error)}


def _value(value: Value) -> dict[str, Any]:
    return {
        "value": list(value.value) if isinstance(value.value, tuple) else value.value,
        "unit": value.unit,
        "provenance": value.provenance,
        "spread": value.spread,
        "note": value.note,
        "labels": list(value.labels),
    }
