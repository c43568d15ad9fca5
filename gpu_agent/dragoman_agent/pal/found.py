"""What looking at the host's devices gives: each device with its values, problems and remarks."""

from __future__ import annotations

from dataclasses import dataclass, field

from dragoman_agent.pal.changes import Holder
from dragoman_agent.pal.profile import DeviceFacts, Value

# Backends of this version. A device of another kind is listed and refused with that reason.
SUPPORTED_KINDS = ("cpu", "cuda")
# Backends that are written and compiled but have never run on such a card; a verdict on one says so.
UNTESTED_KINDS = ("hip", "xpu")


@dataclass(frozen=True, slots=True)
class FoundDevice:
    """A device that was looked at. Both problems are empty when nothing speaks against it."""

    facts: DeviceFacts
    values: dict[str, Value] = field(default_factory=dict)
    fingerprint: str = ""
    integrated: bool = False
    problem: str = ""  # the device itself cannot be used
    notes: tuple[str, ...] = ()  # what limits it without ruling it out
    runtime_problem: str = ""  # the device could be used, with another driver or another torch
    holders: tuple[Holder, ...] = ()  # processes that hold its memory, as far as the driver tells
    address: str = ""  # on the PCI bus, such as "0000:01:00.0"

    @property
    def usable(self) -> bool:
        """Whether it can be measured and run on."""
        return not self.problem and not self.runtime_problem


@dataclass(frozen=True, slots=True)
class Inventory:
    """All devices, and what the driver said where it could not be asked."""

    devices: tuple[FoundDevice, ...]
    cuda_problem: str = ""
