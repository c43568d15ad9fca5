"""The figures of a GPU that predictions are made from, as plain numbers; what a profile lacks is derived by the rules here."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dragoman_agent.pal.limits import PlanError, need, need_count, optional
from dragoman_agent.pal.profile import Profile

# Rules for values that a profile may lack. Each is a ratio between two published measurements of one card.
_PHASE_NODES = 2.4 / 0.55  # H200: phase of a decode step (2.4 us) over an empty graph node (0.55 us)
_PHASE_RATE_SHARE = 4.2 / 4.61  # H200: slope of short matrix products over a long read
_L2_SHARE = 10.0 / 16.7  # H200: L2 read (10 TB/s) over 64 bytes a clock and multiprocessor
_LOADED_LATENCY = 2.0  # H100/H200: 0.7 us with memory busy, 0.35 us idle
_IDLE_LATENCY_SECONDS = 0.35e-6  # H100: about 650 cycles
_CLOCK_HERTZ = 1.8e9  # the ten cards of the library boost to between 1.4 and 2.6 GHz
_HOST_LAUNCH_SECONDS = 3.4e-6  # H200 machine, from C++
_PYTHON_LAUNCHES = 10.5 / 3.4  # the same machine: a launch from Python over one from C++

_L2_BYTES_PER_CLOCK = 64  # of one multiprocessor
_KIB = 1 << 10


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates in bytes or operations a second, times in seconds, sizes in bytes."""

    capability: tuple[int, int]
    num_multiprocessors: int
    clock_hertz: float
    matmul_rate: float  # bfloat16
    read_bandwidth: float
    phase_seconds: float  # what a dependent kernel costs beyond its bytes
    phase_rate: float  # at which a short kernel moves its bytes
    latency_seconds: float  # of a read while memory is busy
    l2_bytes: float
    l2_bandwidth: float
    shared_per_block: int
    shared_per_multiprocessor: int
    shared_reserved: int  # of each block
    registers: int  # of a multiprocessor
    max_num_threads: int  # on a multiprocessor
    max_num_blocks: int  # on a multiprocessor
    python_launch_seconds: float  # host time of one kernel launched outside a graph

    @property
    def multiprocessor_bandwidth(self) -> float:
        """Bytes a second that one multiprocessor can take in from L2."""
        return _L2_BYTES_PER_CLOCK * self.clock_hertz

    def num_resident(self, shared_bytes: int, num_threads: int, registers_a_thread: int) -> int:
        """Blocks of this size that run on one multiprocessor at once; 0 where it cannot run at all."""
        if shared_bytes > self.shared_per_block:
            return 0
        return min(
            self.shared_per_multiprocessor // (shared_bytes + self.shared_reserved),
            self.max_num_threads // num_threads,
            self.registers // (num_threads * registers_a_thread),
            self.max_num_blocks,
        )

    def stream_seconds(self, num_bytes: float) -> float:
        """Reading or writing `num_bytes` in one kernel, its phase aside: from L2 where they fit in half of it."""
        return num_bytes / (
            max(self.l2_bandwidth, self.phase_rate) if num_bytes <= self.l2_bytes / 2 else self.phase_rate
        )


def rates_of(profile: Profile) -> Rates:
    """The figures of `profile`. Raises PlanError naming a value that is missing or cannot be used."""
    num_multiprocessors = need_count(profile, "compute.multiprocessors")
    part = "partition.multiprocessors"  # what a green context, a slice or a process limit leaves
    if part in profile.values:
        num_multiprocessors = min(num_multiprocessors, need_count(profile, part))
    clock = optional(profile, "compute.max_clock") or _CLOCK_HERTZ
    read = need(profile, "memory.read_bandwidth")
    node = need(profile, "scheduling.graph_node")
    shared = need_count(profile, "memory.shared_per_block")
    host_launch = optional(profile, "scheduling.host_launch") or _HOST_LAUNCH_SECONDS
    return Rates(
        capability=_capability(profile),
        num_multiprocessors=num_multiprocessors,
        clock_hertz=clock,
        matmul_rate=need(profile, "compute.matmul_bfloat16"),
        read_bandwidth=read,
        phase_seconds=optional(profile, "scheduling.phase") or _PHASE_NODES * node,
        phase_rate=optional(profile, "scheduling.phase_rate") or _PHASE_RATE_SHARE * read,
        latency_seconds=_LOADED_LATENCY * (optional(profile, "memory.latency") or _IDLE_LATENCY_SECONDS),
        l2_bytes=_l2_bytes(profile),
        l2_bandwidth=optional(profile, "memory.l2_bandwidth")
        or _L2_SHARE * _L2_BYTES_PER_CLOCK * clock * num_multiprocessors,
        shared_per_block=shared,
        shared_per_multiprocessor=int(optional(profile, "memory.shared_per_multiprocessor") or shared + _KIB),
        shared_reserved=int(optional(profile, "memory.shared_reserved_per_block") or _KIB),
        registers=int(optional(profile, "compute.registers_per_multiprocessor") or 64 * _KIB),
        max_num_threads=int(optional(profile, "compute.max_threads_per_multiprocessor") or 1536),
        max_num_blocks=int(optional(profile, "compute.max_blocks_per_multiprocessor") or 16),
        python_launch_seconds=_PYTHON_LAUNCHES * host_launch,
    )


def _l2_bytes(profile: Profile) -> float:
    """0 where the driver reports none: nothing is then expected to stay in L2."""
    value = profile.values.get("memory.l2_size")
    return 0.0 if value is None or value.value == 0 else need(profile, "memory.l2_size")


def _capability(profile: Profile) -> tuple[int, int]:
    if profile.device.kind != "cuda":
        return (0, 0)  # NVIDIA's own: nothing that it stands for is expected of another maker's card
    value = profile.values.get("compute.capability")
    if value is None:
        need(profile, "compute.capability")
    found = re.fullmatch(r"(\d+)\.(\d+)", str(value.value)) if value is not None else None
    if found is None:
        raise PlanError(
            f"the profile {profile.name} says compute.capability = {value and value.value!r}, a text such as '9.0' was "
            "expected; probe the device again with `dragoman probe`"
        )
    return int(found[1]), int(found[2])
