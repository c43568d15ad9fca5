"""Reads the counters behind the indices on a real GPU, under loads whose counters are known.

python tests/gpu/check_indices.py      prints a line a counter, JSON to $OUT/indices.json, which benchmarks.record_gpu records; under 60 s. Exit 1 when one is out of
range or no counter could be read at all; a single one that is missing is named, not a failure.

Expected ranges: measured once on an H200 (a large bf16 product: 0.65 instructions a cycle, DRAM 15 %; a copy: 0.42 and 89 %; a copy
that stays in L2: DRAM 2 %).
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from benchmarks.card import environment

from dragoman_agent.engine.traffic import traffic_model
from dragoman_agent.model.config import ModelConfig
from dragoman_agent.pal.attributes import take_inventory
from dragoman_agent.pal.counters import CountersError, Reading, l2_hit_ratio, peak_dram_bytes_per_second
from dragoman_agent.pal.counters_cupti import CuptiCounters
from dragoman_agent.pal.counters_gpm import GpmCounters
from dragoman_agent.pal.live_nvml import NvmlSource
from dragoman_agent.pal.live_source import SourceGoneError, load_nvml
from dragoman_agent.pal.profile import Profile, now

CUPTI_ONLY = ("instructions_per_cycle", "l2_hit_ratio")
GPM_ONLY = ("derived_l2_hit_ratio",)


@dataclass(frozen=True)
class Load:
    """Work with the counters it should show; `num_bytes` are asked for and `flops` done by one call."""

    name: str
    call: Callable[[], object]
    num_bytes: float
    expected: dict[str, tuple[float, float]]


def loads(device: torch.device) -> list[Load]:
    big = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    small, small_target = source[: 8 << 20], target[: 8 << 20]
    host = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
    card = torch.empty_like(host, device=device)
    return [
        Load("matmul", lambda: big @ big, 3 * 2 * 8192**2, {"instructions_per_cycle": (0.4, 0.9), "dram_ratio": (0.03, 0.35), "sm_ratio": (0.8, 1.0), "tensor_ratio": (0.5, 1.0)}),
        Load("copy", lambda: target.copy_(source), 2 << 30, {"instructions_per_cycle": (0.2, 0.7), "dram_ratio": (0.8, 1.0), "derived_l2_hit_ratio": (0.0, 0.15)}),
        Load("copy-in-l2", lambda: small_target.copy_(small), 16 << 20, {"dram_ratio": (0.0, 0.15), "l2_hit_ratio": (0.4, 1.0), "derived_l2_hit_ratio": (0.85, 1.0)}),
        Load("host-to-device", lambda: card.copy_(host, non_blocking=True), 256 << 20, {"receive_bytes_per_second": (40e9, 70e9)}),
    ]  # fmt: skip


class Runner:
    """Keeps a load on the device from a thread."""

    def __init__(self, load: Load, device: torch.device) -> None:
        self._load = load
        self._device = device
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.calls: list[float] = []  # when each had ended

    def __enter__(self) -> Runner:
        self._thread.start()
        time.sleep(0.3)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(10)

    def _run(self) -> None:
        torch.cuda.set_device(self._device)
        while not self._stop.is_set():
            for _ in range(20):
                self._load.call()
            torch.cuda.synchronize(self._device)
            self.calls.append(time.monotonic())

    def calls_per_second(self) -> float:
        """Of the load, over the time it ran."""
        if len(self.calls) < 2:
            return 0.0
        return 20 * (len(self.calls) - 1) / (self.calls[-1] - self.calls[0])


def judge(reading: dict[str, Any], expected: dict[str, tuple[float, float]]) -> dict[str, str]:
    """Each expected value beside its range."""
    verdicts = {}
    for name, (low, high) in expected.items():
        value = reading.get(name)
        state = "missing" if value is None else "ok" if low <= value <= high else "OUT OF RANGE"
        verdicts[name] = f"{state}: {value if value is None else round(value, 4)} expected {low:g}..{high:g}"
    return verdicts


def measure(load: Load, counters: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Every source's reading under one load."""
    report: dict[str, Any] = {}
    readings: list[Reading | None] = []
    with Runner(load, device) as runner:
        gpm: GpmCounters | None = counters.get("gpm")
        if gpm is not None:
            gpm.read()
            times = []
            for _ in range(3):
                time.sleep(0.7)
                begun = time.perf_counter()
                readings.append(gpm.read())
                times.append(time.perf_counter() - begun)
            report["gpm"] = middle([reading for reading in readings if reading is not None])
            report["gpm"]["read_microseconds"] = round(1e6 * statistics.median(times))
        if (index := counters.get("cupti_index")) is not None:
            try:
                begun = time.perf_counter()
                reading = CuptiCounters(index, counters["peak"]).read()
                report["cupti"] = (
                    {**asdict(reading), "burst_process_seconds": round(time.perf_counter() - begun, 2)}
                    if reading
                    else {}
                )
            except CountersError as error:
                report["cupti"] = {"missing": str(error)}
        report["calls_per_second"] = runner.calls_per_second()
    asked = report["calls_per_second"] * load.num_bytes
    report["asked_bytes_per_second"] = asked
    for source in ("gpm", "cupti"):
        body = report.get(source, {})
        if body.get("dram_bytes_per_second") is not None:
            body["derived_l2_hit_ratio"] = l2_hit_ratio(body["dram_bytes_per_second"], asked)
        if source in report and "missing" not in body:
            body["samples"] = samples_of([one for one in readings if one is not None], asked) if source == "gpm" else {}
            # What is asked for is counted over the whole load, which a burst of the profiler is only a part of.
            others = GPM_ONLY if source == "cupti" else CUPTI_ONLY
            wanted = {name: span for name, span in load.expected.items() if name not in others}
            body["verdict"] = judge(body, wanted)
    return report


def middle(readings: list[Reading]) -> dict[str, Any]:
    """Medians of the readings."""
    bodies = [asdict(reading) for reading in readings]
    result: dict[str, Any] = {}
    for name in bodies[0]:
        values = [body[name] for body in bodies if isinstance(body[name], float)]
        result[name] = statistics.median(values) if values else None
    return result


def samples_of(readings: list[Reading], asked: float) -> dict[str, list[float]]:
    """Each reading's numbers by name; what L2 served is derived from each as from their medians."""
    found: dict[str, list[float]] = {}
    for reading in readings:
        numbers = {name: value for name, value in asdict(reading).items() if isinstance(value, float)}
        if reading.dram_bytes_per_second is not None:
            ratio = l2_hit_ratio(reading.dram_bytes_per_second, asked)
            numbers |= {"derived_l2_hit_ratio": ratio} if ratio is not None else {}
        for name, value in numbers.items():
            found.setdefault(name, []).append(value)
    return found


def main() -> int:
    """Print the report."""
    begun = time.monotonic()
    missing: dict[str, str] = {}
    if not torch.cuda.is_available():
        print("OFF torch sees no CUDA device")
        return 1
    device = torch.device("cuda", 0)
    found = next((d for d in take_inventory().devices if d.facts.kind == "cuda"), None)
    if found is None:
        print("OFF the inventory has no CUDA device")
        return 1
    profile = Profile("check", found.facts, found.fingerprint, now(), found.values)
    counters: dict[str, Any] = {"peak": peak_dram_bytes_per_second(profile), "cupti_index": 0}
    if counters["peak"] is None:
        missing["peak"] = "the inventory has no memory.max_clock or memory.bus_width"
    source = NvmlSource(load_nvml, found.facts.uuid, lambda: (os.getpid(),))
    report: dict[str, Any] = {**environment(found.facts.index), "peak_dram_bytes_per_second": counters["peak"]}
    try:
        source.open()
        begun_sample = time.perf_counter()
        sample = source.sample()
        report["sample_milliseconds"] = round(1e3 * (time.perf_counter() - begun_sample), 1)
        report["sample"] = {name: (sorted(v) if isinstance(v, frozenset) else v) for name, v in asdict(sample).items()}
        try:
            counters["gpm"] = GpmCounters(source.nvml, source.handle, counters["peak"])
        except CountersError as error:
            missing["gpm"] = str(error)
    except SourceGoneError as error:
        missing["nvml"] = str(error)
    try:
        CuptiCounters(0, counters["peak"])
    except CountersError as error:
        missing["cupti"] = str(error)
        counters["cupti_index"] = None
    report["loads"] = {load.name: measure(load, counters, device) for load in loads(device)}
    if source.nvml is not None:
        report["sample_under_load"] = asdict(source.sample())["missing"]
    qwen = ModelConfig("Qwen3-0.6B", "qwen3", 28, 1024, 3072, 16, 8, 128, 151936, 40960, 1e6, 1e-6, True)
    l2 = float(found.values["memory.l2_size"].value) if "memory.l2_size" in found.values else 0.0  # type: ignore[arg-type]
    model = traffic_model(qwen, 2 * qwen.num_parameters, l2)
    report["predicted_hit_ratio_qwen3_0.6b"] = {
        f"decode {batch}": model.step(batch, 0, batch * 1000).hit_ratio for batch in (1, 64, 256)
    } | {"prefill 2048": model.step(0, 2048, 2048).hit_ratio}
    report["missing"] = missing
    report["seconds"] = round(time.monotonic() - begun, 1)
    source.close()
    if "OUT" in os.environ:
        (Path(os.environ["OUT"]) / "indices.json").write_text(json.dumps(report, indent=1, default=list))
    return show(report)


def show(report: dict[str, Any]) -> int:
    """A line a counter; 1 when one is out of range or none was read."""
    num_read = num_off = 0
    for load, body in report["loads"].items():
        for reader in ("gpm", "cupti"):
            for name, verdict in body.get(reader, {}).get("verdict", {}).items():
                num_read += not verdict.startswith("missing")
                num_off += verdict.startswith("OUT")
                print(f"{'OFF' if verdict.startswith('OUT') else 'ok'} {load} {reader} {name} {verdict}")
            if "missing" in body.get(reader, {}):
                print(f"missing {load} {reader}: {body[reader]['missing']}")
    print(f"missing {report['missing']}; {report['seconds']} s")
    return 1 if num_off or not num_read else 0


if __name__ == "__main__":
    sys.exit(main())
