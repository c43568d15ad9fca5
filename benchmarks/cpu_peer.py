"""The CPU step beside llama.cpp on one file; prints the ratios and, with --record, keeps them in results/cpu.json."""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import record

from dragoman_kernels.cpu.bench_peer import CaseResult, LlamaCpp, OurEngine, format_table, measure
from dragoman_kernels.cpu.build import KernelBuildError

DEFAULT_MODEL = "models/embedded/SmolLM2-135M-Instruct.Q4_1.gguf"
# A record needs a quiet machine: llama.cpp's spinning OpenMP threads lose far more to other processes than ours do,
# so a busy one flatters us (measured: decode ratio 7.7 at a load of 5 on 2 cores, 1.6 on the quiet machine).
MAX_RECORD_LOAD = 1.0
# Written before the first measurement, from bytes a token and multiply-adds an instruction.
PREDICTED = {"decode-b1": 1.3, "decode-b8": 3.0, "prefill": 3.0}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    cache = Path(os.environ.get("DRAGOMAN_CACHE_DIR") or Path.home() / ".cache" / "dragoman")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", type=Path, default=cache / DEFAULT_MODEL, help="GGUF file (default: the embedded model)"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=7, help="5 or more for a record")
    parser.add_argument("--activation", choices=("int8", "float32"), default="int8")
    parser.add_argument("--march", default="native", help="instruction set of our build, e.g. x86-64-v3 for AVX2")
    parser.add_argument("--record", action="store_true", help="store the ratios in benchmarks/results/cpu.json")
    return parser.parse_args(arguments)


def to_records(
    results: Sequence[CaseResult], suffix: str, peer: LlamaCpp, instruction_set: str, command: str, load: float
) -> list[dict[str, Any]]:
    """One record a case."""
    return [
        record.make_record(
            bench="cpu_peer",
            case=result.case + suffix,
            metric="ratio_to_llamacpp",
            unit="ratio",
            samples=result.ratios,
            predicted=None if suffix else PREDICTED[result.case],
            peer={"name": f"llama.cpp in xllamacpp-{peer.version}", "value": 1.0},
            packages=("numpy", "xllamacpp"),
            command=command,
            note=(
                f"ours ({instruction_set}) {statistics.median(result.ours):.1f} tokens/s, "
                f"llama.cpp {statistics.median(result.peer):.1f} tokens/s (its wheel: {peer.system}); load average before: {load:.1f}"
            ),
        )
        for result in results
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if not options.model.is_file():
        print(
            f"{options.model} is not there; fetch it with `dragoman models fetch embedded` or pass --model",
            file=sys.stderr,
        )
        return 2
    if options.record and options.rounds < 5:
        print("a record needs --rounds 5 or more", file=sys.stderr)
        return 2
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if options.record and load > MAX_RECORD_LOAD:
        print(
            f"load average is {load:.1f}; a record needs {MAX_RECORD_LOAD} or less, wait or drop --record",
            file=sys.stderr,
        )
        return 2
    try:
        ours = OurEngine(options.model, options.threads, options.activation, options.march, None)
    except (KernelBuildError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    try:
        peer = LlamaCpp(options.model, options.threads)
    except ImportError:
        print("xllamacpp is not installed; install the bench extra: pip install 'dragoman[bench]'", file=sys.stderr)
        return 1
    results = measure(ours, peer, options.rounds)
    instruction_set = ours.step.instruction_set
    print(
        f"{options.model.name}, {options.threads} threads, {options.activation} activations, ours {instruction_set}; {peer.system}"
    )
    print(format_table(results))
    if options.record:
        suffix = (
            ""
            if options.march == "native" and options.activation == "int8"
            else f"-{instruction_set}-{options.activation}"
        )
        command = shlex.join(
            ["python", "benchmarks/cpu_peer.py", *(arguments if arguments is not None else sys.argv[1:])]
        )
        print("recorded in", record.save("cpu", to_records(results, suffix, peer, instruction_set, command, load)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
