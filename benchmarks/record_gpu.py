"""Records what was measured on a GPU machine: python -m benchmarks.record_gpu [--commit HASH] OUT/*.json

Takes raw results as `benchmarks.card.keep` writes them (the benchmarks ending in `_gpu`, `peer_transformers`, `small_card`, `quote`, `tiers`, and checks of tests/gpu whose
figures are recorded), what `tests/gpu/check_probe.py` and `check_indices.py` write, and the verdicts of `gpu_checks` (checks.json, with its environment.json
beside it); other files that lie there, and results of a machine without a card, are named and left. A GPU machine need not have the repository's history: --commit says which one its files were.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.record_checks import check_records, index_records, probe_records

# vLLM 0.26.0 on the same kind of card; the anchors' method is `decode` and `nano` of engine_gpu.py.
PEER = {
    ("qwen3-0.6b", "decode-b1"): 1.632,
    ("qwen3-0.6b", "decode-b32"): 2.055,
    ("qwen3-0.6b", "decode-b256"): 5.255,
    ("qwen3-0.6b", "nano"): 23000.0,
    ("qwen3-0.6b", "prefill-1x8192"): 241334.0,
    ("qwen3-0.6b", "prefill-16x1024"): 286904.0,
    ("qwen3-0.6b", "embed-512x128"): 239484.0,
    ("qwen3-0.6b", "embed-64x512"): 307084.0,
    ("llama-3.2-1b", "decode-b1"): 1.634,
    ("llama-3.2-1b", "decode-b32"): 2.174,
    ("llama-3.2-1b", "decode-b256"): 4.578,
    ("llama-3.2-1b", "nano"): 32105.0,
    ("llama-3.2-1b", "prefill-1x8192"): 192969.0,
    ("llama-3.2-1b", "prefill-16x1024"): 252072.0,
    ("qwen3-8b", "decode-b1"): 5.2,
    ("qwen3-8b", "decode-b32"): 5.702,
    ("qwen3-8b", "decode-b256"): 11.764,
    ("qwen3-8b", "nano"): 9119.0,
    ("qwen3-8b", "prefill-1x8192"): 37796.0,
    ("qwen3-8b", "prefill-16x1024"): 42844.0,
}
UNITS = {
    "ms_per_step": "ms",
    "mean_gap_ms": "ms",
    "p99_gap_ms": "ms",
    "output_tokens_per_second": "1/s",
    "tokens_per_second": "1/s",
    "gb_per_second": "GB/s",
    "seconds_to_first_token": "s",
    "seconds_to_device": "s",
    "selection_seconds_a_shape": "s",
    "planning_seconds": "s",
    "changed_fields": "1",
}
RATIOS = (
    "predicted_over_measured", "pal_on_over_off", "p50_on_over_off", "p99_on_over_off", "wrong_profile_over_own",
    "share_of_best", "own_plan_over_whole", "ttft_over_computed",
)  # fmt: skip
WORST = {"min": min, "max": max}  # of the samples: the value of what must hold for each of them
OF_SHAPES = ("share_of_best", "selection_seconds_a_shape")  # a sample a shape, whose mean is what a bar is for
COMMANDS = {
    "embed": "embed_gpu",
    "start": "start_gpu",
    "load": "load_gpu",
    "step_model": "pal_gpu",
    "ablation": "pal_gpu",
    "plan_quality": "pal_gpu",
    "wrong_profile": "pal_gpu",
    "small_card": "small_card",
    "quote": "quote --device cuda --model",
    "tiers": "tiers --device cuda --tier host --model",
}
ENVIRONMENT = "environment.json"  # of the machine whose verdicts lie beside it
PROBED = ("full_", "quick_")  # parts of check_probe.py
GROUPS = {"quote": "control"}  # benches whose records are not in h200.json
SHARES = ("median_error", "inside_p10_p90", "refused")


def records_of(body: dict[str, Any]) -> list[record.Record]:
    """The records of one model's results."""
    made = []
    for result in body["results"]:
        model, bench, case = body["model"], result["bench"], result["case"]
        if len(result["samples"]) < record.MIN_NUM_SAMPLES:
            print(f"left out: {model} {bench} {case} has {len(result['samples'])} samples of {record.MIN_NUM_SAMPLES}")
            continue
        anchor = PEER.get((model, bench if bench == "nano" else f"{bench}-{case}"))
        peer = result.get("peer") or ({"name": "vllm-0.26.0", "value": anchor} if anchor else None)
        entry = record.make_record(
            bench=bench,
            case=case_of(model, bench, case),
            metric=result["metric"],
            unit=result.get("unit") or unit_of(result["metric"]),
            samples=result["samples"],
            predicted=result.get("predicted"),
            command=body.get("command") or f"python -m benchmarks.{COMMANDS.get(bench, 'engine_gpu')} {model}",
            packages=(),
            versions=body["versions"],
            device=body["device"],
            peer=peer,
            note=note_of(result),
        )
        if "value" in result:
            entry["value"] = WORST[result["value"]](entry["samples"])
        made.append({**entry, "driver": body["driver"], "clocks_mhz": body["clocks_mhz"]})
    return made


def unit_of(metric: str) -> str:
    """The unit of a metric's values."""
    if metric in SHARES:
        return "share"
    return "ratio" if metric in RATIOS else UNITS[metric]


def case_of(model: str, bench: str, case: str) -> str:
    """The case's name in the records. Cases of a body without a model are whole names."""
    if bench == "load":
        return model
    if bench == "nano":
        return model + case.removeprefix("nano")  # a run without something must not take the place of the usual one
    if bench == "quote" or not model:
        return case
    return f"{case}-{model}" if bench == "plan_quality" else f"{model}-{case}"


def note_of(result: dict[str, Any]) -> str:
    """The note; with the mean where several shapes make one figure."""
    note: str = result.get("note", "")
    if "value" in result:
        return "; ".join(filter(None, (f"value: the {result['value']} of the samples", note)))
    if result["metric"] in OF_SHAPES and len(result["samples"]) > 1:
        return f"mean {statistics.fmean(result['samples']):.3f} of the shapes, whose median is the value; {note}"
    return note


def bodies_of(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """What the files hold, but for those that are no raw results, such as a card's kernel times."""
    bodies = []
    for path in paths:
        body = _json_of(path)
        card = path.with_name(ENVIRONMENT)
        if not isinstance(body, dict):
            print(f"left: {path} holds no raw results of a benchmark")
        elif "results" in body and body.get("clocks_mhz") == []:
            print(f"left: {path} is of {body['device']}, not of a card")
        elif (
            "results" in body or "loads" in body or ("device" in body and any(name.startswith(PROBED) for name in body))
        ):
            bodies.append(body)
        elif body and all(isinstance(one, dict) and "verdict" in one for one in body.values()):
            if card.is_file():
                bodies.append({"verdicts": body, "card": _json_of(card)})
            else:
                print(f"left: {path} has no {ENVIRONMENT} beside it, so nothing tells which card its verdicts are of")
        elif path.name != ENVIRONMENT:
            print(f"left: {path} holds no raw results of a benchmark")
    return bodies


def _json_of(path: Path) -> Any:
    """What a file holds. Exits where it cannot be read: a run of which a part is missing is not recorded."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SystemExit(f"{path}: cannot be read ({error.strerror or error}); nothing is recorded") from None
    except ValueError as error:
        raise SystemExit(f"{path}: is damaged ({error}); copy it anew or leave it out; nothing is recorded") from None


def records_in(body: dict[str, Any]) -> list[record.Record]:
    """The records of one file."""
    if "verdicts" in body:
        return check_records(body["verdicts"], body["card"])
    if "loads" in body:
        return index_records(body)
    return records_of(body) if "results" in body else probe_records(body)


def main() -> None:
    """Read every file named and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--commit", help="full name of the commit whose files were measured")
    options = parser.parse_args()
    bodies = bodies_of(options.files)
    made = [entry for body in bodies for entry in records_in(body)]
    if options.commit:
        made = [{**entry, "commit": options.commit} for entry in made]
    for group in ("h200", *GROUPS.values()):
        chosen = [entry for entry in made if GROUPS.get(entry["bench"], "h200") == group]
        if chosen:
            print(f"{len(chosen)} records in {record.save(group, chosen)}")


if __name__ == "__main__":
    main()
