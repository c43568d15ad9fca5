"""What may stand in a profile: units, kinds and ranges of its values. Pure; raises ValueError with the value's name."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

# Base units only: a file that says GB/s was not written by this program, and nobody would notice the factor.
UNITS = ("", "bytes", "bytes/s", "flop/s", "operations/s", "s", "Hz", "W", "celsius", "bits")
PROVENANCES = ("measured", "reported", "spec", "derived")
MAX_NUMBER = 1e30
MAX_BYTES = 2**63 - 1  # messages carry sizes as int64
MAX_LIST = 4096

_NAME = re.compile(r"[a-z][a-z0-9_]*(\.[a-z0-9_]+)+")
_CAPABILITY = re.compile(r"\d{1,2}\.\d")
_BY_UNIT = {
    "bytes": (
        "memory.total memory.free memory.l2_size memory.l2_persisting_max memory.access_window_max memory.l2_knee "
        "memory.shared_per_block memory.shared_per_multiprocessor memory.shared_reserved_per_block partition.memory"
    ),
    "bytes/s": (
        "memory.read_bandwidth memory.copy_bandwidth memory.l2_bandwidth memory.read_by_size scheduling.phase_rate "
        "link.h2d_pinned link.d2h_pinned link.h2d_pageable link.d2h_pageable link.both_ways"
    ),
    "flop/s": (
        "compute.matmul_float32 compute.matmul_bfloat16 compute.matmul_float16 compute.matmul_float8 "
        "compute.matmul_int8"
    ),
    "s": (
        "memory.latency memory.l2_latency memory.latency_by_region scheduling.stream_launch scheduling.graph_node "
        "scheduling.graph_node_dependent scheduling.grid_barrier scheduling.event_record scheduling.event_wait "
        "scheduling.host_launch scheduling.phase scheduling.thread_handover"
    ),
    "operations/s": "scheduling.atomics",
    "Hz": "compute.max_clock memory.max_clock",
    "W": "power.limit power.max_limit",
    "": (
        "compute.cores compute.multiprocessors compute.warp_size compute.max_threads_per_block "
        "compute.max_threads_per_multiprocessor compute.max_blocks_per_multiprocessor "
        "compute.registers_per_multiprocessor compute.registers_per_block compute.async_engines "
        "partition.multiprocessors link.generation link.max_generation link.width link.max_width"
    ),
}
UNIT_OF = {name: unit for unit, names in _BY_UNIT.items() for name in names.split()}
_TEXTS = ("compute.capability", "compute.dtypes", "compute.instruction_set", "driver.version")
_FLAGS = ("compute.dependent_launch", "compute.cooperative_launch", "compute.cluster_launch")
_LISTS = (
    "memory.read_by_size",
    "memory.latency_by_region",
    "scheduling.atomics",
    "scheduling.throughput_by_block_size",
    "scheduling.occupancy_by_block_size",
)
_MAY_BE_NEGATIVE = ("scheduling.dependent_launch_gain",)  # dependent launch may cost more than it saves

# What a plan cannot be made without, by kind of device.
REQUIRED: Mapping[str, tuple[str, ...]] = {
    "cpu": (
        "compute.cores",
        "compute.instruction_set",
        "compute.matmul_float32",
        "memory.free",
        "memory.read_bandwidth",
        "scheduling.thread_handover",
    ),
    "cuda": (
        "compute.capability",
        "compute.matmul_bfloat16",
        "compute.multiprocessors",
        "memory.free",
        "memory.read_bandwidth",
        "memory.shared_per_block",
        "scheduling.graph_node",
    ),
}
REQUIRED = {**REQUIRED, **dict.fromkeys(("hip", "xpu"), (*REQUIRED["cuda"][1:], "compute.warp_size"))}


def missing_values(kind: str, names: Iterable[str]) -> tuple[str, ...]:
    """The required values of a device kind that are not among `names`."""
    held = set(names)
    return tuple(name for name in REQUIRED.get(kind, ()) if name not in held)


def check_name(name: str) -> None:
    """Raises ValueError unless `name` has the form "dimension.value"."""
    if not _NAME.fullmatch(name) or len(name) > 100:
        raise ValueError(f"{name[:100]!r} is not the name of a value; a name reads like memory.read_bandwidth")


def check_value(name: str, value: Any, unit: Any, provenance: Any) -> None:
    """Raises ValueError unless the value `name` may have this value, unit and provenance. Lists are tuples or lists."""
    if provenance not in PROVENANCES:
        raise ValueError(f"{name} has provenance {provenance!r}; one of {', '.join(PROVENANCES)} was expected")
    expected = UNIT_OF.get(name)
    if expected is not None and unit != expected:
        raise ValueError(f"{name} is in {unit!r}; {expected!r} was expected")
    if unit not in UNITS:
        raise ValueError(f"{name} is in {unit!r}; one of {', '.join(map(repr, UNITS))} was expected")
    kind = _kind_of(value)
    wanted = _wanted_kind(name, unit)
    if kind not in wanted:
        raise ValueError(f"{name} is a {kind}; a {' or '.join(wanted)} was expected")
    if name == "compute.capability" and not _CAPABILITY.fullmatch(value):
        raise ValueError(f"{name} is {value[:20]!r}; a text such as '9.0' was expected")
    numbers = value if isinstance(value, (tuple, list)) else (value,) if kind == "number" else ()
    if len(numbers) > MAX_LIST:
        raise ValueError(f"{name} has {len(numbers)} numbers; at most {MAX_LIST} were expected")
    for number in numbers:
        _check_number(name, number, unit)


def check_spread(name: str, spread: Any) -> None:
    """Raises ValueError unless `spread` is None or a finite number from 0."""
    if spread is None:
        return
    if _kind_of(spread) != "number" or not 0 <= spread <= MAX_NUMBER:
        raise ValueError(f"{name} has the spread {spread!r}; a number of 0 or more was expected")


def check_labels(name: str, labels: tuple[str, ...], value: Any) -> None:
    """Raises ValueError unless there are no labels, or one for each number of a list."""
    if labels and (not isinstance(value, (tuple, list)) or len(labels) != len(value)):
        count = len(value) if isinstance(value, (tuple, list)) else "no list of"
        raise ValueError(f"{name} has {len(labels)} labels for {count} numbers")


def _check_number(name: str, number: Any, unit: str) -> None:
    if _kind_of(number) != "number":
        raise ValueError(f"{name} holds a {_kind_of(number)}; numbers were expected")
    # A comparison and not float(): an integer of a thousand digits has no float.
    if not -MAX_NUMBER <= number <= (MAX_BYTES if unit == "bytes" else MAX_NUMBER):
        shown = number if isinstance(number, float) and not math.isfinite(number) else "beyond any device"
        raise ValueError(f"{name} is {shown}; a finite number was expected")
    if number < 0 and unit != "celsius" and name not in _MAY_BE_NEGATIVE:
        raise ValueError(f"{name} is {number}, which is negative; 0 or more was expected")


def _wanted_kind(name: str, unit: str) -> tuple[str, ...]:
    if name in _TEXTS:
        return ("text",)
    if name in _FLAGS:
        return ("flag",)
    if name in _LISTS:
        return ("list",)
    if name in UNIT_OF:
        return ("number",)
    return ("number", "list") if unit else ("number", "list", "text", "flag")


def _kind_of(value: Any) -> str:
    match value:
        case bool():
            return "flag"
        case int() | float():
            return "number"
        case str():
            return "text"
        case tuple() | list():
            return "list"
        case None:
            return "null"
        case _:
            return type(value).__name__
