"""A stand-in for the module `pynvml`: one GPU whose state a test changes second by second.

In a test: `fake = FakeNvml(); fake.change(sm_mhz=990, reasons=FakeNvml.HW_THERMAL)`. In an agent process: name this module in
DRAGOMAN_NVML_MODULE and a JSON file of changes in FAKE_NVML_STATE; the file is read again at each call. Errors, constants and
structures are the real module's, so a name that NVML does not have fails here too.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml

UUID = "GPU-00112233-4455-6677-8899-aabbccddeeff"
STATE_VARIABLE = "FAKE_NVML_STATE"
GB = 10**9


@dataclass
class State:
    """What the GPU shows; units are NVML's."""

    sm_mhz: int = 1980
    memory_mhz: int = 3201
    celsius: int = 45
    slowdown_celsius: int = 89
    power_mw: int = 300_000
    limit_mw: int = 700_000
    generation: int = 5
    width: int = 16
    total: int = 141 * GB
    used: int = 60 * GB
    processes: list[list[int]] = field(default_factory=list)  # [pid, bytes]
    reasons: int = 0
    busy_percent: int = 90
    receive_kb: int = 2_000
    send_kb: int = 1_000
    gpm: dict[str, float] | None = field(
        default_factory=lambda: {"2": 80.0, "5": 30.0, "10": 60.0, "20": 100.0, "21": 200.0}
    )
    xids: list[int] = field(default_factory=list)  # each is delivered once
    errors: dict[str, int] = field(default_factory=dict)  # function -> NVML error code; "*" is every function


class FakeNvml:
    """The functions our code calls. Not listed here: not there, as with an old NVML."""

    HW_THERMAL = pynvml.nvmlClocksEventReasonHwThermalSlowdown
    IDLE = pynvml.nvmlClocksEventReasonGpuIdle
    POWER_CAP = pynvml.nvmlClocksEventReasonSwPowerCap

    def __init__(self, state_file: str = "") -> None:
        self.state = State()
        self.calls: list[str] = []
        self.num_open = 0
        self._file = Path(state_file) if state_file else None
        self._delivered = 0
        self._raised = threading.Condition()
        self._pending: deque[int] = deque()

    def change(self, **changes: Any) -> None:
        """From now on."""
        for name, value in changes.items():
            if not hasattr(self.state, name):
                raise AttributeError(f"the fake has no {name}")
            setattr(self.state, name, value)
        with self._raised:
            self._raised.notify_all()

    def __getattr__(self, name: str) -> Any:
        """Constants, errors and structures are the real ones."""
        if name.startswith("nvml") and callable(getattr(pynvml, name, None)):
            raise AttributeError(f"the fake has no function {name}")
        return getattr(pynvml, name)

    def _enter(self, function: str) -> State:
        self.calls.append(function)
        self._read_file()
        for name in (function, "*"):
            if name in self.state.errors:
                raise pynvml.NVMLError(self.state.errors[name])
        if self.num_open <= 0 and function != "nvmlInit":
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)
        return self.state

    def _read_file(self) -> None:
        if self._file is None:
            return
        try:
            wanted = json.loads(self._file.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # it is being written
            return
        self.state = State()
        for name, value in wanted.items():
            setattr(self.state, name, value)

    def nvmlInit(self) -> None:
        self._enter("nvmlInit")
        self.num_open += 1

    def nvmlShutdown(self) -> None:
        self._enter("nvmlShutdown")
        self.num_open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self._enter("nvmlDeviceGetHandleByUUID")
        return uuid

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        state = self._enter("nvmlDeviceGetMemoryInfo")
        return SimpleNamespace(total=state.total, used=state.used, free=state.total - state.used)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> Any:
        state = self._enter("nvmlDeviceGetComputeRunningProcesses")
        return [SimpleNamespace(pid=pid, usedGpuMemory=held) for pid, held in state.processes]

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        return SimpleNamespace(gpu=self._enter("nvmlDeviceGetUtilizationRates").busy_percent, memory=0)

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: str) -> int:
        return self._enter("nvmlDeviceGetCurrentClocksEventReasons").reasons

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        return self._enter("nvmlDeviceGetTemperature").celsius

    def nvmlDeviceGetTemperatureThreshold(self, handle: str, kind: int) -> int:
        return self._enter("nvmlDeviceGetTemperatureThreshold").slowdown_celsius

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        return self._enter("nvmlDeviceGetPowerUsage").power_mw

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: str) -> int:
        return self._enter("nvmlDeviceGetEnforcedPowerLimit").limit_mw

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        state = self._enter("nvmlDeviceGetClockInfo")
        return state.memory_mhz if kind == pynvml.NVML_CLOCK_MEM else state.sm_mhz

    def nvmlDeviceGetCurrPcieLinkGeneration(self, handle: str) -> int:
        return self._enter("nvmlDeviceGetCurrPcieLinkGeneration").generation

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: str) -> int:
        return self._enter("nvmlDeviceGetCurrPcieLinkWidth").width

    def nvmlDeviceGetPcieThroughput(self, handle: str, counter: int) -> int:
        state = self._enter("nvmlDeviceGetPcieThroughput")
        return state.send_kb if counter == pynvml.NVML_PCIE_UTIL_TX_BYTES else state.receive_kb

    # Faults.

    def nvmlDeviceGetSupportedEventTypes(self, handle: str) -> int:
        self._enter("nvmlDeviceGetSupportedEventTypes")
        return int(pynvml.nvmlEventTypeXidCriticalError | pynvml.nvmlEventTypeDoubleBitEccError)

    def nvmlEventSetCreate(self) -> str:
        self._enter("nvmlEventSetCreate")
        return "events"

    def nvmlDeviceRegisterEvents(self, handle: str, kinds: int, events: str) -> None:
        self._enter("nvmlDeviceRegisterEvents")

    def nvmlEventSetFree(self, events: str) -> None:
        self._enter("nvmlEventSetFree")

    def nvmlEventSetWait(self, events: str, timeout_ms: int) -> Any:
        """Waits as the real one does: until a fault comes or the time is over."""
        end = time.monotonic() + timeout_ms / 1000
        while True:
            state = self._enter("nvmlEventSetWait")
            if self._delivered < len(state.xids):
                self._delivered += 1
                return SimpleNamespace(
                    eventType=pynvml.nvmlEventTypeXidCriticalError, eventData=state.xids[self._delivered - 1]
                )
            left = end - time.monotonic()
            if left <= 0:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)
            with self._raised:
                self._raised.wait(min(left, 0.05))

    # GPM.

    def nvmlGpmQueryDeviceSupport(self, handle: str) -> Any:
        return SimpleNamespace(isSupportedDevice=int(self._enter("nvmlGpmQueryDeviceSupport").gpm is not None))

    def nvmlGpmSampleAlloc(self) -> Any:
        self._enter("nvmlGpmSampleAlloc")
        return pynvml.c_nvmlGpmSample_t()

    def nvmlGpmSampleFree(self, sample: Any) -> None:
        self._enter("nvmlGpmSampleFree")

    def nvmlGpmSampleGet(self, handle: str, sample: Any) -> Any:
        self._enter("nvmlGpmSampleGet")
        return sample

    def nvmlGpmMetricsGet(self, wanted: Any) -> Any:
        gpm = self._enter("nvmlGpmMetricsGet").gpm or {}
        for index in range(wanted.numMetrics):
            metric = wanted.metrics[index]
            known = str(metric.metricId) in gpm
            metric.nvmlReturn = pynvml.NVML_SUCCESS if known else pynvml.NVML_ERROR_NOT_SUPPORTED
            metric.value = gpm.get(str(metric.metricId), 0.0)
        return wanted


_of_process: FakeNvml | None = None


def __getattr__(name: str) -> Any:
    """The module itself as NVML, for an agent process."""
    global _of_process
    if name.startswith("__"):
        raise AttributeError(name)
    if _of_process is None:
        _of_process = FakeNvml(os.environ.get(STATE_VARIABLE, ""))
    return getattr(_of_process, name)
