"""GPUs of other makers, as a torch that was built for them lists them. Needs no torch itself.

torch is asked in a process of its own: importing it takes seconds, and asking for free memory opens the device.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from dragoman_agent.pal import pci, troubles
from dragoman_agent.pal.found import FoundDevice
from dragoman_agent.pal.host import Host
from dragoman_agent.pal.profile import DeviceFacts, Value, fingerprint
from dragoman_agent.pal.runtime import Runtime

logger = logging.getLogger(__name__)

_TIMEOUT_SECONDS = 120.0  # the first import of torch from a cold disk
# What a measurement is valid for. Never the name.
_FINGERPRINT_VALUES = ("compute.multiprocessors", "compute.max_clock", "memory.max_clock", "memory.total")
_FINGERPRINT_VARIABLES = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR")


class TorchListError(Exception):
    """torch could not be asked. The message is its own last line, or what became of its process."""


def list_in_a_process(kind: str) -> list[dict[str, Any]]:
    """The devices that the installed torch lists of `kind`, see `device/torch_probe.py`. Raises TorchListError."""
    command = [sys.executable, "-P", "-m", "dragoman_agent.device.torch_probe", kind, "--list"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False, timeout=_TIMEOUT_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise TorchListError(f"torch did not answer within {_TIMEOUT_SECONDS:g} s") from None
    for line in done.stderr.splitlines():
        logger.debug("torch: %s", line)
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise TorchListError(said[-1] if said else f"its process ended with code {done.returncode}")
    try:
        listed: list[dict[str, Any]] = json.loads(done.stdout)
    except ValueError:
        raise TorchListError(f"torch wrote something else than a list: {done.stdout.strip()[:200]!r}") from None
    return listed


def read_torch(kind: str, host: Host, runtime: Runtime, cards: list[pci.PciGpu]) -> tuple[list[FoundDevice], str]:
    """The devices of `kind`, and what kept torch from listing them; one of both is empty."""
    try:
        listed = host.list_torch(kind)
        found = [_device(kind, entry, host.environ, runtime, cards) for entry in listed]
    except TorchListError as error:
        return [], str(error)
    except (KeyError, TypeError, ValueError) as error:
        return [], f"torch's list has another form than expected: {type(error).__name__}: {error}"
    return found, "" if found else "it lists none"


def _device(
    kind: str, entry: Mapping[str, Any], environ: Mapping[str, str], runtime: Runtime, cards: list[pci.PciGpu]
) -> FoundDevice:
    values = {
        name: Value(**{**value, "labels": tuple(value.get("labels", ()))}) for name, value in entry["values"].items()
    }
    card = _card_of(kind, entry, cards)
    address = card.address if card else str(entry["address"])
    facts = DeviceFacts(
        kind,
        int(entry["index"]),
        str(entry["name"]),
        str(entry["architecture"]),
        int(entry["memory_bytes"]),
        str(entry["uuid"]) or f"pci-{address}",
    )
    parts = [f"uuid={facts.uuid}", f"architecture={facts.architecture}", f"torch={runtime.built_for}"]
    parts += [f"{name}={values[name].value}" for name in _FINGERPRINT_VALUES if name in values]
    parts += [f"{name}={environ[name]}" for name in _FINGERPRINT_VARIABLES if name in environ]
    return FoundDevice(
        facts,
        values,
        fingerprint(parts),
        integrated=bool(entry["integrated"]) or (card is not None and card.integrated),
        notes=(troubles.UNTESTED_BACKEND.text(kind=kind),),
        address=address,
    )


def _card_of(kind: str, entry: Mapping[str, Any], cards: list[pci.PciGpu]) -> pci.PciGpu | None:
    """The card of the PCI bus: by address, or the only one of its kind where torch does not say."""
    own = [card for card in cards if card.kind == kind]
    if entry["address"]:
        return next((card for card in own if pci.slot(card.address) == pci.slot(str(entry["address"]))), None)
    return own[0] if len(own) == 1 else None
