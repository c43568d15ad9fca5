"""Fault tests: each proves that its fault happened, then checks what must hold. `make faults` runs all of them.

`make test` collects SHORT_FILES only, with few streams. Without --record nothing is written.
"""

from __future__ import annotations

import os
import statistics
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.record import MIN_NUM_SAMPLES, make_record, save

FULL = os.environ.get("DRAGOMAN_FAULTS") == "full"
SHORT_FILES = (
    "test_f1_kill.py",
    "test_f16_tickets.py",
    "test_f19_events.py",
    "test_device.py",
    "test_f6_network.py",
    "test_f15_clock.py",
    "test_f22_versions.py",
    "test_f23_soak.py",
)
UNITS = {
    "stall_p50": "s",
    "stall_p99": "s",
    "detect_seconds": "s",
    "exit_seconds": "s",
    "freed_seconds": "s",
    "served_seconds": "s",
    "rss_slope": "bytes/min",
    "ttft_p99": "s",
}


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leaves the long ones to `make faults`."""
    is_long = collection_path.name.startswith("test_") and collection_path.name not in SHORT_FILES
    return True if is_long and not FULL else None


def pytest_addoption(parser: pytest.Parser) -> None:
    """--record keeps the figures."""
    parser.addoption("--record", action="store_true", help="write figures to benchmarks/results/faults.json")


class Figures:
    """Samples of (fault, load, metric), one a run."""

    def __init__(self) -> None:
        self.samples: defaultdict[tuple[str, str, str], list[float]] = defaultdict(list)

    def add(self, fault: str, load: str, **values: float) -> None:
        """The figures of one run."""
        for metric, value in values.items():
            self.samples[fault, load, metric].append(float(value))
        print(f"\n{fault} {load}: " + ", ".join(f"{name} {value:.4g}" for name, value in values.items()))

    def write(self) -> None:
        """Every figure that has enough samples becomes a record."""
        records = [
            make_record(
                bench=fault, case=load, metric=metric, unit=UNITS.get(metric, "1"), samples=values, predicted=None,
                command="make faults RECORD=1", packages=("grpcio", "uvloop"), device="null",
                note=f"worst of the runs: {max(values):.4g}; on {os.cpu_count()} shared cores, load average {os.getloadavg()[1]:.1f}",
            )
            for (fault, load, metric), values in self.samples.items()
            if len(values) >= MIN_NUM_SAMPLES and statistics.median(values) == statistics.median(values)
        ]  # fmt: skip
        if records:
            print(f"\nrecorded {len(records)} figures in {save('faults', records)}")


@pytest.fixture(scope="session")
def figures(request: pytest.FixtureRequest) -> Iterator[Figures]:
    """Where tests put their figures."""
    made = Figures()
    yield made
    if request.config.getoption("--record", default=False):
        made.write()


@pytest.fixture(scope="session")
def num_runs(request: pytest.FixtureRequest) -> int:
    """Rounds a fault is made: three when figures are recorded."""
    return MIN_NUM_SAMPLES if request.config.getoption("--record", default=False) else 1
