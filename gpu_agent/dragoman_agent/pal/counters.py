"""Hardware counters of a GPU in order of preference, and what they say of the L2 cache. Nothing here guesses.

CUPTI's PM sampling is read in short bursts, NVML's GPM over each interval; where neither may be read the indices use the
model of bytes moved, and say so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from dragoman_agent.pal.profile import Profile

Source = Literal["cupti", "gpm", "model"]


@dataclass(frozen=True, slots=True)
class Reading:
    """What counters said of an interval. Ratios are of the possible, None where a source does not have it."""

    source: Source
    seconds: float  # length of the interval
    dram_bytes_per_second: float | None = None
    dram_ratio: float | None = None
    sm_ratio: float | None = None  # multiprocessors at work
    tensor_ratio: float | None = None
    instructions_per_cycle: float | None = None
    l2_hit_ratio: float | None = (
        None  # of sectors, as the cache counts them: writes and re-reads within a kernel are hits too
    )
    receive_bytes_per_second: float | None = None  # over the link, to the device
    send_bytes_per_second: float | None = None


class Counters(Protocol):
    """One source. Its methods may block for milliseconds: called from the sampling thread."""

    source: Source

    def read(self) -> Reading | None:
        """The interval since the last call; None when there is none yet. Raises CountersError for good."""

    def close(self) -> None:
        """Let go. Safe at any time."""


class CountersError(Exception):
    """A source cannot be read on this machine. The message says why; the next source is taken."""


def peak_dram_bytes_per_second(profile: Profile) -> float | None:
    """What GPM's and CUPTI's DRAM shares are shares of: memory clock x bus width x 2 transfers a cycle.

    None where the profile does not have both; the names of the driver's attributes are MEMORY_CLOCK_RATE and
    GLOBAL_MEMORY_BUS_WIDTH, and the formula is that of the CUDA C++ Best Practices Guide, "Theoretical Bandwidth Calculation".
    """
    if "memory.max_clock" not in profile.values or "memory.bus_width" not in profile.values:
        return None
    return profile.number("memory.max_clock") * profile.number("memory.bus_width") / 8 * 2


def l2_hit_ratio(dram_bytes: float, asked_bytes: float) -> float | None:
    """1 - DRAM bytes / bytes asked for, in 0..1; None when nothing was asked for.

    What kernels asked for and did not come from memory came from the cache. The cache's own counter is another figure: it
    also counts writes, and what a kernel reads again and again, which no contract states (0.51 for a plain copy on an H200).
    """
    if asked_bytes <= 0:
        return None
    return min(max(1.0 - dram_bytes / asked_bytes, 0.0), 1.0)
