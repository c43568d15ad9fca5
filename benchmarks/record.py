"""Writes measurements to `benchmarks/results/<group>.json`: one validated record a (bench, case, metric), newest last."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import re
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS_DIR = Path(__file__).resolve().parent / "results"
MIN_NUM_SAMPLES = 3

Record = dict[str, Any]

REQUIRED: dict[str, tuple[type, ...]] = {
    "bench": (str,),
    "case": (str,),
    "metric": (str,),
    "value": (int, float),
    "unit": (str,),
    "samples": (list,),
    "spread": (int, float),
    "predicted": (int, float, type(None)),
    "commit": (str,),
    "date": (str,),
    "device": (str,),
    "versions": (dict,),
    "command": (str,),
}
OPTIONAL: dict[str, tuple[type, ...]] = {"peer": (dict,), "driver": (str,), "clocks_mhz": (list,), "note": (str,)}


class RecordError(ValueError):
    """A record does not fit the schema; the message names the record's key and field."""


def validate(record: Record) -> None:
    """Raise RecordError unless `record` fits the schema."""
    name = f"{record.get('bench')}/{record.get('case')}/{record.get('metric')}"
    unknown = set(record) - set(REQUIRED) - set(OPTIONAL)
    if unknown:
        raise RecordError(f"{name}: unknown field {min(unknown)}")
    for field, types in (REQUIRED | OPTIONAL).items():
        if field not in record:
            if field in REQUIRED:
                raise RecordError(f"{name}: field {field} is missing")
            continue
        if not isinstance(record[field], types) or isinstance(record[field], bool):
            raise RecordError(
                f"{name}: field {field} is {record[field]!r}, not {' or '.join(t.__name__ for t in types)}"
            )
        if types == (str,) and not record[field] and field != "note":
            raise RecordError(f"{name}: field {field} is empty")
    _validate_values(name, record)


def _validate_values(name: str, record: Record) -> None:
    samples = record["samples"]
    if len(samples) < MIN_NUM_SAMPLES or not all(_is_number(s) for s in samples):
        raise RecordError(f"{name}: samples must be {MIN_NUM_SAMPLES} or more finite numbers")
    if not _is_number(record["value"]) or not min(samples) <= record["value"] <= max(samples):
        raise RecordError(f"{name}: value {record['value']} lies outside its samples")
    if not _is_number(record["spread"]) or record["spread"] < 0:
        raise RecordError(f"{name}: spread is {record['spread']}; it is a share, 0 or more")
    if not re.fullmatch(r"[0-9a-f]{40}(-dirty)?", record["commit"]):
        raise RecordError(f"{name}: commit {record['commit']!r} is not a full Git object name")
    try:
        datetime.date.fromisoformat(record["date"])
    except ValueError as error:
        raise RecordError(f"{name}: date {record['date']!r} is not YYYY-MM-DD") from error
    if not all(isinstance(k, str) and isinstance(v, str) for k, v in record["versions"].items()):
        raise RecordError(f"{name}: versions must map names to version texts")
    peer = record.get("peer")
    if peer is not None and not (isinstance(peer.get("name"), str) and _is_number(peer.get("value"))):
        raise RecordError(f"{name}: peer needs a name and a value")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")


def spread(samples: Sequence[float]) -> float:
    """Largest minus smallest sample, as a share of the median; in the samples' unit where the median is 0, as of losses."""
    return (max(samples) - min(samples)) / (abs(statistics.median(samples)) or 1.0)


def make_record(
    *,
    bench: str,
    case: str,
    metric: str,
    unit: str,
    samples: Sequence[float],
    predicted: float | None,
    command: str,
    packages: Sequence[str],
    peer: dict[str, Any] | None = None,
    device: str | None = None,
    versions: dict[str, str] | None = None,
    note: str = "",
) -> Record:
    """A validated record of `samples` whose value is their median; commit, date, device and versions are read here."""
    record: Record = {
        "bench": bench,
        "case": case,
        "metric": metric,
        "value": _round(statistics.median(samples)),
        "unit": unit,
        "samples": [_round(s) for s in samples],
        "spread": round(spread(samples), 4),
        "predicted": predicted,
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": device or cpu_name(),
        "versions": {
            "python": platform.python_version(),
            **{p: importlib.metadata.version(p) for p in packages},
            **(versions or {}),
        },
        "command": command,
    }
    if peer is not None:
        record["peer"] = peer
    if note:
        record["note"] = note
    validate(record)
    return record


def save(group: str, records: Sequence[Record], results_dir: Path = RESULTS_DIR) -> Path:
    """Put records at the end of a group's file, each replacing an older one of its (bench, case, metric)."""
    for record in records:
        validate(record)
    path = results_dir / f"{group}.json"
    old = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    replaced = {key(r) for r in records}
    kept = [r for r in old if key(r) not in replaced] + list(records)
    text = "[\n" + ",\n".join(json.dumps(r, ensure_ascii=False) for r in kept) + "\n]\n"
    results_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=results_dir, suffix=".tmp", delete=False) as file:
        file.write(text)
    os.replace(file.name, path)
    return path


def key(record: Record) -> tuple[str, str, str]:
    """What a group holds one record of."""
    return record["bench"], record["case"], record["metric"]


def commit() -> str:
    """The checkout's commit, with -dirty when what is measured (code, not results) differs from it."""
    root = Path(__file__).resolve().parent.parent
    head = _git(root, "rev-parse", "HEAD")
    changed = _git(
        root, "status", "--porcelain", "--untracked-files=no", "--", "kernels", "gpu_agent", "clients", "controller"
    )
    return f"{head}-dirty" if changed else head


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False, timeout=30)
    if done.returncode != 0:
        raise RecordError(f"git {arguments[0]} failed: {done.stderr.strip()}; records need a Git checkout")
    return done.stdout.strip()


def cpu_name() -> str:
    """The CPU's model name and number of usable cores."""
    names = [platform.processor() or platform.machine()]
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
        ] or names
    return f"{names[0]}, {os.cpu_count()} cores"


def _round(value: float) -> float:
    return float(f"{value:.6g}")
