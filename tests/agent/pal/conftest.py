"""Profiles of cards and shapes of models, to plan from."""

from collections.abc import Callable
from pathlib import Path

import pytest

from dragoman_agent.model.config import ModelConfig
from dragoman_agent.model.source import open_model
from dragoman_agent.pal.profile import DeviceFacts, Profile, Value, now

# As measured on an H200 (phase and rates of short kernels from the public operator tables).
_H200: dict[str, tuple[float | str, str]] = {
    "compute.capability": ("9.0", ""),
    "compute.multiprocessors": (132, ""),
    "compute.max_clock": (1.98e9, "Hz"),
    "compute.matmul_bfloat16": (7.77e14, "flop/s"),
    "compute.max_threads_per_multiprocessor": (2048, ""),
    "compute.max_blocks_per_multiprocessor": (32, ""),
    "memory.total": (150 << 30, "bytes"),
    "memory.free": (139 << 30, "bytes"),
    "memory.l2_size": (62914560, "bytes"),
    "memory.l2_bandwidth": (10e12, "bytes/s"),
    "memory.read_bandwidth": (4.61e12, "bytes/s"),
    "memory.shared_per_block": (232448, "bytes"),
    "memory.shared_per_multiprocessor": (233472, "bytes"),
    "scheduling.graph_node": (0.55e-6, "s"),
    "scheduling.phase": (3.75e-6, "s"),
    "scheduling.phase_rate": (4.2e12, "bytes/s"),
    "scheduling.host_launch": (3.4e-6, "s"),
    "link.h2d_pinned": (55.4e9, "bytes/s"),
}


@pytest.fixture
def card() -> Callable[..., Profile]:
    """`card({"memory.free": 8 << 30})`: an H200 with other values; None leaves one out."""

    def make(changes: dict[str, float | str | bool | None] | None = None) -> Profile:
        values = {name: Value(value, unit, "measured") for name, (value, unit) in _H200.items()}
        for name, value in (changes or {}).items():
            if value is None:
                values.pop(name)
            else:
                values[name] = Value(value, values[name].unit if name in values else "", "measured")
        free = values["memory.free"].value if "memory.free" in values else 0
        facts = DeviceFacts("cuda", 0, "a card", "sm_90", int(free) if isinstance(free, int) else 0, "id")
        return Profile("test", facts, "print", now(), values)

    return make


@pytest.fixture(scope="session")
def shapes() -> Callable[[str], ModelConfig]:
    """The shapes of a model that comes along, by name."""
    return lambda name: open_model(f"random:{name}", Path()).config
