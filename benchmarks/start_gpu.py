"""Process start to first token of the real agent on a GPU, and where the time goes.

    python -m benchmarks.start_gpu [MODEL] [--rounds 3] [--device cuda] [--out FILE]

Three starts a round: `first` on an unknown card (no profile, no compiled kernels), `cold` with the profile but no compiled kernels
of any kind, `warm` with both. The model's files are in the page cache. A time is from the agent's start as a process to the
first token that a client holds.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cell import CellProcess

from dragoman import AsyncClient

KINDS = ("first", "cold", "warm")
# Warm: the agent until it spawns the engine 0.2 s, the engine's imports 0.8, its device library 4.4 (the agent plans meanwhile),
# context, weights and memory 0.4, first launches and two graphs of decode 0.6. The other graphs (about 23 of decode and 16 of steps with
# prompts, 15 ms each) and ten timed steps came before the first token until they were left for after it: 1.35 s of the 7.7 predicted
# then. Cold: 0.7 s more of planning and of first launches. First: as cold, with the probe before the engine's imports instead of beside them.
PREDICTED = {"first": 9.9, "cold": 7.2, "warm": 6.4}
START_SECONDS = 180.0


def start(model: str, device: str, caches: Path) -> tuple[float, dict[str, float]]:
    """Seconds to the first token and the parts of it; `caches` has one folder a kind of cache."""
    environ = {
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "CUDA_CACHE_PATH": str(caches / "cuda"),
        "DRAGOMAN_CACHE_DIR": str(caches / "dragoman"),
    }
    begin = time.monotonic()
    agent = CellProcess(
        "dragoman_agent.main", "--device", device, "--model", model, "--open", "--port", "0", "--metrics-port", "0",
        "--max-context", "8192", environ=environ,
    )  # fmt: skip
    try:
        serving = agent.wait_for("serving", START_SECONDS)
        listening = time.monotonic() - begin
        info = agent.wait_for("ready", START_SECONDS)["info"]
        ready = time.monotonic() - begin
        asyncio.run(first_token(serving["grpc"]))
        total = time.monotonic() - begin
    finally:
        agent.close()
    parts = {"agent listens": listening, **{f"engine: {name}": s for name, s in info["start_seconds"].items()}}
    engine = sum(info["start_seconds"].values())
    return total, {**parts, "agent before and beside the engine": ready - engine, "request": total - ready}


async def first_token(address: str) -> None:
    """Of a short prompt."""
    async with AsyncClient(agent=address) as client:
        async for _ in client.generate([1, 2, 3], max_output_tokens=1, temperature=0.0):
            return


def main() -> None:
    """Print a line a start and the medians of the parts; `--out` gets the raw results, anew with each round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="qwen3-0.6b")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, help="on a machine with a card")
    options = parser.parse_args()
    found: dict[str, list[tuple[float, dict[str, float]]]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as folder:
        caches, model = Path(folder) / "caches", model_files(options.model, options.device, Path(folder) / "model")
        for _ in range(options.rounds):
            for kind in KINDS:
                if kind != "warm":
                    for name in ("triton", "cuda", *(["dragoman"] if kind == "first" else [])):
                        shutil.rmtree(caches / name, ignore_errors=True)
                found[kind].append(start(model, options.device, caches))
                print(f"  {kind}: {found[kind][-1][0]:.2f} s", flush=True)
            if options.out is not None:
                from benchmarks.gpu_setup import keep

                keep(options.out, options.model, 0, results_of(found))
    for result in results_of(found):
        print(f"{result['case']}: median {statistics.median(result['samples']):.2f} s ({result['note']})", flush=True)


def results_of(found: Mapping[str, Sequence[tuple[float, dict[str, float]]]]) -> list[dict[str, Any]]:
    """Of the starts so far, by kind: seconds to the first token, with the medians of the parts."""
    results: list[dict[str, Any]] = []
    for kind, starts in found.items():
        parts = {name: statistics.median(each.get(name, 0.0) for _, each in starts) for name in starts[0][1]}
        note = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in parts.items())
        results.append(
            {"bench": "start", "case": kind, "metric": "seconds_to_first_token", "predicted": PREDICTED[kind], "note": note,
             "samples": [total for total, _ in starts]}
        )  # fmt: skip
    return results


def model_files(name: str, device: str, folder: Path) -> str:
    """The model as safetensors, so that reading weights is part of it and making them is not; elsewhere as `--model` takes it."""
    if device != "cuda":
        return name
    from benchmarks.load_gpu import write_model

    write_model(name, folder)
    return str(folder)


if __name__ == "__main__":
    main()
