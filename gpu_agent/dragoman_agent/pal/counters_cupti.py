"""CUPTI's PM sampling through the optional package `cupti-python`: device-wide counters in short bursts.

python -m dragoman_agent.pal.counters_cupti INDEX [--seconds S]     prints one burst as JSON

A burst runs in a process of its own: the profiling library, its permissions and its faults stay out of the serving processes.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from dragoman_agent.pal.counters import CountersError, Reading, Source

BURST_SECONDS = 0.065  # of each group; decoding its 65 samples takes 30 to 150 ms
EVERY_SECONDS = 60.0  # a burst's process takes about 2.5 s of processor time
_INTERVAL_NANOSECONDS = 1_000_000
_BUFFER_BYTES = 64 << 20
_TIMEOUT_SECONDS = 20.0
# One pass a group. On a card that cannot collect a whole group, its later metrics are left out.
GROUPS: tuple[dict[str, str], ...] = (
    {
        "dram": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
        "ipc": "sm__inst_executed.avg.per_cycle_active",
        "sm": "sm__cycles_active.avg.pct_of_peak_sustained_elapsed",
        "tensor": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
        "receive": "pcie__read_bytes.sum.per_second",
        "send": "pcie__write_bytes.sum.per_second",
    },
    # The only name of the L2 hit rate that one pass takes on compute capability 9.0; writes count as hits.
    {"l2_hit": "LTS.TriageCompute.lts__average_t_sector_hit_rate_realtime.ratio"},
)


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
        l2_hit_ratio=burst.get("l2_hit"),
        receive_bytes_per_second=burst.get("receive"),
        send_bytes_per_second=burst.get("send"),
    )


def burst(index: int, seconds: float) -> dict[str, float]:
    """Means over one burst a group, by our names. Raises whatever CUPTI raises; needs `cupti-python`."""
    _load_library()
    from cuda.bindings import driver

    pm_sampling: Any = importlib.import_module("cupti.pm_sampling")
    driver.cuInit(0)
    collector: Any = pm_sampling.Collector(device_index=index)
    collector.enable()
    try:
        found = {"seconds": seconds}
        for number, metrics in enumerate(GROUPS):
            try:
                found.update(_collect(collector, seconds, dict(metrics)))
            except Exception as error:  # ValueError, or CUPTI's own error for what the card does not have
                if number == 0:
                    raise
                print(f"{', '.join(metrics)}: {error}", file=sys.stderr)
        return found
    finally:
        collector.disable()


def _load_library() -> None:
    """Load the CUPTI that came with `cupti-python`: torch may have brought an older one, which it does not fit."""
    spec = importlib.util.find_spec("cupti")
    if spec is None or spec.origin is None:
        return
    for folder in sorted(Path(spec.origin).parents[1].glob("nvidia/*/lib")):
        for library in sorted(folder.glob("libcupti.so.*")):
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def _collect(collector: Any, seconds: float, metrics: dict[str, str]) -> dict[str, float]:
    """Means of as many of `metrics` as one pass takes."""
    taken = _configure(collector, metrics)
    collector.start()
    time.sleep(seconds)
    collector.stop()
    samples = list(collector.decode(max_samples=int(seconds * 1e9 / _INTERVAL_NANOSECONDS) + 16))
    if not samples:
        raise RuntimeError("the burst holds no complete sample")
    return {
        name: statistics.fmean(sample.metric_values[position] for sample in samples)
        for position, name in enumerate(taken)
    }


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
        print(json.dumps(burst(arguments.index, arguments.seconds)))
    except Exception as error:  # the rim: whatever a profiling library raises is one line for the log
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
