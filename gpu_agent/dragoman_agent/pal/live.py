"""The live part of a profile: when a sample is news, and how it overlays what was measured. Pure: no clock, no device.

Each watched quantity is a share of what it was when the profile held: 1 is "as measured", 0 of memory is "nobody else's". A
change counts when it is larger than its threshold for several samples in a row, and is undone when the reading comes back.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from dragoman_agent.pal.profile import Profile, Value

Quantity = Literal[
    "clock", "memory-clock", "link", "power-limit", "foreign-memory", "cpu-share", "temperature", "memory-stall"
]

# Reasons that hold a clock down against the measured state. A power cap alone is how a GPU runs at full load, and the
# profile was measured under it; a power limit that was lowered is seen by itself.
PROTECTIVE_REASONS = frozenset(
    {
        "hw-slowdown",
        "hw-thermal-slowdown",
        "sw-thermal-slowdown",
        "hw-power-brake",
        "application-clocks",
        "display-clocks",
    }
)
IDLE_REASON = "idle"
STALL_RATIO = 0.2  # of the time with every task waiting for memory: the host is out of it
# Bytes a second of one lane by generation (PCI Express base specification: transfer rate x coding).
LANE_BYTES_PER_SECOND = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at the device. None: it cannot be read here; `missing` says why."""

    source: str = "os"  # "nvml" or "os"
    temperature_celsius: float | None = None
    slowdown_celsius: float | None = None  # where the hardware begins to protect itself
    power_watts: float | None = None
    power_limit_watts: float | None = None  # enforced
    clock_hertz: float | None = None  # of the multiprocessors, or of the cores
    memory_clock_hertz: float | None = None
    link_generation: int | None = None
    link_width: int | None = None
    receive_bytes_per_second: float | None = None  # over the link, to the device
    send_bytes_per_second: float | None = None
    total_memory_bytes: int | None = None
    free_memory_bytes: int | None = None
    foreign_memory_bytes: int | None = None  # used by other processes
    utilization_ratio: float | None = None
    cpu_share_ratio: float | None = None  # share of the usable cores that others leave
    memory_stall_ratio: float | None = None  # share of time in which every task waited for memory
    reasons: frozenset[str] | None = None  # why the clock is what it is
    missing: tuple[tuple[str, str], ...] = ()  # (what, why)

    @property
    def is_busy(self) -> bool:
        """Whether clocks and link are those of work: an idle device saves power, which is no news."""
        if self.reasons is not None and IDLE_REASON in self.reasons:
            return False
        return self.utilization_ratio is None or self.utilization_ratio >= 0.2

    @property
    def link_bytes_per_second(self) -> float | None:
        """What the link can carry one way as it is now trained."""
        lane = LANE_BYTES_PER_SECOND.get(self.link_generation or 0)
        return None if lane is None or not self.link_width else lane * self.link_width


@dataclass(frozen=True, slots=True)
class Threshold:
    """When a reading is news: it differs by `change` from the value in force in `num_samples` samples running."""

    rest: float  # as measured
    change: float
    num_samples: int
    near_rest: float  # this near to `rest`, the quantity has recovered


Thresholds = Mapping[Quantity, Threshold]
GPU_THRESHOLDS: Thresholds = {
    "clock": Threshold(1.0, 0.15, 3, 0.05),
    "memory-clock": Threshold(1.0, 0.10, 3, 0.03),
    "link": Threshold(1.0, 0.10, 3, 0.03),
    "power-limit": Threshold(1.0, 0.02, 1, 0.01),
    "foreign-memory": Threshold(0.0, 0.03, 2, 0.01),
    "temperature": Threshold(0.0, 0.5, 3, 0.1),
}
# A host's clocks and cores are shared and jump: only what lasts counts.
CPU_THRESHOLDS: Thresholds = {
    "clock": Threshold(1.0, 0.30, 8, 0.10),
    "foreign-memory": Threshold(0.0, 0.10, 5, 0.03),
    "cpu-share": Threshold(1.0, 0.40, 10, 0.15),
    "memory-stall": Threshold(0.0, 0.5, 3, 0.1),
}


@dataclass(frozen=True, slots=True)
class Reference:
    """What readings are a share of: taken when the engine was ready, clocks when the device first worked."""

    clock_hertz: float | None = None
    max_clock_hertz: float | None = None  # from the profile; used where a clock is held down from the start
    memory_clock_hertz: float | None = None
    link_bytes_per_second: float | None = None
    power_limit_watts: float | None = None
    foreign_memory_bytes: int | None = None

    def with_sample(self, sample: Sample) -> Reference:
        """What is still unknown is taken from `sample`; clocks and link follow the best that was seen at work."""
        busy = sample.is_busy
        held = bool(sample.reasons and sample.reasons & PROTECTIVE_REASONS)
        return replace(
            self,
            clock_hertz=_best(self.clock_hertz, sample.clock_hertz if busy and not held else None),
            memory_clock_hertz=_best(self.memory_clock_hertz, sample.memory_clock_hertz if busy else None),
            link_bytes_per_second=_best(self.link_bytes_per_second, sample.link_bytes_per_second if busy else None),
            power_limit_watts=sample.power_limit_watts if self.power_limit_watts is None else self.power_limit_watts,
            foreign_memory_bytes=(
                sample.foreign_memory_bytes if self.foreign_memory_bytes is None else self.foreign_memory_bytes
            ),
        )


@dataclass(frozen=True, slots=True)
class LiveState:
    """The limits in force: per quantity its value, and the readings that speak for another."""

    reference: Reference = field(default_factory=Reference)
    in_force: Mapping[Quantity, float] = field(default_factory=dict)
    pending: Mapping[Quantity, tuple[float, ...]] = field(default_factory=dict)

    def value(self, quantity: Quantity, thresholds: Thresholds) -> float:
        """The value in force; `rest` where nothing happened."""
        return self.in_force.get(quantity, thresholds[quantity].rest)


@dataclass(frozen=True, slots=True)
class LiveEvent:
    """A quantity passed its threshold. `before` and `after` are the values in force."""

    quantity: Quantity
    before: float
    after: float
    text: str
    recovered: bool = False


def judge(state: LiveState, sample: Sample, thresholds: Thresholds) -> tuple[LiveState, list[LiveEvent]]:
    """The state after `sample`, and what is news."""
    reference = state.reference.with_sample(sample)
    in_force, pending = dict(state.in_force), dict(state.pending)
    events = []
    for quantity, threshold in thresholds.items():
        reading = read(quantity, sample, reference)
        if reading is None:
            pending.pop(quantity, None)  # readings must follow each other to count
            continue
        current = in_force.get(quantity, threshold.rest)
        back = abs(reading - threshold.rest) <= threshold.near_rest
        target = threshold.rest if back else reading
        if target == current or (not back and abs(reading - current) < threshold.change):
            pending.pop(quantity, None)
            continue
        readings = (*pending.get(quantity, ()), target)
        if len(readings) < threshold.num_samples:
            pending[quantity] = readings
            continue
        pending.pop(quantity, None)
        after = statistics.median_low(readings)
        in_force[quantity] = after
        events.append(
            LiveEvent(quantity, current, after, _text(quantity, current, after, sample), after == threshold.rest)
        )
    return LiveState(reference, in_force, pending), events


def read(quantity: Quantity, sample: Sample, reference: Reference) -> float | None:
    """The reading of one quantity as a share of its reference; None where the sample cannot say."""
    match quantity:
        case "clock":
            return _clock_reading(sample, reference)
        case "memory-clock":
            return _share(sample.memory_clock_hertz, reference.memory_clock_hertz) if sample.is_busy else None
        case "link":
            return _share(sample.link_bytes_per_second, reference.link_bytes_per_second) if sample.is_busy else None
        case "power-limit":
            return _share(sample.power_limit_watts, reference.power_limit_watts)
        case "foreign-memory":
            if None in (sample.foreign_memory_bytes, reference.foreign_memory_bytes) or not sample.total_memory_bytes:
                return None
            growth = (sample.foreign_memory_bytes or 0) - (reference.foreign_memory_bytes or 0)
            return max(growth, 0) / sample.total_memory_bytes
        case "cpu-share":
            return sample.cpu_share_ratio
        case "temperature":
            if sample.temperature_celsius is None or not sample.slowdown_celsius:
                return None
            return 1.0 if sample.temperature_celsius >= sample.slowdown_celsius - 3 else 0.0
        case "memory-stall":
            stalled = sample.memory_stall_ratio
            return None if stalled is None else 1.0 if stalled >= STALL_RATIO else 0.0


def _clock_reading(sample: Sample, reference: Reference) -> float | None:
    """Without reasons the plain share; with them, 1 unless something holds the clock below what was measured."""
    if not sample.is_busy or sample.clock_hertz is None:
        return None
    best = reference.clock_hertz or reference.max_clock_hertz
    if sample.reasons is None:
        return _share(sample.clock_hertz, best)
    capped = _share(sample.power_limit_watts, reference.power_limit_watts)
    if sample.reasons & PROTECTIVE_REASONS or (capped is not None and capped < 0.98):
        return _share(sample.clock_hertz, best)
    return 1.0


def overlay(profile: Profile, state: LiveState, thresholds: Thresholds, total_memory_bytes: int | None) -> Profile:
    """The profile under the limits in force: what depends on a changed quantity is scaled and marked as derived.

    Matrix rates and L2 bandwidth go with the multiprocessors' clock (and with the share of the cores on a CPU), memory
    bandwidth with the memory's clock, copies with the link's width and generation. Latencies are left as measured: how
    they go with the clocks was not.
    """
    changed: dict[str, Value] = {}
    for quantity, prefixes in _SCALED.items():
        if quantity not in thresholds:
            continue
        share = state.value(quantity, thresholds)
        if share == thresholds[quantity].rest:
            continue
        for name, value in profile.values.items():
            if name.startswith(prefixes):
                changed[name] = _scaled(changed.get(name, value), share, quantity)
    if "foreign-memory" in thresholds and total_memory_bytes and "memory.free" in profile.values:
        grown = int(state.value("foreign-memory", thresholds) * total_memory_bytes)
        if grown:
            free = profile.values["memory.free"]
            left = max(int(profile.number("memory.free")) - grown, 0)
            changed["memory.free"] = replace(
                free, value=left, provenance="derived", note=f"{grown} bytes less: other processes took them"
            )
    return profile.with_values(changed) if changed else profile


_SCALED: dict[Quantity, tuple[str, ...]] = {
    "clock": ("compute.matmul_", "memory.l2_bandwidth"),
    "cpu-share": ("compute.matmul_",),
    "memory-clock": ("memory.read_bandwidth", "memory.copy_bandwidth", "memory.read_by_size", "scheduling.phase_rate"),
    "link": ("link.h2d_", "link.d2h_", "link.both_ways"),
    "power-limit": ("power.limit",),
}


def _scaled(value: Value, share: float, quantity: Quantity) -> Value:
    held = value.value
    if isinstance(held, bool | str):
        return value
    scaled = tuple(entry * share for entry in held) if isinstance(held, tuple) else held * share
    note = f"x {share:.2f} for the {_NAMES[quantity]} now"
    return replace(value, value=scaled, provenance="derived", note="; ".join(filter(None, (value.note, note))))


_NAMES: dict[Quantity, str] = {
    "clock": "clock",
    "memory-clock": "memory clock",
    "link": "link",
    "power-limit": "power limit",
    "foreign-memory": "memory of other processes",
    "cpu-share": "share of the cores",
    "temperature": "temperature",
    "memory-stall": "waiting for memory",
}


def _text(quantity: Quantity, before: float, after: float, sample: Sample) -> str:
    match quantity:
        case "clock":
            why = ", ".join(sorted((sample.reasons or frozenset()) & PROTECTIVE_REASONS))
            detail = f"{(sample.clock_hertz or 0) / 1e6:.0f} MHz" + (f", held by {why}" if why else "")
        case "memory-clock":
            detail = f"{(sample.memory_clock_hertz or 0) / 1e6:.0f} MHz"
        case "link":
            detail = f"generation {sample.link_generation} x{sample.link_width}"
        case "power-limit":
            detail = f"{sample.power_limit_watts:.0f} W enforced"
        case "foreign-memory":
            detail = f"{(sample.foreign_memory_bytes or 0) / 1e9:.1f} GB held by others"
        case "cpu-share":
            detail = "what other processes leave"
        case "temperature":
            limit = f"slowdown at {sample.slowdown_celsius:.0f} C"
            state = "near its limit" if after else "below its limit again"
            return f"temperature {sample.temperature_celsius:.0f} C, {state} ({limit})"
        case "memory-stall":
            state = "short of memory" if after else "no longer short of memory"
            return f"the host is {state}: all tasks waited {sample.memory_stall_ratio or 0:.0%} of the time"
    return f"{_NAMES[quantity]} from {before:.0%} to {after:.0%} ({detail})"


def _share(value: float | None, reference: float | None) -> float | None:
    return None if value is None or not reference else min(value / reference, 1.0)


def _best(held: float | None, seen: float | None) -> float | None:
    return held if seen is None else seen if held is None else max(held, seen)
