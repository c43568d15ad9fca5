"""Where facts are read from: this machine, or one that a test plays."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any


def _driver() -> ModuleType:
    return importlib.import_module("cuda.bindings.driver")


def _nvml() -> ModuleType:
    return importlib.import_module("pynvml")


def _torch_devices(kind: str) -> list[dict[str, Any]]:
    from dragoman_agent.pal.torch_devices import list_in_a_process

    return list_in_a_process(kind)


def _can_open(path: Path) -> bool:
    return os.access(path, os.R_OK | os.W_OK)


@dataclass(frozen=True, slots=True)
class Host:
    """The operating system as the facts see it. Both loaders raise ImportError where the package is not installed.

    `list_torch` gives the devices that torch lists of a kind, see `torch_devices.py`.
    """

    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    root: Path = Path("/")
    load_driver: Callable[[], Any] = _driver
    load_nvml: Callable[[], Any] = _nvml
    can_open: Callable[[Path], bool] = _can_open
    list_torch: Callable[[str], list[dict[str, Any]]] = _torch_devices

    def path(self, absolute: str) -> Path:
        """A path of the host, such as "/proc/version"."""
        return self.root / absolute.lstrip("/")

    def read(self, absolute: str) -> str:
        """A small text file, stripped; empty where it cannot be read."""
        try:
            return self.path(absolute).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""


def this_host() -> Host:
    """The machine this process runs on."""
    return Host()
