"""What each Xid (NVIDIA's number for a fault that the driver saw) means for an agent: go on, cordon, or exit.

Source of the meanings and of the advised action: NVIDIA, "Xid Errors" (GPU Deployment and Management Documentation), its tables
of Xid messages and "Xid resolution buckets"; F11 of the fault list says what an agent does with each class.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class XidAction(Enum):
    """What the agent does."""

    NOTE = "note"  # keep serving: it concerns one process, which notices by itself, or it was repaired
    CORDON = "cordon"  # finish what runs, take nothing new: the device must be reset or looked at
    EXIT = "exit"  # the device is gone or what it computes cannot be trusted: end every stream, so that it resumes elsewhere


@dataclass(frozen=True, slots=True)
class XidClass:
    """One row of the table."""

    action: XidAction
    meaning: str
    remedy: str


_RESET = "let the running requests end, then reset the GPU (`nvidia-smi --gpu-reset`) and start the agent again"
_REBOOT = "reboot the host; if it comes back, have the card and its slot checked"
_OWN_PROCESS = "nothing, unless it comes again and again: then report it with the driver's log"

_TABLE: dict[int, XidClass] = {
    13: XidClass(XidAction.NOTE, "a kernel of some process faulted", _OWN_PROCESS),
    31: XidClass(XidAction.NOTE, "a kernel of some process read or wrote memory that is not mapped", _OWN_PROCESS),
    43: XidClass(XidAction.NOTE, "a process's work on the GPU was stopped after a fault", _OWN_PROCESS),
    45: XidClass(XidAction.NOTE, "a process ended and its work on the GPU was cleaned up", _OWN_PROCESS),
    48: XidClass(XidAction.CORDON, "a memory error of two bits that ECC cannot correct", _RESET),
    62: XidClass(XidAction.EXIT, "the GPU's internal controller halted", _RESET),
    63: XidClass(XidAction.NOTE, "a faulty row of memory was remapped; it takes effect at the next reset", _RESET),
    64: XidClass(XidAction.CORDON, "a faulty row of memory could not be remapped", _RESET),
    74: XidClass(XidAction.NOTE, "an NVLink reported an error; an agent uses one GPU and no NVLink", _RESET),
    79: XidClass(XidAction.EXIT, "the GPU has fallen off the bus", _REBOOT),
    92: XidClass(XidAction.NOTE, "memory errors of one bit, all corrected, come at a high rate", _RESET),
    94: XidClass(XidAction.CORDON, "a memory error that ECC could not correct was contained to one process", _RESET),
    95: XidClass(XidAction.EXIT, "a memory error that ECC could neither correct nor contain", _RESET),
    119: XidClass(XidAction.EXIT, "the GPU's system processor (GSP) does not answer", _RESET),
    120: XidClass(XidAction.EXIT, "the GPU's system processor (GSP) failed", _RESET),
    140: XidClass(XidAction.CORDON, "the driver reported a memory error that it could not recover from", _RESET),
}  # fmt: skip

_UNKNOWN = XidClass(
    XidAction.NOTE, "not in this version's table", "look it up in NVIDIA's list of Xid errors; the agent keeps serving"
)
DOUBLE_BIT_XID = 48
OFF_THE_BUS_XID = 79


def classify(xid: int) -> XidClass:
    """The row of `xid`; a note that says so for one that the table does not have."""
    return _TABLE.get(xid, _UNKNOWN)


def is_known(xid: int) -> bool:
    """Whether the table has it."""
    return xid in _TABLE


def describe(xid: int) -> str:
    """One line for a person: number, meaning, what to do."""
    row = classify(xid)
    return f"Xid {xid}: {row.meaning}. What to do: {row.remedy}"
