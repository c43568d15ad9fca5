"""Live samples of an NVIDIA GPU through NVML. What cannot be read is named once and then left out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from dragoman_agent.pal.live import IDLE_REASON, Sample
from dragoman_agent.pal.live_source import DeviceLostError, OwnPids, SourceGoneError
from dragoman_agent.pal.xid import DOUBLE_BIT_XID

logger = logging.getLogger(__name__)

_REASONS = {
    "nvmlClocksEventReasonGpuIdle": IDLE_REASON,
    "nvmlClocksEventReasonApplicationsClocksSetting": "application-clocks",
    "nvmlClocksEventReasonSwPowerCap": "power-cap",
    "nvmlClocksEventReasonHwSlowdown": "hw-slowdown",
    "nvmlClocksEventReasonSyncBoost": "sync-boost",
    "nvmlClocksEventReasonSwThermalSlowdown": "sw-thermal-slowdown",
    "nvmlClocksEventReasonHwThermalSlowdown": "hw-thermal-slowdown",
    "nvmlClocksEventReasonHwPowerBrakeSlowdown": "hw-power-brake",
    "nvmlClocksEventReasonDisplayClockSetting": "display-clocks",
}
# Asking again would give the same answer.
_FINAL_ERRORS = ("NVML_ERROR_NOT_SUPPORTED", "NVML_ERROR_NO_PERMISSION", "NVML_ERROR_FUNCTION_NOT_FOUND")
_LOST_ERRORS = ("NVML_ERROR_GPU_IS_LOST", "NVML_ERROR_RESET_REQUIRED")
_GONE_ERRORS = (
    "NVML_ERROR_UNINITIALIZED",
    "NVML_ERROR_DRIVER_NOT_LOADED",
    "NVML_ERROR_LIBRARY_NOT_FOUND",
    "NVML_ERROR_LIB_RM_VERSION_MISMATCH",
)


class NvmlSource:
    """Reads one GPU, found by its UUID: NVML's order of devices is not CUDA's."""

    name = "nvml"

    def __init__(self, load: Callable[[], Any], uuid: str, own_pids: OwnPids) -> None:
        """`load` gives the module `pynvml`; `own_pids` are the processes whose memory is the agent's own."""
        self._load = load
        self._uuid = uuid
        self._own_pids = own_pids
        self._nvml: Any = None
        self._handle: Any = None
        self._events: Any = None
        self._missing: dict[str, str] = {}  # what, why: never asked again
        self._used_at_open = 0

    @property
    def nvml(self) -> Any:
        """The open module, for whoever else reads this device."""
        return self._nvml

    @property
    def handle(self) -> Any:
        """The open device."""
        return self._handle

    def open(self) -> None:
        """See LiveSource."""
        nvml = self._load()
        try:
            nvml.nvmlInit()
            self._handle = nvml.nvmlDeviceGetHandleByUUID(nvml_uuid(self._uuid))
        except nvml.NVMLError as error:
            raise SourceGoneError(f"NVML cannot be read: {error}") from None
        self._nvml = nvml
        self._missing = {}
        self._used_at_open = 0
        self._listen()

    def _listen(self) -> None:
        """Ask for faults. Where the driver sends none, only the samples can tell."""
        nvml = self._nvml
        wanted = nvml.nvmlEventTypeXidCriticalError | nvml.nvmlEventTypeDoubleBitEccError
        try:
            supported = nvml.nvmlDeviceGetSupportedEventTypes(self._handle)
            events = nvml.nvmlEventSetCreate()
            nvml.nvmlDeviceRegisterEvents(self._handle, wanted & supported, events)
        except nvml.NVMLError as error:
            self._miss("faults (Xid)", error)
            return
        self._events = events

    def sample(self) -> Sample:
        """See LiveSource. About 40 ms where PCIe traffic is read, else under 5 ms."""
        nvml, handle = self._nvml, self._handle
        if nvml is None:
            raise SourceGoneError("NVML is not open")
        ask = self._ask
        memory = ask("memory", nvml.nvmlDeviceGetMemoryInfo, handle)
        utilization = ask("utilization", nvml.nvmlDeviceGetUtilizationRates, handle)
        bits = ask("clock reasons", nvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
        return Sample(
            source=self.name,
            temperature_celsius=ask("temperature", nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
            slowdown_celsius=ask(
                "slowdown temperature",
                nvml.nvmlDeviceGetTemperatureThreshold,
                handle,
                nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN,
            ),
            power_watts=_times(ask("power", nvml.nvmlDeviceGetPowerUsage, handle), 1e-3),
            power_limit_watts=_times(ask("power limit", nvml.nvmlDeviceGetEnforcedPowerLimit, handle), 1e-3),
            clock_hertz=_times(ask("clock", nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM), 1e6),
            memory_clock_hertz=_times(
                ask("memory clock", nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_MEM), 1e6
            ),
            link_generation=ask("link generation", nvml.nvmlDeviceGetCurrPcieLinkGeneration, handle),
            link_width=ask("link width", nvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
            receive_bytes_per_second=_times(
                ask("link traffic", nvml.nvmlDeviceGetPcieThroughput, handle, nvml.NVML_PCIE_UTIL_RX_BYTES), 1e3
            ),
            send_bytes_per_second=_times(
                ask("link traffic", nvml.nvmlDeviceGetPcieThroughput, handle, nvml.NVML_PCIE_UTIL_TX_BYTES), 1e3
            ),
            total_memory_bytes=None if memory is None else int(memory.total),
            free_memory_bytes=None if memory is None else int(memory.free),
            foreign_memory_bytes=None if memory is None else self._foreign_bytes(int(memory.used)),
            utilization_ratio=None if utilization is None else utilization.gpu / 100,
            reasons=None if bits is None else self._reasons(bits),
            missing=tuple(self._missing.items()),
        )

    def _foreign_bytes(self, used: int) -> int | None:
        """Memory that is not ours. None where the driver shows no process of ours, as in a container of its own."""
        nvml = self._nvml
        processes = self._ask("processes", nvml.nvmlDeviceGetComputeRunningProcesses, self._handle)
        if processes is None:
            return None
        own = set(self._own_pids())
        held = [process.usedGpuMemory for process in processes if process.pid in own]
        if not held or None in held:
            return self._growth(used)
        return max(used - sum(int(size) for size in held), 0)

    def _growth(self, used: int) -> int:
        """What was used beyond the first look: our own memory is taken once, so the rest is others'."""
        if not self._used_at_open:
            self._used_at_open = used
        return max(used - self._used_at_open, 0)

    def _reasons(self, bits: int) -> frozenset[str]:
        return frozenset(name for symbol, name in _REASONS.items() if bits & getattr(self._nvml, symbol))

    def wait(self, seconds: float) -> list[int]:
        """See LiveSource. Faults that have come together are returned together."""
        nvml = self._nvml
        if nvml is None or self._events is None:
            time.sleep(seconds)
            return []
        xids: list[int] = []
        timeout = int(seconds * 1000)
        while True:
            try:
                event = nvml.nvmlEventSetWait(self._events, timeout)
            except nvml.NVMLError as error:
                if error.value != nvml.NVML_ERROR_TIMEOUT:
                    self._miss("faults (Xid)", error)
                    self._events = None
                return xids
            timeout = 0
            is_xid = event.eventType == nvml.nvmlEventTypeXidCriticalError
            xids.append(int(event.eventData) if is_xid else DOUBLE_BIT_XID)

    def _ask(self, what: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """The answer, None where there is none. Raises DeviceLostError or SourceGoneError."""
        if what in self._missing:
            return None
        nvml = self._nvml
        try:
            return function(*arguments)
        except nvml.NVMLError as error:
            if self._is(error, _LOST_ERRORS):
                raise DeviceLostError(f"NVML says of the GPU: {error}") from None
            if self._is(error, _GONE_ERRORS):
                raise SourceGoneError(f"NVML cannot be read any more: {error}") from None
            if self._is(error, _FINAL_ERRORS):
                self._miss(what, error)
            return None

    def _miss(self, what: str, error: Exception) -> None:
        self._missing[what] = str(error)
        logger.info("NVML: %s cannot be read on this machine: %s", what, error)

    def _is(self, error: Any, names: tuple[str, ...]) -> bool:
        return any(error.value == getattr(self._nvml, name, None) for name in names)

    def close(self) -> None:
        """See LiveSource."""
        nvml, self._nvml = self._nvml, None
        if nvml is None:
            return
        try:
            if self._events is not None:
                nvml.nvmlEventSetFree(self._events)
            nvml.nvmlShutdown()
        except nvml.NVMLError as error:
            logger.debug("NVML did not close: %s", error)
        self._events = None


def nvml_uuid(uuid: str) -> str:
    """NVML's spelling of a UUID that may be 32 hexadecimal digits."""
    if uuid.startswith(("GPU-", "MIG-")):
        return uuid
    digits = uuid.replace("-", "")
    if len(digits) != 32:
        return uuid
    return "GPU-" + "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
