"""Records what `benchmarks/gpu.sh OUT speed` measured: python -m benchmarks.record_gpu OUT/*.json"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks import record

# vLLM 0.26.0 on the same kind of card; the anchors' method is `decode` and `nano` of engine_gpu.py.
PEER = {
    ("qwen3-0.6b", "decode-b1"): 1.632,
    ("qwen3-0.6b", "decode-b32"): 2.055,
    ("qwen3-0.6b", "decode-b256"): 5.255,
    ("qwen3-0.6b", "nano"): 23000.0,
    ("qwen3-0.6b", "prefill-1x8192"): 241334.0,
    ("qwen3-0.6b", "prefill-16x1024"): 286904.0,
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
UNITS = {"ms_per_step": "ms", "output_tokens_per_second": "1/s", "tokens_per_second": "1/s", "gb_per_second": "GB/s"}


def records_of(body: dict[str, Any]) -> list[record.Record]:
    """The records of one model's results."""
    made = []
    for result in body["results"]:
        model, bench, case = body["model"], result["bench"], result["case"]
        peer = PEER.get((model, bench if bench == "nano" else f"{bench}-{case}"))
        entry = record.make_record(
            bench=bench,
            case=model if bench in ("nano", "load") else f"{model}-{case}",
            metric=result["metric"],
            unit=UNITS[result["metric"]],
            samples=result["samples"],
            predicted=result.get("predicted"),
            command=f"python benchmarks/{'load_gpu' if bench == 'load' else 'engine_gpu'}.py {model}",
            packages=(),
            versions=body["versions"],
            device=body["device"],
            peer={"name": "vllm-0.26.0", "value": peer} if peer else None,
            note=result.get("note", ""),
        )
        made.append({**entry, "driver": body["driver"], "clocks_mhz": body["clocks_mhz"]})
    return made


def main() -> None:
    """Read every file named and save."""
    made = [entry for name in sys.argv[1:] for entry in records_of(json.loads(Path(name).read_text()))]
    print(f"{len(made)} records in {record.save('h200', made)}")


if __name__ == "__main__":
    main()
