"""The GPU probe against itself, against an independent measurement of an H200, and against ncu's counters.

python tests/gpu/check_probe.py [--out DIR] [--runs 3] [--sm-limit 24] [--seconds 240]
Each kind of probe --runs times: quick with nothing compiled before, quick again, full, quick under a limit of multiprocessors and
memory. Prints each value of the runs and what differs, writes probe-check.json (benchmarks.record_gpu records it), profile.json and
h200.json (for the library) to DIR (or $OUT). Ends within --seconds, about 110 on an H200: what no time is left for is said. Exit 1
when a value is short of its anchor.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import io
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from dragoman_agent.device.partition import MEMORY_LIMIT as MEMORY_LIMIT_NAME
from dragoman_agent.device.partition import SM_LIMIT
from dragoman_agent.pal.attributes import FoundDevice, take_inventory
from dragoman_agent.pal.probe_process import ProbeRun, run_probe
from dragoman_agent.pal.probe_steps import FULL_STEPS, QUICK_STEPS
from dragoman_agent.pal.profile import Profile, Value, now
from dragoman_kernels.registry import default_registry

DEADLINE_SECONDS = 240.0
MAX_RUN_DIFFERENCE = 0.05
MAX_ANCHOR_DIFFERENCE = 0.03
MAX_COUNTER_DIFFERENCE = 0.10
NCU = "/usr/local/cuda/bin/ncu"
NCU_BYTES = 1 << 30
NCU_LAUNCHES = 3
MEMORY_LIMIT = 8 << 30

# Measured on the same card with other programs (Triton, torch, C++): the roofline table of the project's H200 anchors.
ANCHORS: dict[str, float] = {
    "memory.read_bandwidth": 4613.6e9,
    "memory.copy_bandwidth": 4314.3e9,
    "compute.matmul_bfloat16": 776.8e12,
    "compute.matmul_float16": 747.1e12,
    "compute.matmul_float8": 1423.0e12,
    "scheduling.graph_node": 0.547e-6,
    "scheduling.graph_node_dependent": 0.475e-6,
    "scheduling.grid_barrier": 0.94e-6,
    "link.h2d_pinned": 55.43e9,
    "link.d2h_pinned": 55.32e9,
    "link.h2d_pageable": 16.54e9,
    "link.both_ways": 100.94e9,
}
ANCHORS_BY_SIZE = {2: 696.8e9, 8: 1997.8e9, 32: 3188.8e9, 128: 4277.9e9, 512: 4503.7e9, 1152: 4559.4e9, 2304: 4581.4e9}
L2_BYTES = 62_914_560
# What the streams' contracts say of L2: a read-once stream never hits; of a copy's sectors half are writes, which do.
L2_HIT_RATES = {"read": 0.0, "copy": 50.0}


def probe_once(index: int, steps: Sequence[str], cache: Path, *, full: bool, **environ: str) -> tuple[ProbeRun, float]:
    """One measuring process, as the agent runs it, and its wall time."""

    def command(left: Sequence[str]) -> list[str]:
        options = [*(["--full"] if full else []), "--cache", str(cache), "--steps", ",".join(left)]
        program = [sys.executable, "-P", "-m", "dragoman_agent.device.cuda_probe", str(index), *options]
        return ["env", *(f"{key}={value}" for key, value in environ.items()), *program]

    start = time.perf_counter()
    run = run_probe(command, steps)
    return run, time.perf_counter() - start


def entries(value: Value) -> list[tuple[str, float]]:
    """A number, or each of a list's, with a label."""
    if isinstance(value.value, tuple):
        return list(zip(value.labels, value.value, strict=True))
    return [("", float(value.value))] if isinstance(value.value, int | float) else []


def differences(runs: Sequence[ProbeRun]) -> dict[str, dict[str, Any]]:
    """Every entry of every value over the runs: (max - min) / median."""
    table: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(name for run in runs for name in run.values):
        held = [run.values[name] for run in runs if name in run.values]
        for entry in zip(*(entries(value) for value in held), strict=True):
            numbers = [number for _, number in entry]
            median = statistics.median(numbers)
            key = f"{name}[{entry[0][0]}]" if entry[0][0] else name
            difference = (max(numbers) - min(numbers)) / abs(median) if median else 0.0
            table[key] = {"unit": held[0].unit, "runs": numbers, "difference": round(difference, 4)}
    return table


def anchored(values: dict[str, Value]) -> dict[str, dict[str, Any]]:
    """Ours beside the independent figure: within the bar, better, or short of it."""
    pairs = {name: (float(values[name].value), anchor) for name, anchor in ANCHORS.items() if name in values}  # type: ignore[arg-type]
    if "memory.read_by_size" in values:
        ours = dict(entries(values["memory.read_by_size"]))
        for mib, anchor in ANCHORS_BY_SIZE.items():
            if str(mib << 20) in ours:
                pairs[f"memory.read_by_size[{mib} MiB]"] = (ours[str(mib << 20)], anchor)
    table = {}
    for name, (own, anchor) in pairs.items():
        is_time = name.startswith("scheduling.")
        gain = anchor / own - 1 if is_time else own / anchor - 1
        verdict = "short" if gain < -MAX_ANCHOR_DIFFERENCE else "better" if gain > MAX_ANCHOR_DIFFERENCE else "within"
        table[name] = {"ours": own, "anchor": anchor, "gain": round(gain, 4), "verdict": verdict}
    for name in ANCHORS:
        table.setdefault(name, {"ours": None, "anchor": ANCHORS[name], "gain": None, "verdict": "not measured"})
    return table


def median_values(runs: Sequence[ProbeRun]) -> dict[str, Value]:
    """Each value of the run that has the median; spreads cover the runs too."""
    values = {}
    for name in dict.fromkeys(name for run in runs for name in run.values):
        held = [run.values[name] for run in runs if name in run.values]
        if any(isinstance(value.value, str | bool) for value in held):
            values[name] = held[-1]
            continue
        columns = list(zip(*(entries(value) for value in held), strict=True))
        medians = [statistics.median(number for _, number in column) for column in columns]
        across = max(
            (max(n for _, n in column) - min(n for _, n in column)) / abs(median) if median else 0.0
            for column, median in zip(columns, medians, strict=True)
        )
        typical = min(held, key=lambda value: abs(entries(value)[0][1] - medians[0]))
        value = tuple(medians) if isinstance(typical.value, tuple) else medians[0]
        note = f"{typical.note}; median of {len(held)} probes" if typical.note else f"median of {len(held)} probes"
        values[name] = dataclasses.replace(typical, value=value, spread=max(typical.spread or 0.0, across), note=note)
    return values


def library_profile(device: FoundDevice, values: dict[str, Value]) -> tuple[Profile, Profile]:
    """This card's profile, and the same without what names this one card or this moment."""
    every = {**device.values, **values, "probe.extent": Value("full", "", "reported")}
    own = Profile("h200", device.facts, device.fingerprint, now(), every)
    moment = ("container.", "partition.", "link.pci_address")
    lasting = {name: value for name, value in every.items() if not name.startswith(moment)}
    facts = dataclasses.replace(device.facts, index=0, uuid="")
    return own, dataclasses.replace(own, device=facts, fingerprint="", values=lasting)


def ncu_counters(kind: str) -> dict[str, list[float]]:
    """DRAM bytes and L2 hit rate of `NCU_LAUNCHES` launches of one kernel, from ncu, which empties the caches before each."""
    program = NCU if Path(NCU).exists() else shutil.which("ncu")
    if program is None:
        raise FileNotFoundError(f"no ncu at {NCU} nor in PATH")
    metrics = "dram__bytes_read.sum,dram__bytes_write.sum,lts__t_sector_hit_rate.pct"
    done = subprocess.run(
        [program, "--clock-control", "none", "--csv", "--page", "raw", "--print-units", "base", "--metrics", metrics,
         "-k", f"regex:^{kind}_", "-c", f"{NCU_LAUNCHES}", sys.executable, "-P", __file__, "--target", kind],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
    if len(lines) < 3:
        raise RuntimeError(f"ncu gave no table: {(done.stdout + done.stderr).strip()[-600:]}")
    _, *rows = csv.DictReader(io.StringIO("\n".join(lines)))  # the first has the units
    return {name: [float(row[name].replace(",", "")) for row in rows] for name in metrics.split(",")}


def against_contract(kind: str) -> dict[str, Any]:
    """ncu's counters of one kernel beside what its contract says."""
    contract = default_registry().get(f"probe.{kind}_8").contract
    predicted = contract.cost({"num_bytes": NCU_BYTES}).num_bytes
    counted = ncu_counters(kind)
    read, written = counted["dram__bytes_read.sum"], counted["dram__bytes_write.sum"]
    counts = [a + (b if kind == "copy" else 0) for a, b in zip(read, written, strict=True)]
    moved, hit = statistics.median(counts), statistics.median(counted["lts__t_sector_hit_rate.pct"])
    return {
        "counters": counted,
        "bytes_predicted": predicted,
        "bytes_counted": counts,
        "hit_rates": counted["lts__t_sector_hit_rate.pct"],
        "bytes_difference": round(moved / predicted - 1, 4),
        "hit_rate_predicted": L2_HIT_RATES[kind],
        "hit_rate_difference_points": round(hit - L2_HIT_RATES[kind], 2),
        "passed": abs(moved / predicted - 1) <= MAX_COUNTER_DIFFERENCE
        and abs(hit - L2_HIT_RATES[kind]) <= 100 * MAX_COUNTER_DIFFERENCE,
    }


def target(kind: str, index: int) -> None:
    """What ncu looks at: one stream over fresh memory, nothing held (ncu waits for each kernel)."""
    from dragoman_kernels.probe.driver import Session, pointer, u32, u64

    with Session(index) as session, session.memory(NCU_BYTES) as source, session.memory(NCU_BYTES) as other:
        words = u64(NCU_BYTES // 16)
        for address in (source, other):
            session.launch("stream", "fill", 1024, 256, [pointer(address), words, u32(1)])()
        chunk = 8 * 256
        last = [u32(chunk), pointer(other)] if kind == "read" else [u32(chunk)]
        middle = [pointer(source), words] if kind == "read" else [pointer(source), pointer(other), words]
        for _ in range(NCU_LAUNCHES):
            session.launch("stream", f"{kind}_8", NCU_BYTES // 16 // chunk, 256, [*middle, *last])()
        session.synchronize()


class Report:
    """Collects the parts; on disk after each, so that a run cut short still tells."""

    def __init__(self, folder: Path, seconds: float = DEADLINE_SECONDS) -> None:
        self._path = folder / "probe-check.json"
        self._start = time.monotonic()
        self._seconds = seconds
        self.body: dict[str, Any] = {}

    def left(self) -> float:
        """Seconds left."""
        return self._seconds - self.spent()

    def spent(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    def add(self, part: str, body: Any) -> None:
        """Keep a part and write all."""
        self.body[part] = body
        self._path.write_text(json.dumps(self.body, indent=1) + "\n")

    def attempt(self, part: str, needs_seconds: float, work: Any) -> Any:
        """Run a part where there is time; its failure is an entry, not an end."""
        if self.left() < needs_seconds:
            self.add(part, f"left out: {self.left():.0f} s left, about {needs_seconds:.0f} s needed")
            return None
        try:
            result = work()
        except Exception as error:  # every part is reported, whatever one of them does
            self.add(part, f"failed: {type(error).__name__}: {error}")
            print(f"{part}: failed: {type(error).__name__}: {error}")
            return None
        self.add(part, result)
        return result


def run_json(run: ProbeRun, seconds: float) -> dict[str, Any]:
    """A run for the report."""
    return {
        "wall_seconds": round(seconds, 3),
        "step_seconds": run.seconds,
        "problems": run.problems,
        "values": {name: dataclasses.asdict(value) for name, value in run.values.items()},
    }


def show(report: Report) -> None:
    """Tables for people."""
    for name, row in report.body.get("differences", {}).items():
        mark = "   MORE THAN 5 %" if row["difference"] > MAX_RUN_DIFFERENCE else ""
        print(
            f"{name:48} {' '.join(f'{number:12.5g}' for number in row['runs'])} {row['unit']:12} {row['difference']:7.2%}{mark}"
        )
    for name, row in report.body.get("anchors", {}).items():
        own = "-" if row["ours"] is None else f"{row['ours']:.5g}"
        gain = "" if row["gain"] is None else f"{row['gain']:+.2%}"
        print(f"{name:40} ours {own:>11} anchor {row['anchor']:11.5g} {gain:>8} {row['verdict']}")
    for part in ("ncu_read", "ncu_copy", "partition_0", "limited_inventory"):
        if part in report.body:
            print(f"{part}: {json.dumps(report.body[part])[:1500]}")


def measure(report: Report, device: FoundDevice, num_runs: int, sm_limit: int, cache: Path) -> list[ProbeRun]:
    """All probes, each kind `num_runs` times: quick with nothing cached, quick again, full ones, limited ones."""
    index = device.facts.index
    full: list[ProbeRun] = []

    def keep(*arguments: Any, **keywords: Any) -> dict[str, Any]:
        run, seconds = probe_once(*arguments, **keywords)
        if keywords["full"]:
            full.append(run)
        body = run_json(run, seconds)
        kind = "full" if keywords["full"] else "quick"
        print(f"{kind} probe: {seconds:.2f} s, steps {run.seconds}, problems {run.problems}")
        return body

    for number in range(num_runs):
        # Another folder each time: what was compiled for the one before does not count.
        empty = cache / f"cold_{number}"
        report.attempt(f"quick_cold_{number}", 10, lambda empty=empty: keep(index, QUICK_STEPS, empty, full=False))
    for number in range(num_runs):
        report.attempt(f"quick_warm_{number}", 5, lambda: keep(index, QUICK_STEPS, cache / "cold_0", full=False))
    for number in range(num_runs):
        report.attempt(f"full_{number}", 30, lambda: keep(index, FULL_STEPS, cache / "cold_0", full=True))
    report.add("limits", {"multiprocessors": sm_limit, "memory_bytes": MEMORY_LIMIT})
    limits = {SM_LIMIT: str(sm_limit), MEMORY_LIMIT_NAME: str(MEMORY_LIMIT)}
    for number in range(num_runs):
        report.attempt(
            f"partition_{number}", 8, lambda: keep(index, QUICK_STEPS, cache / "cold_0", full=False, **limits)
        )
    report.attempt("limited_inventory", 5, lambda: limited_inventory(device, limits))
    return full


def limited_inventory(whole: FoundDevice, limits: dict[str, str]) -> dict[str, Any]:
    """What the inventory says of the card under limits, three looks; a probe is kept by its fingerprint, which must be another."""
    with mock.patch.dict(os.environ, limits):
        looks = [take_inventory() for _ in range(3)]
    found = [one for look in looks for one in look.devices if one.facts.uuid == whole.facts.uuid]
    return {
        "memory_bytes": [one.values["partition.memory"].value for one in found],
        "multiprocessors": [one.values["partition.multiprocessors"].value for one in found],
        "is_another_fingerprint": all(one.fingerprint != whole.fingerprint for one in found),
    }


def main() -> int:
    """Run everything; 1 when a value is short of its anchor or a counter off."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--sm-limit", type=int, default=24)
    parser.add_argument("--seconds", type=float, default=DEADLINE_SECONDS, help="no part begins that would pass it")
    parser.add_argument("--target", choices=("read", "copy"), help="only run this kernel once (what ncu looks at)")
    arguments = parser.parse_args()
    device = next((d for d in take_inventory().devices if d.facts.kind == "cuda" and not d.problem), None)
    if device is None:
        print(f"no usable GPU: {take_inventory().cuda_problem or [d.problem for d in take_inventory().devices]}")
        return 2
    if arguments.target:
        target(arguments.target, device.facts.index)
        return 0
    arguments.out.mkdir(parents=True, exist_ok=True)
    report = Report(arguments.out, arguments.seconds)
    report.add("device", {"name": device.facts.name, "fingerprint": device.fingerprint, "values": {
        name: dataclasses.asdict(value) for name, value in device.values.items()}})  # fmt: skip
    with tempfile.TemporaryDirectory() as cache:
        full = measure(report, device, arguments.runs, arguments.sm_limit, Path(cache))
    for kind in ("read", "copy"):
        report.attempt(f"ncu_{kind}", 25, lambda kind=kind: against_contract(kind))
    if full:
        values = median_values(full)
        report.add("differences", differences(full))
        report.add("anchors", anchored(values))
        own, shared = library_profile(device, values)
        (arguments.out / "profile.json").write_text(own.to_json())
        (arguments.out / "h200.json").write_text(shared.to_json())
    reported = device.values.get("memory.l2_size")
    report.add("l2_size", {"reported": reported.value if reported else None, "anchor": L2_BYTES})
    show(report)
    print(f"done after {report.spent():.0f} s")
    short = [
        name for name, row in report.body.get("anchors", {}).items() if row["verdict"] in ("short", "not measured")
    ]
    wrong = [
        part
        for part in ("ncu_read", "ncu_copy")
        if not (isinstance(report.body.get(part), dict) and report.body[part]["passed"])
    ]
    print(f"short of the anchor: {short or 'none'}; counters off or missing: {wrong or 'none'}")
    return 1 if short or wrong or not full else 0


if __name__ == "__main__":
    sys.exit(main())
