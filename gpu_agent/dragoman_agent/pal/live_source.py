"""Where live samples come from: the protocol, its errors, and the choice of a source for a device."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from dragoman_agent.pal.live import CPU_THRESHOLDS, GPU_THRESHOLDS, Sample, Thresholds
from dragoman_agent.pal.profile import DeviceFacts
from dragoman_cli.failure import install_command

# For tests: the module to use as NVML, for a device of any kind.
NVML_MODULE_VARIABLE = "DRAGOMAN_NVML_MODULE"
OwnPids = Callable[[], Iterable[int]]


class SourceGoneError(Exception):
    """The source cannot be read now: its library is gone, or was never there. The message says why."""


class DeviceLostError(Exception):
    """The source says that the device itself is gone."""


class LiveSource(Protocol):
    """Reads one device. Every method may block for milliseconds: called from a thread of its own, one at a time."""

    name: str

    def open(self) -> None:
        """Begin. Raises SourceGoneError."""

    def sample(self) -> Sample:
        """One look. Raises SourceGoneError or DeviceLostError."""

    def wait(self, seconds: float) -> list[int]:
        """Sleep for `seconds`, or less when faults came meanwhile: their Xids."""

    def close(self) -> None:
        """Let go. Safe at any time."""


def source_for(
    facts: DeviceFacts, own_pids: OwnPids, environ: Mapping[str, str] = os.environ
) -> tuple[LiveSource, Thresholds]:
    """The source of live samples for a device, and the thresholds that fit it."""
    from dragoman_agent.pal.live_nvml import NvmlSource
    from dragoman_agent.pal.live_os import OsSource

    stand_in = environ.get(NVML_MODULE_VARIABLE, "")
    if stand_in or facts.kind == "cuda":
        return NvmlSource(lambda: load_nvml(stand_in), facts.uuid, own_pids), GPU_THRESHOLDS
    return OsSource(own_pids), CPU_THRESHOLDS


def load_nvml(module: str = "") -> Any:
    """NVML's Python module, imported when it is first needed. Raises SourceGoneError."""
    try:
        return importlib.import_module(module or "pynvml")
    except ImportError as error:
        raise SourceGoneError(f"NVML cannot be used ({error}); run: {install_command('agent')}") from None
