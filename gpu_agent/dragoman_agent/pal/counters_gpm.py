"""NVML's GPM counters: utilisation of DRAM, multiprocessors and tensor cores, and PCIe rates, over each interval."""

from __future__ import annotations

import time
from typing import Any

from dragoman_agent.pal.counters import CountersError, Reading, Source

_MIB = 1 << 20
# NVML's names of the metrics, and whether the card may lack one of them.
_METRICS = {
    "sm": "NVML_GPM_METRIC_SM_UTIL",
    "tensor": "NVML_GPM_METRIC_ANY_TENSOR_UTIL",
    "dram": "NVML_GPM_METRIC_DRAM_BW_UTIL",
    "send": "NVML_GPM_METRIC_PCIE_TX_PER_SEC",
    "receive": "NVML_GPM_METRIC_PCIE_RX_PER_SEC",
}


class GpmCounters:
    """Two samples in turn; a reading is what lies between them. Under 1 ms a call."""

    source: Source = "gpm"

    def __init__(self, nvml: Any, handle: Any, peak_dram_bytes_per_second: float | None) -> None:
        """`nvml` is the open module, `handle` its device. Raises CountersError where the card has no GPM."""
        self._nvml = nvml
        self._handle = handle
        self._peak = peak_dram_bytes_per_second
        self._samples: list[Any] = []
        self._taken_at: float | None = None
        self._newest = 0
        try:
            if not nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
                raise CountersError("this card has no GPM counters")
            for _ in range(2):
                self._samples.append(nvml.nvmlGpmSampleAlloc())
        except nvml.NVMLError as error:
            self.close()
            raise CountersError(f"GPM counters cannot be read: {error}") from None

    def read(self) -> Reading | None:
        """See Counters."""
        nvml, now = self._nvml, time.monotonic()
        before, self._newest = self._newest, 1 - self._newest
        try:
            nvml.nvmlGpmSampleGet(self._handle, self._samples[self._newest])
            taken_at, self._taken_at = self._taken_at, now
            if taken_at is None:
                return None
            values = self._between(self._samples[before], self._samples[self._newest])
        except nvml.NVMLError as error:
            raise CountersError(f"GPM counters cannot be read: {error}") from None
        dram = _ratio(values.get("dram"))
        return Reading(
            source=self.source,
            seconds=now - taken_at,
            dram_bytes_per_second=None if dram is None or self._peak is None else dram * self._peak,
            dram_ratio=dram,
            sm_ratio=_ratio(values.get("sm")),
            tensor_ratio=_ratio(values.get("tensor")),
            receive_bytes_per_second=_bytes(values.get("receive")),
            send_bytes_per_second=_bytes(values.get("send")),
        )

    def _between(self, first: Any, second: Any) -> dict[str, float]:
        """The metrics that this card has."""
        nvml = self._nvml
        wanted = nvml.c_nvmlGpmMetricsGet_t()
        wanted.version = nvml.NVML_GPM_METRICS_GET_VERSION
        wanted.numMetrics = len(_METRICS)
        wanted.sample1, wanted.sample2 = first, second
        for index, symbol in enumerate(_METRICS.values()):
            wanted.metrics[index].metricId = getattr(nvml, symbol)
        nvml.nvmlGpmMetricsGet(wanted)
        return {
            name: float(wanted.metrics[index].value)
            for index, name in enumerate(_METRICS)
            if wanted.metrics[index].nvmlReturn == nvml.NVML_SUCCESS
        }

    def close(self) -> None:
        """See Counters."""
        samples, self._samples = self._samples, []
        for sample in samples:
            try:
                self._nvml.nvmlGpmSampleFree(sample)
            except self._nvml.NVMLError:
                return  # NVML is gone, and with it what it held


def _ratio(percent: float | None) -> float | None:
    return None if percent is None else min(max(percent / 100, 0.0), 1.0)


def _bytes(mebibytes: float | None) -> float | None:
    return None if mebibytes is None else mebibytes * _MIB
