"""Facts from NVML: free memory, who holds it, PCIe link, power and clocks. Each counter may be refused; the reason is kept."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from dragoman_agent.pal.changes import Holder
from dragoman_agent.pal.host import Host
from dragoman_agent.pal.profile import Value
from dragoman_agent.pal.steps import probe_step

logger = logging.getLogger(__name__)

_ENDING_SECONDS = 5.0  # for the memory of processes that were killed: a driver frees it within a second or two
_LOOK_SECONDS = 0.05


@dataclass(slots=True)
class NvmlReading:
    """What NVML said of one device. `refused` maps a value's name to NVML's words."""

    values: dict[str, Value] = field(default_factory=dict)
    holders: tuple[Holder, ...] = ()
    refused: dict[str, str] = field(default_factory=dict)
    mig_uuid: str = ""  # set where the device is a slice of a card

    def ask(self, name: str, unit: str, read: Callable[[], Any], factor: float | None = None, note: str = "") -> None:
        """Add one value, or the reason why it is not there."""
        try:
            value = read()
        except Exception as error:  # NVMLError, or a function that this NVML lacks: never a reason to stop the probe
            self.refused[name] = str(error) or type(error).__name__
            logger.debug("%s is absent: NVML: %s", name, self.refused[name])
            return
        if isinstance(value, bytes):
            value = value.decode(errors="replace")
        self.values[name] = Value(value * factor if factor is not None else value, unit, "reported", note=note)


@dataclass(frozen=True, slots=True)
class Nvml:
    """NVML between init and shutdown; `problem` says why it cannot be used, and then `library` is None."""

    library: Any = None
    problem: str = ""

    def read(self, uuid: str, address: str) -> NvmlReading:
        """Everything about the device with this UUID ("GPU-..." or "MIG-..."), else at this PCI address."""
        reading = NvmlReading()
        if self.library is None:
            return reading
        library = self.library
        own = _handle(library, uuid, address)
        if own is None:
            reading.refused["device"] = "NVML does not list it"
            return reading
        card = own
        if uuid.startswith("MIG-"):
            reading.mig_uuid = uuid
            card = _parent(library, own, reading)
        _read_memory(library, own, reading)
        _read_link(library, card, reading)
        _read_power(library, card, reading)
        _read_clocks(library, card, reading)
        reading.ask("driver.release", "", library.nvmlSystemGetDriverVersion)
        return reading

    def is_slice(self, uuid_body: str) -> bool:
        """Whether a slice of a card (a MIG instance) has this UUID, written without its prefix."""
        if self.library is None:
            return False
        return _by_uuid(self.library, f"GPU-{uuid_body}") is None and (
            _by_uuid(self.library, f"MIG-{uuid_body}") is not None
        )


@contextmanager
def open_nvml(host: Host) -> Iterator[Nvml]:
    """NVML for the length of the block. Never raises: a machine without it has less to tell, nothing more."""
    with probe_step("nvml") as step:
        nvml = _init(host)
        step.outcome = nvml.problem or "ok"
    try:
        yield nvml
    finally:
        if nvml.library is not None:
            try:
                nvml.library.nvmlShutdown()
            except Exception as error:
                logger.debug("NVML did not shut down: %s", error)


def _init(host: Host) -> Nvml:
    try:
        library = host.load_nvml()
    except ImportError:
        return Nvml(problem="the package nvidia-ml-py is not installed")
    try:
        library.nvmlInit()
    except Exception as error:
        return Nvml(problem=str(error) or type(error).__name__)
    return Nvml(library)


def _by_uuid(library: Any, uuid: str) -> Any | None:
    try:
        return library.nvmlDeviceGetHandleByUUID(uuid)
    except Exception:
        return None


def _handle(library: Any, uuid: str, address: str) -> Any | None:
    """By UUID, since a slice shares its card's address; a slice is never taken for its card."""
    handle = _by_uuid(library, uuid)
    if handle is not None or uuid.startswith("MIG-"):
        return handle
    try:
        return library.nvmlDeviceGetHandleByPciBusId(address.encode())
    except Exception as error:
        logger.debug("NVML finds neither %s nor %s: %s", uuid, address, error)
        return None


def _parent(library: Any, slice_handle: Any, reading: NvmlReading) -> Any:
    """The card a slice belongs to: link, power and clocks are the card's. Adds what the slice was given."""
    try:
        given = library.nvmlDeviceGetAttributes_v2(slice_handle)
        reading.values["partition.multiprocessors"] = Value(
            int(given.multiprocessorCount), "", "reported", note="MIG instance"
        )
        reading.values["partition.memory"] = Value(
            int(given.memorySizeMB) << 20, "bytes", "reported", note="MIG instance"
        )
    except Exception as error:
        reading.refused["partition.multiprocessors"] = str(error)
    try:
        return library.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(slice_handle)
    except Exception as error:
        logger.debug("NVML does not say which card the slice is of: %s", error)
        return slice_handle


def _read_memory(library: Any, handle: Any, reading: NvmlReading) -> None:
    _await_ending(library, handle)
    reading.ask("memory.free", "bytes", lambda: int(library.nvmlDeviceGetMemoryInfo(handle).free))
    held = {pid: size for pid, size in _holders(library, handle).items() if size}
    reading.holders = tuple(Holder(pid, _process_name(pid), size) for pid, size in sorted(held.items()))


def _holders(library: Any, handle: Any) -> dict[int, int]:
    """Bytes by process; 0 where the driver may not tell, as under WSL."""
    held: dict[int, int] = {}
    for name in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses"):
        try:
            entries = getattr(library, name)(handle)
        except Exception as error:
            logger.debug("who holds the memory is unknown: %s: %s", name, error)
            continue
        for entry in entries:
            held[int(entry.pid)] = max(held.get(int(entry.pid), 0), int(entry.usedGpuMemory or 0))
    return held


def _await_ending(library: Any, handle: Any) -> None:
    """An engine that was killed holds its memory until the driver has taken it down; who starts anew would plan without it."""
    deadline = time.monotonic() + _ENDING_SECONDS
    while ending := [pid for pid in _holders(library, handle) if is_ending(pid)]:
        if time.monotonic() > deadline:
            pids = ", ".join(map(str, ending))
            logger.warning(
                "processes that have ended still hold memory of the device (pid %s); the plan is made without it, start again "
                "once nvidia-smi lists them no more",
                pids,
            )
            return
        time.sleep(_LOOK_SECONDS)


def is_ending(pid: int) -> bool:
    """Whether a process has ended but for what the kernel takes down: it has no memory of its own. Linux alone tells."""
    try:
        return Path(f"/proc/{pid}/statm").read_text().startswith("0 ")
    except OSError:
        return False


def _read_link(library: Any, card: Any, reading: NvmlReading) -> None:
    idle = "drops while the card is idle"
    reading.ask("link.generation", "", lambda: int(library.nvmlDeviceGetCurrPcieLinkGeneration(card)), note=idle)
    reading.ask("link.max_generation", "", lambda: int(library.nvmlDeviceGetMaxPcieLinkGeneration(card)))
    reading.ask("link.width", "", lambda: int(library.nvmlDeviceGetCurrPcieLinkWidth(card)))
    reading.ask("link.max_width", "", lambda: int(library.nvmlDeviceGetMaxPcieLinkWidth(card)))


def _read_power(library: Any, card: Any, reading: NvmlReading) -> None:
    reading.ask("power.limit", "W", lambda: int(library.nvmlDeviceGetEnforcedPowerLimit(card)), 1e-3)
    reading.ask(
        "power.max_limit", "W", lambda: int(library.nvmlDeviceGetPowerManagementLimitConstraints(card)[1]), 1e-3
    )
    reading.ask(
        "power.slowdown_temperature",
        "celsius",
        lambda: int(library.nvmlDeviceGetTemperatureThreshold(card, library.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN)),
    )


def _read_clocks(library: Any, card: Any, reading: NvmlReading) -> None:
    """Lower-ranked sources: taken only where the driver reports none."""
    reading.ask(
        "compute.max_clock", "Hz", lambda: int(library.nvmlDeviceGetMaxClockInfo(card, library.NVML_CLOCK_SM)), 1e6
    )
    reading.ask(
        "memory.max_clock", "Hz", lambda: int(library.nvmlDeviceGetMaxClockInfo(card, library.NVML_CLOCK_MEM)), 1e6
    )
    reading.ask("memory.bus_width", "bits", lambda: int(library.nvmlDeviceGetMemoryBusWidth(card)))


def _process_name(pid: int) -> str:
    try:
        return psutil.Process(pid).name()
    except psutil.Error:  # of another container or gone
        return "a process outside this system's view"
