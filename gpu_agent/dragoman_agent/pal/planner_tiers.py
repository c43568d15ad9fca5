"""How large the KV tiers below the device are: pinned host memory where moving beats computing again, disk where asked for. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from dragoman_agent.pal.changes import bytes_text
from dragoman_agent.pal.decisions import Decision, Input
from dragoman_agent.pal.limits import Limits, PlanError
from dragoman_agent.pal.plan import MemoryLine

HOST_SHARE = 0.25  # of free host memory: pinned pages are lost to everything else on the machine
MAX_HOST_TO_DEVICE = 4.0  # times the KV on the device: what is colder is rarely asked for again
COPY_BYTES = 64 << 20  # on the device, for what crosses the link: see device/torch_copies.py
HOST_LINE, DISK_LINE = "kv in host memory", "kv on disk"


@dataclass(frozen=True, slots=True)
class TierPlan:
    """Bytes of the tiers below the device; 0 is none."""

    host_bytes: int
    disk_bytes: int
    decisions: tuple[Decision, ...]

    @property
    def lines(self) -> tuple[MemoryLine, ...]:
        """Lines of the budget, for the tiers that there are. They take none of the device's memory."""
        sizes = ((HOST_LINE, self.host_bytes), (DISK_LINE, self.disk_bytes))
        return tuple(MemoryLine(name, size) for name, size in sizes if size)


def copy_bytes(limits: Limits, *, offload: bool) -> int:
    """Device memory for blocks that cross the link; 0 where none will."""
    return (
        COPY_BYTES if limits.kv_disk_bytes or limits.kv_host_bytes or (offload and limits.kv_host_bytes is None) else 0
    )


def plan_tiers(limits: Limits, block_bytes: int, kv_bytes: int, host_reason: str, *, offload: bool) -> TierPlan:
    """Tiers for blocks of `block_bytes` beside `kv_bytes` on the device. `host_reason`: why `offload` is yes or no.

    Raises PlanError where what was asked for cannot be.
    """
    host, told = _choose_host(limits, block_bytes, kv_bytes, host_reason, offload=offload)
    disk, told_too = _choose_disk(limits, block_bytes)
    return TierPlan(host, disk, (told, told_too))


def _choose_host(
    limits: Limits, block_bytes: int, kv_bytes: int, host_reason: str, *, offload: bool
) -> tuple[int, Decision]:
    free, asked = limits.host_free_bytes, limits.kv_host_bytes
    inputs = () if free is None else (Input("host.memory_free", bytes_text(free), "reported"),)
    if asked is not None:
        if asked and asked < block_bytes:
            raise PlanError(
                f"--kv-host-bytes {asked} holds no KV block: one takes {block_bytes} bytes; give at least that, or 0 for none"
            )
        if free is not None and asked > free:
            raise PlanError(
                f"--kv-host-bytes {asked} is more than the {bytes_text(free)} of host memory that are free; give less"
            )
        return _told_host(asked // block_bytes * block_bytes, "asked for", inputs)
    if not offload:
        return _told_host(0, host_reason, inputs)
    if free is None:
        reason = f"an agent on the machine takes {HOST_SHARE:.0%} of its free host memory, which is not known here"
        return _told_host(0, reason, inputs)
    chosen = int(min(HOST_SHARE * free, MAX_HOST_TO_DEVICE * kv_bytes)) // block_bytes * block_bytes
    reason = (
        f"{HOST_SHARE:.0%} of free host memory, at most {MAX_HOST_TO_DEVICE:.0f} times the KV on the device, since "
        "bringing a block back is quicker than computing it"
    )
    return _told_host(chosen, reason, inputs)


def _told_host(size: int, reason: str, inputs: tuple[Input, ...]) -> tuple[int, Decision]:
    return size, Decision("host-tier", bytes_text(size), reason, inputs, predicted=float(size), unit="bytes")


def _choose_disk(limits: Limits, block_bytes: int) -> tuple[int, Decision]:
    asked = limits.kv_disk_bytes
    if asked and asked < 2 * block_bytes:
        raise PlanError(
            f"--kv-disk-bytes {asked} holds no KV block with its names: one takes {block_bytes} bytes and a little more; "
            "give more, or leave --kv-disk-dir out"
        )
    reason = (
        "asked for" if asked else "off unless --kv-disk-dir and --kv-disk-bytes are given: a disk wears and is shared"
    )
    return asked, Decision("disk-tier", bytes_text(asked), reason, predicted=float(asked), unit="bytes")
