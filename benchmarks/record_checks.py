"""Records of what checks a card rather than times a model: the probe's runs, and the verdicts of tests/gpu. For `record_gpu`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import record

from dragoman_agent.pal.analysis import UPPER_BOUND

PROBE_COMMAND = "python tests/gpu/check_probe.py"
CHECKS_COMMAND = "python -m benchmarks.gpu_checks"
PEER = "independent measurement of such a card"
MAX_QUICK_SECONDS, MAX_FULL_SECONDS = 3.0, 60.0  # the bars
_RUNS = {"quick-cold": ("quick_cold_", MAX_QUICK_SECONDS), "quick-warm": ("quick_warm_", MAX_QUICK_SECONDS), "full": ("full_", MAX_FULL_SECONDS)}  # fmt: skip


def probe_records(body: Mapping[str, Any]) -> list[record.Record]:
    """Of `check_probe.py`: each number that the full probes measured, their seconds, the limited probes, the counters of ncu."""
    return [*_value_records(body), *_second_records(body), *_partition_records(body), *_counter_records(body)]


def _parts(body: Mapping[str, Any], prefix: str) -> list[dict[str, Any]]:
    """The parts of that name and a number that were done; a text says why another was not."""
    return [part for name, part in body.items() if name.startswith(prefix) and isinstance(part, dict)]


def _held(runs: Sequence[Mapping[str, Any]], name: str) -> list[dict[str, Any]]:
    """The value of that name in the runs that have it."""
    return [run["values"][name] for run in runs if name in run["values"]]


def _made(body: Mapping[str, Any], case: str, metric: str, unit: str, samples: Sequence[float], **more: Any) -> list[record.Record]:  # fmt: skip
    """A record of the card that `body` names; none where there are too few samples, which is told."""
    if len(samples) < record.MIN_NUM_SAMPLES:
        print(f"left out: probe {case} {metric} has {len(samples)} samples of {record.MIN_NUM_SAMPLES}")
        return []
    values = body["device"]["values"]
    entry = record.make_record(
        bench="probe", case=case, metric=metric, unit=unit, samples=samples, command=PROBE_COMMAND, packages=(),
        device=body["device"]["name"], **{"predicted": None, **more},
    )  # fmt: skip
    clocks = [round(values[f"{part}.max_clock"]["value"] / 1e6) for part in ("compute", "memory")]
    return [{**entry, "driver": values["driver.release"]["value"], "clocks_mhz": clocks}]


def _value_records(body: Mapping[str, Any]) -> list[record.Record]:
    """Beside the independent measurement where there is one. A cost that was not resolved is a bound, and its note says so."""
    runs = [part["values"] for part in _parts(body, "full_")]
    made: list[record.Record] = []
    for name, first in runs[0].items() if len(runs) >= record.MIN_NUM_SAMPLES else ():
        held = [run[name] for run in runs if name in run]
        is_number = all(isinstance(one["value"], int | float) and not isinstance(one["value"], bool) for one in held)
        bounds = [one for one in held if one["note"].startswith(UPPER_BOUND)]
        if not is_number or not (bounds or all(one["provenance"] == "measured" for one in held)):
            continue
        samples = [one["value"] for one in held]
        if not min(samples) > 0:
            print(f"left out: probe {name} is {min(samples)}, which nothing measures")
            continue
        anchor = body["anchors"].get(name) if "anchors" in body else None
        peer = {"name": PEER, "value": anchor["anchor"]} if anchor else None
        note = (bounds or [first])[0]["note"]
        made += _made(
            body, name, name, first["unit"], samples, predicted=anchor and anchor["anchor"], peer=peer, note=note
        )
    return made


def _second_records(body: Mapping[str, Any]) -> list[record.Record]:
    """Wall time of the measuring process, cold (its folder of compiled kernels empty) and warm."""
    made: list[record.Record] = []
    for case, (prefix, bar) in _RUNS.items():
        runs = _parts(body, prefix)
        middle = sorted(runs, key=lambda run: run["wall_seconds"])[len(runs) // 2] if runs else {"step_seconds": {}}
        slowest = sorted(middle["step_seconds"].items(), key=lambda step: -step[1])[:4]
        note = f"bar {bar:g} s; longest steps: {', '.join(f'{name} {seconds:.2f} s' for name, seconds in slowest)}"
        made += _made(body, case, "seconds", "s", [run["wall_seconds"] for run in runs], predicted=bar, note=note)
    return made


def _partition_records(body: Mapping[str, Any]) -> list[record.Record]:
    """What probes under DRAGOMAN_SM_LIMIT and DRAGOMAN_MEMORY_LIMIT saw of the card."""
    runs = _parts(body, "partition_")
    limits = body.get("limits")
    if not runs or not isinstance(limits, dict):
        return []
    case = f"partition-{limits['multiprocessors']}"
    asked = f"{limits['multiprocessors']} multiprocessors and {limits['memory_bytes']} bytes asked for"
    seen = [one["value"] for one in _held(runs, "partition.multiprocessors")]
    made = _made(body, case, "partition.multiprocessors", "1", seen, predicted=limits["multiprocessors"], note=asked)
    for name in ("memory.read_bandwidth", "compute.matmul_bfloat16"):
        values, whole = _held(runs, name), _held(_parts(body, "full_") or _parts(body, "quick_warm_"), name)
        if not values or not whole:
            continue
        share, unlimited = (statistics.median(one["value"] for one in each) for each in (values, whole))
        note = f"{asked}; {share / unlimited:.3f} of the whole card's; {values[0]['note']}"
        made += _made(body, case, name, values[0]["unit"], [one["value"] for one in values], note=note)
    inventory = body.get("limited_inventory")
    if isinstance(inventory, dict):
        anew = "probed anew: another fingerprint" if inventory["is_another_fingerprint"] else "the SAME fingerprint"
        memory = inventory["memory_bytes"]
        made += _made(
            body, case, "partition.memory", "bytes", memory, predicted=limits["memory_bytes"], note=f"{asked}; {anew}"
        )
    return made


def _counter_records(body: Mapping[str, Any]) -> list[record.Record]:
    """Bytes and hits that ncu counted of two kernels, beside their contracts."""
    made: list[record.Record] = []
    for kind in ("read", "copy"):
        part = body.get(f"ncu_{kind}")
        if not isinstance(part, dict):
            print(f"left out: probe ncu-{kind}: {part or 'not run'}")
            continue
        predicted, moved = part["bytes_predicted"], part["bytes_counted"]
        case, bar = f"ncu-{kind}", f"bar 10 %: {'passed' if part['passed'] else 'FAILED'}"
        made += _made(
            body, case, "bytes_over_model", "ratio", [each / predicted for each in moved], predicted=1.0,
            note=f"{predicted} bytes by the contract; {bar}",
        )  # fmt: skip
        made += _made(
            body, case, "l2_hit_rate", "%", part["hit_rates"], predicted=part["hit_rate_predicted"],
            note=f"lts__t_sector_hit_rate against what the stream's contract says; {bar} (points)",
        )  # fmt: skip
    return made


def index_records(body: Mapping[str, Any]) -> list[record.Record]:
    """Of `check_indices.py`: the counters behind the indices under loads whose counters are known, each beside its range."""
    made = []
    for load, report in body["loads"].items():
        samples, verdicts = (report.get("gpm", {}).get(name, {}) for name in ("samples", "verdict"))
        for name, verdict in verdicts.items():
            if len(samples.get(name, ())) < record.MIN_NUM_SAMPLES:
                print(f"left out: indices {load} {name}: {verdict}")
                continue
            unit = "bytes/s" if name.endswith("bytes_per_second") else "share"
            entry = record.make_record(
                bench="indices", case=f"{load}-gpm", metric=name, unit=unit, samples=samples[name], predicted=None,
                command="python tests/gpu/check_indices.py", packages=(), versions=body["versions"], device=body["device"],
                note=verdict,
            )  # fmt: skip
            made.append({**entry, "driver": body["driver"], "clocks_mhz": body["clocks_mhz"]})
    return made


def check_records(verdicts: Mapping[str, Mapping[str, Any]], card: Mapping[str, Any]) -> list[record.Record]:
    """Of `gpu_checks`: a record a check that says a line a case (a sample each: 1 good, 0 off), and one of all checks."""
    made = []
    ran = {name: one for name, one in verdicts.items() if one.get("verdict") in ("ok", "failed")}
    for name, one in ran.items():
        good, off = one.get("num_good", 0), one.get("num_off", 0)
        if good + off < record.MIN_NUM_SAMPLES:
            continue
        words = f"{one['verdict']} in {one['seconds']} s, {good} of {good + off} cases good"
        note = "; ".join(filter(None, (words, one["problem"], one.get("said", ""))))
        made.append(_check(name, [1.0] * good + [0.0] * off, note, card))
    if len(ran) >= record.MIN_NUM_SAMPLES:
        samples = [float(one["verdict"] == "ok") for one in ran.values()]
        words = ", ".join(f"{name} {one['verdict']} {one['seconds']} s" for name, one in ran.items())
        left = [name for name in verdicts if name not in ran]
        note = f"{sum(samples):.0f} of {len(samples)} good: {words}" + (f"; no time: {', '.join(left)}" if left else "")
        made.append(_check("all", samples, note, card))
    return made


def _check(case: str, samples: Sequence[float], note: str, card: Mapping[str, Any]) -> record.Record:
    entry = record.make_record(
        bench="checks", case=case, metric="passed", unit="1", samples=samples, predicted=1.0, command=CHECKS_COMMAND,
        packages=(), versions=card["versions"], device=card["device"], note=note,
    )  # fmt: skip
    return {**entry, "driver": card["driver"], "clocks_mhz": card["clocks_mhz"]}
