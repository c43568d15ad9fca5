"""The checks of `dragoman doctor`. Each looks at one thing and says ok, warn or fail, with a line that fixes it."""

from __future__ import annotations

import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dragoman_cli.config import flag_of
from dragoman_cli.failure import EXTRAS, install_command, missing_module
from dragoman_cli.ports import port_problem
from dragoman_cli.ready import human_bytes
from dragoman_cli.up_settings import PORTS, UpSettings

if TYPE_CHECKING:
    from dragoman_agent.pal.found import FoundDevice

Level = Literal["ok", "warn", "fail"]

_MIN_FREE_BYTES = 2 << 30
_MIN_DISK_BYTES = 1 << 30
_MIN_FILES = 4096
# Two readings of the wall clock and of the monotonic clock this far apart mean that someone sets the wall clock.
_CLOCK_SAMPLE_SECONDS = 0.2
_MAX_DRIFT_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Check:
    """The outcome of one check."""

    name: str
    level: Level
    finding: str
    fix: str = ""


def run_checks(cache_dir: Path) -> list[Check]:
    """All checks, in the order in which things are needed. None raises."""
    checks: dict[str, Callable[[], Check | list[Check]]] = {
        "python": check_python,
        "extras": check_extras,
        "compiler": check_compiler,
        "devices": check_devices,
        "memory": check_memory,
        "cache": lambda: check_cache(cache_dir),
        "model": lambda: check_model(cache_dir),
        "ports": check_ports,
        "files": check_files,
        "clock": check_clock,
    }
    outcomes: list[Check] = []
    for name, check in checks.items():
        try:
            found = check()
        except Exception as error:  # a doctor that falls ill helps nobody
            found = Check(name, "warn", f"could not be checked: {type(error).__name__}: {error}")
        outcomes.extend(found if isinstance(found, list) else [found])
    return outcomes


def check_python() -> Check:
    """The interpreter."""
    version = platform.python_version()
    if sys.version_info >= (3, 13):
        return Check("python", "warn", f"{version} is newer than the tested 3.11 and 3.12", "use Python 3.12")
    return Check("python", "ok", f"{version} at {sys.executable}")


def check_extras() -> list[Check]:
    """The optional parts."""
    outcomes = []
    for extra in EXTRAS:
        missing = missing_module(extra)
        # Only the benchmarks need the last one.
        level: Level = "ok" if missing is None else "warn" if extra == "bench" else "fail"
        finding = "installed" if missing is None else f"not installed (no module {missing})"
        outcomes.append(Check(f"extra {extra}", level, finding, "" if missing is None else install_command(extra)))
    return outcomes


def check_compiler() -> Check:
    """The C++ compiler, with which the CPU kernels are built."""
    from dragoman_kernels.cpu.build import COMPILERS, find_compiler

    path = find_compiler()
    if path:
        return Check("compiler", "ok", path)
    return Check(
        "compiler",
        "warn",
        f"no C++ compiler ({', '.join(COMPILERS)}) is on PATH: the CPU runs the slower road through torch",
        "install g++ (Debian: apt install g++)",
    )


def check_devices() -> list[Check]:
    """The devices, each with what keeps it from being used and what limits it."""
    if missing_module("agent"):
        return [Check("device", "warn", "not looked at: the agent extra is missing", install_command("agent"))]
    from dragoman_agent.pal.attributes import take_inventory

    inventory = take_inventory()
    outcomes = [outcome for device in inventory.devices for outcome in _device_checks(device)]
    if not any(device.facts.kind == "cuda" and device.usable for device in inventory.devices):
        what, _, remedy = (inventory.cuda_problem or "no NVIDIA GPU can be used, see above").partition("; ")
        outcomes.append(Check("gpu", "warn", what, remedy or "none is needed; the CPU serves, more slowly"))
    return outcomes


def _device_checks(device: FoundDevice) -> list[Check]:
    """One line for the device, and one for each of its remarks. A GPU that only lacks a backend is no fault of the machine."""
    name = f"device {device.facts.kind}"
    problem = device.problem or device.runtime_problem
    if problem:
        level: Level = "warn" if device.facts.kind == "cuda" else "ok"
        what, _, remedy = problem.partition("; ")
        return [Check(name, level, f"{device.facts.name} is not used: {what}", remedy)]
    from dragoman_agent.pal.found import UNTESTED_KINDS

    size = f"{device.facts.architecture}, {human_bytes(device.facts.memory_bytes)}"
    found = Check(name, "ok", f"{device.facts.name}, {size}")
    if device.facts.kind in UNTESTED_KINDS:
        found = Check(
            name, "warn", f"{device.facts.name}, {size}, untested: this backend has never run on such a device"
        )
    remarks = [note.partition("; ") for note in device.notes]
    return [found, *(Check(name, "warn", what, remedy) for what, _, remedy in remarks)]


def check_memory() -> Check:
    """Memory for weights and KV blocks."""
    import psutil

    free = psutil.virtual_memory().available
    if free < _MIN_FREE_BYTES:
        return Check(
            "memory", "warn", f"{human_bytes(free)} free", "close other programs; the embedded model takes about 1 GiB"
        )
    return Check("memory", "ok", f"{human_bytes(free)} free")


def check_cache(cache_dir: Path) -> Check:
    """The folder for models, profiles and kernels."""
    fix = "set DRAGOMAN_CACHE_DIR to a folder that you can write to"
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache_dir):
            pass
    except OSError as error:
        return Check("cache", "fail", f"{cache_dir} cannot be written: {error.strerror}", fix)
    free = shutil.disk_usage(cache_dir).free
    if free < _MIN_DISK_BYTES:
        return Check("cache", "warn", f"{cache_dir}: only {human_bytes(free)} free", f"free some space, or {fix}")
    return Check("cache", "ok", f"{cache_dir}, {human_bytes(free)} free")


def check_model(cache_dir: Path) -> Check:
    """The embedded model."""
    from dragoman_agent.model.embedded import embedded_path, fetch_command
    from dragoman_agent.model.errors import ModelFileError

    try:
        return Check("model", "ok", str(embedded_path(cache_dir)))
    except ModelFileError as error:
        return Check("model", "warn", f"embedded: {error.what}", fetch_command(cache_dir))


def check_ports() -> list[Check]:
    """The ports that `dragoman up` takes."""
    outcomes = []
    for name in PORTS:
        port = getattr(UpSettings(), name)
        problem = port_problem("127.0.0.1", port)
        fix = f"stop it, or run dragoman up {flag_of(name)} PORT"
        outcomes.append(Check(f"port {port}", "warn", problem, fix) if problem else Check(f"port {port}", "ok", "free"))
    return outcomes


def check_files() -> Check:
    """The limit of open files: each connection is one."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _MIN_FILES:
        return Check("open files", "warn", f"limit {soft} (hard limit {hard})", f"ulimit -n {_MIN_FILES}")
    return Check("open files", "ok", f"limit {'none' if soft == resource.RLIM_INFINITY else soft}")


def check_clock() -> Check:
    """The wall clock, for logs and certificates; requests are timed by another one."""
    wall, steady = time.time(), time.monotonic()
    time.sleep(_CLOCK_SAMPLE_SECONDS)
    drift = (time.time() - wall) - (time.monotonic() - steady)
    if abs(drift) > _MAX_DRIFT_SECONDS:
        return Check("clock", "warn", f"the wall clock jumped by {drift:+.2f} s within a moment", "check NTP")
    built = Path(__file__).stat().st_mtime
    if time.time() < built - 86400:
        return Check("clock", "warn", "the wall clock is behind the date of this program", "set the date, or run NTP")
    return Check("clock", "ok", time.strftime("%Y-%m-%d %H:%M:%S %Z"))
