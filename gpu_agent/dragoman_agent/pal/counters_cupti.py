"""CUPTI's PM sampling through the optional package `cupti-python`: device-wide counters in short bursts.

python -m dragoman_agent.pal.counters_cupti INDEX [--seconds S]     prints one burst as JSON

A burst runs in a process of its own: the profiling library, its permissions and its faults stay out of the serving processes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from typing import Any

from dragoman_agent.pal.counters import CountersError, Reading, Source

BURST_SECONDS = 0.065  # 65 samples: decoding them takes 30 to 150 ms
EVERY_SECONDS = 30.0
_INTERVAL_NANOSECONDS = 1_000_000
_BUFFER_BYTES = 64 << 20
_TIMEOUT_SECONDS = 20.0
# One pass holds these on compute capability 9.0; on a card where it does not, the later ones are left out.
METRICS = {
    "dram": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "ipc": "sm__inst_executed.avg.per_cycle_active",
    "sm": "sm__cycles_active.avg.pct_of_peak_sustained_elapsed",
    "tensor": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "receive": "pcie__read_bytes.sum.per_second",
    "send": "pcie__write_bytes.sum.per_second",
}


class CuptiCounters:
    """Bursts at intervals; between them there is no reading."""

    source: Source = "cupti"

    def __init__(
        self, index: int, peak_dram_bytes_per_second: float | None, command: tuple[str, ...] | None = None
    ) -> None:
        """`index` is CUDA's. Raises CountersError where the package is not installed. `command` replaces the burst's."""
        if command is None and importlib.util.find_spec("cupti") is None:
            raise CountersError("the optional package cupti-python is not installed")
        self._command = command or (sys.executable, "-P", "-m", "dragoman_agent.pal.counters_cupti", str(index))
        self._peak = peak_dram_bytes_per_second
        self._next = 0.0

    def read(self) -> Reading | None:
        """See Counters. Blocks for a burst when one is due."""
        if time.monotonic() < self._next:
            return None
        self._next = time.monotonic() + EVERY_SECONDS
        try:
            done = subprocess.run(self._command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False)
        except (subprocess.TimeoutExpired, OSError) as error:
            raise CountersError(f"a burst of counters did not end: {error}") from None
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["no output"])[-1]
            raise CountersError(f"CUPTI's counters cannot be read: {last}")
        try:
            return reading_of(json.loads(done.stdout), self._peak)
        except (ValueError, TypeError, AttributeError) as error:
            raise CountersError(f"a burst of counters printed something unreadable: {error}") from None

    def close(self) -> None:
        """See Counters."""


def reading_of(burst: dict[str, float], peak: float | None) -> Reading:
    """The reading of one burst's medians."""
    dram = _ratio(burst.get("dram"))
    return Reading(
        source="cupti",
        seconds=float(burst["seconds"]),
        dram_bytes_per_second=None if dram is None or peak is None else dram * peak,
        dram_ratio=dram,
        sm_ratio=_ratio(burst.get("sm")),
        tensor_ratio=_ratio(burst.get("tensor")),
        instructions_per_cycle=burst.get("ipc"),
        receive_bytes_per_second=burst.get("receive"),
        send_bytes_per_second=burst.get("send"),
    )


def burst(index: int, seconds: float, metrics: dict[str, str]) -> dict[str, float]:
    """Means over one burst, by our names. Raises whatever CUPTI raises; needs `cupti-python`."""
    from cuda.bindings import driver
    from cupti import pm_sampling

    driver.cuInit(0)
    collector: Any = pm_sampling.Collector(device_index=index)
    collector.enable()
    try:
        taken = _configure(collector, dict(metrics))
        collector.start()
        begun = time.perf_counter()
        time.sleep(seconds)
        collector.stop()
        elapsed = time.perf_counter() - begun
        samples = list(collector.decode(max_samples=int(seconds * 1e9 / _INTERVAL_NANOSECONDS) + 16))
    finally:
        collector.disable()
    if not samples:
        raise RuntimeError("the burst holds no complete sample")
    means = {
        name: statistics.fmean(sample.metric_values[position] for sample in samples)
        for position, name in enumerate(taken)
    }
    return {"seconds": elapsed, "num_samples": float(len(samples)), **means}


def _configure(collector: Any, metrics: dict[str, str]) -> list[str]:
    """Configure as many of `metrics` as one pass takes, the first first; their names."""
    problem: Exception = RuntimeError("no metric was asked for")
    while metrics:
        try:
            collector.configure(
                metrics=list(metrics.values()),
                sampling_interval=_INTERVAL_NANOSECONDS,
                hardware_buffer_size=_BUFFER_BYTES,
            )
        except Exception as error:  # ValueError, or CUPTI's own error for a name that the card does not have
            problem = error
            metrics.popitem()
        else:
            return list(metrics)
    raise problem


def _ratio(percent: float | None) -> float | None:
    return None if percent is None else min(max(percent / 100, 0.0), 1.0)


def main(argv: list[str] | None = None) -> int:
    """Print one burst; a failure is one line and exit code 1."""
    parser = argparse.ArgumentParser(description="Print one burst of CUPTI's PM sampling as JSON.")
    parser.add_argument("index", type=int, help="CUDA's index of the device")
    parser.add_argument("--seconds", type=float, default=BURST_SECONDS, help="length of the burst")
    arguments = parser.parse_args(argv)
    try:
        print(json.dumps(burst(arguments.index, arguments.seconds, METRICS)))
    except Exception as error:  # the rim: whatever a profiling library raises is one line for the log
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
