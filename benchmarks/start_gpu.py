"""Process start to first token of the real agent on a GPU, and where the time goes.

    python -m benchmarks.start_gpu [MODEL] [--rounds 3] [--device cuda] [--out FILE]

Three starts a round: `first` on an unknown card (no profile, no compiled kernels), `cold` with the profile but no compiled kernels
of any kind, `warm` with both. The model's files are in the page cache, and our packages have byte code. A time is from the agent's
start as a process to the first token that a client holds. Beside them `bare`: a process that imports PyTorch, puts a number on the
device and ends; a warm start may take 1.5 s more. Notes have the parts, which add up, and at which second of the engine's process
what goes on beside them was done.
"""

from __future__ import annotations

import argparse
import asyncio
import compileall
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.cell import CellProcess

from dragoman import AsyncClient

KINDS = ("first", "cold", "warm")
METRICS = {"bare": "seconds_to_device"}
BARE = "import os, torch; torch.zeros(1, device={!r}); os._exit(0)"  # without the interpreter's end
# Warm: the agent until it spawns the engine 0.1 s, the engine's imports 0.6 with PyTorch's libraries beside them to 1.0, then PyTorch and the
# device's modules to 2.95 (the agent plans and the context is made meanwhile), torch's own opening of the device 0.03, weights and memory
# 0.17, first launches and two graphs 0.5, the request 0.1; 0.2 less with byte code of our packages. Cold: compiling the kernels, begun with the
# plan at 1.0 s, takes until 4.7, past the imports; graphs 0.6 with nothing left to compile. First: as cold, with the probe (2.5 s) before
# the engine's process instead of beside it.
PREDICTED = {"bare": 2.9, "first": 9.2, "cold": 5.6, "warm": 3.7}
START_SECONDS = 180.0
PACKAGES = ("dragoman", "dragoman_agent", "dragoman_cli", "dragoman_kernels", "dragoman_text")


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
    parts |= {"agent before and beside the engine": ready - engine, "request": total - ready}
    return total, parts | {f"done at: {name}": s for name, s in info["start_moments"].items()}


def bare(device: str) -> tuple[float, dict[str, float]]:
    """Seconds of a process that does nothing but import PyTorch and put a number on the device."""
    begin = time.monotonic()
    subprocess.run([sys.executable, "-c", BARE.format(device)], check=True)
    return time.monotonic() - begin, {}


def compile_packages() -> None:
    """Byte code of our packages, as an installation has it: a fresh copy of the tree has none, and here and there none is written."""
    for name in PACKAGES:
        spec = find_spec(name)
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            compileall.compile_dir(folder, quiet=2)


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
    if options.rounds < 1:
        parser.error("--rounds: at least 1")
    if options.device == "cuda":
        from benchmarks.card import usable_gpu

        usable_gpu()  # or it says why there is none
    found: dict[str, list[tuple[float, dict[str, float]]]] = {kind: [] for kind in ("bare", *KINDS)}
    with tempfile.TemporaryDirectory() as folder:
        caches, model = Path(folder) / "caches", model_files(options.model, options.device, Path(folder) / "model")
        compile_packages()
        for _ in range(options.rounds):
            found["bare"].append(bare(options.device))
            for kind in KINDS:
                if kind != "warm":
                    for name in ("triton", "cuda", *(["dragoman"] if kind == "first" else [])):
                        shutil.rmtree(caches / name, ignore_errors=True)
                found[kind].append(start(model, options.device, caches))
                print(f"  {kind}: {found[kind][-1][0]:.2f} s", flush=True)
            if options.out is not None:
                from benchmarks.card import keep

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
            {"bench": "start", "case": kind, "metric": METRICS.get(kind, "seconds_to_first_token"), "predicted": PREDICTED[kind],
             "note": note, "samples": [total for total, _ in starts]}
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
