"""`dragoman bench cpu-peer`: our CPU step beside llama.cpp's, same file, prompt and threads, in one run."""

from __future__ import annotations

import json
import os
import shlex
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator
from enum import StrEnum
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Annotated, Any

import typer

from dragoman_cli.failure import Failure, require_extras

# A record needs a quiet machine: threads that wait for each other lose far more to other processes than the figures
# show (measured at a load of 5 on 2 cores: llama.cpp decoded 2.9 tokens/s with its threads spinning, 56 without).
MAX_RECORD_LOAD = 1.0
MIN_RECORD_ROUNDS = 5
# Written before the first measurement, from bytes a token and multiply-adds an instruction.
PREDICTED = {"decode-b1": 1.3, "decode-b8": 3.0, "prefill": 3.0}
# 80 MB of 4-bit weights and 57 MB of a bfloat16 head a token against 98 MB, and a torch call for each operation.
PREDICTED_INT4 = {"decode-b1": 0.5, "decode-b8": 0.6, "prefill": 0.6}

app = typer.Typer(
    add_completion=False, rich_markup_mode=None, no_args_is_help=True, help="Measure against other engines."
)


class Activation(StrEnum):
    """What activations are rounded to."""

    INT8 = "int8"
    FLOAT32 = "float32"


class Road(StrEnum):
    """How ours computes."""

    NATIVE = "native"
    TORCH_INT4 = "torch-int4"
    TORCH_FLOAT32 = "torch-float32"


@app.callback()
def group() -> None:
    """Measure against other engines."""


@app.command("cpu-peer")
def cpu_peer(
    model: Annotated[Path | None, typer.Option("--model", help="GGUF file; default: the embedded model.")] = None,
    threads: int = typer.Option(os.cpu_count() or 1, "--threads", min=1, help="Threads for both."),
    rounds: int = typer.Option(7, "--rounds", min=1, help="Interleaved rounds; the median counts."),
    activation: Annotated[
        Activation, typer.Option("--activation", help="Ours; llama.cpp rounds to 8 bits.")
    ] = Activation.INT8,
    road: Annotated[
        Road, typer.Option("--road", help="Ours: the compiled kernels, or torch as without a compiler.")
    ] = Road.NATIVE,
    march: str = typer.Option("native", "--march", help="Instruction set of our build, e.g. x86-64-v3 for AVX2."),
    timeout_seconds: float = typer.Option(600.0, "--timeout-seconds", min=1.0, help="Give up after this long."),
    record: bool = typer.Option(False, "--record", help="Keep the ratios in the checkout's benchmarks/results."),
) -> None:
    """Run llama.cpp and Dragoman on one file and print the ratios of decode and prefill."""
    require_extras("agent", "bench", purpose="dragoman bench cpu-peer")
    from dragoman_agent.model.embedded import default_cache_dir, embedded_path
    from dragoman_agent.model.errors import ModelFileError

    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    keeper = _record_keeper(rounds, load) if record else None
    cache_dir = default_cache_dir(os.environ)
    try:
        path = model or embedded_path(cache_dir)
    except ModelFileError as error:
        raise Failure("the benchmark cannot start", str(error)) from None
    if not path.is_file():
        raise Failure(f"there is no model file {path}", remedy="dragoman models fetch embedded, or pass --model")
    environ = dict(os.environ)
    if load > MAX_RECORD_LOAD and "OMP_WAIT_POLICY" not in environ:
        environ["OMP_WAIT_POLICY"] = "passive"
        print(
            f"load average {load:.1f}: llama.cpp's waiting threads sleep, as spinning would cost it most of its speed"
        )
    how = activation.value if road is Road.NATIVE else road.value
    measured = _lines([str(path), str(threads), how, march, str(rounds), str(cache_dir)], environ, timeout_seconds)
    about = next(measured)
    rounded = f"{activation.value} activations, " if road is Road.NATIVE else ""
    print(f"{path.name}, {threads} threads, {rounded}ours {about['instruction_set']}; ", end="")
    print(about["system"])
    print(f"{'case':<12}{'ours tok/s':>12}{'llama.cpp':>12}{'ratio':>8}   range", flush=True)
    results = []
    for result in measured:
        print(_row(result), flush=True)
        results.append(result)
    if keeper is not None:
        plain = march == "native" and activation is Activation.INT8
        suffix = "" if plain else f"-{about['instruction_set']}-{activation.value}"
        suffix = suffix if road is Road.NATIVE else f"-{road.value}"
        records = [_record(keeper, result, suffix, about, load) for result in results]
        print("recorded in", keeper.save("cpu", records))


def _row(result: dict[str, Any]) -> str:
    ours, peer, ratios = (result[name] for name in ("ours", "peer", "ratios"))
    speeds = f"{statistics.median(ours):>12.1f}{statistics.median(peer):>12.1f}{statistics.median(ratios):>8.2f}"
    return f"{result['case']:<12}{speeds}   {min(ratios):.2f} .. {max(ratios):.2f}"


def _lines(arguments: list[str], environ: dict[str, str], timeout_seconds: float) -> Iterator[dict[str, Any]]:
    """What the measuring process says, one object a line: itself first, then its cases. Raises Failure.

    A process of its own, because a step of llama.cpp cannot be interrupted from inside.
    """
    command = [sys.executable, "-m", "dragoman_cli.cpu_peer", *arguments]
    expected = ["the start", *PREDICTED]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, env=environ, text=True) as process:
        timer = threading.Timer(timeout_seconds, process.kill)
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                said = json.loads(line)
                if "error" in said:
                    raise Failure("the benchmark cannot run", said["error"])
                expected = expected[1:]
                yield said
            timed_out = not timer.is_alive()
            status = process.wait()
        finally:
            timer.cancel()
            process.kill()
    if expected:
        if timed_out:
            raise Failure(
                f"the benchmark did not finish within {timeout_seconds:g} s: {expected[0]} was under way",
                f"{_load()}; threads of llama.cpp wait for each other and lose much to other processes",
                "wait for a quiet machine, or use fewer --threads, fewer --rounds or more --timeout-seconds",
            )
        raise Failure(f"the measuring process ended with status {status} during {expected[0]}", "its words are above")


def _load() -> str:
    if not hasattr(os, "getloadavg"):
        return f"{os.cpu_count()} cores"
    return f"the load average is {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"


def _record_keeper(rounds: int, load: float) -> Any:
    """The checkout's module that keeps records. Raises Failure: too few rounds, a busy machine, no checkout."""
    if rounds < MIN_RECORD_ROUNDS:
        raise Failure(f"a record needs --rounds {MIN_RECORD_ROUNDS} or more", f"--rounds is {rounds}")
    if load > MAX_RECORD_LOAD:
        raise Failure(
            f"a record needs a load average of {MAX_RECORD_LOAD:g} or less",
            f"it is {load:.1f}: other processes would be part of the figures",
            "wait for a quiet machine, or leave --record out",
        )
    path = Path(__file__).resolve().parents[3] / "benchmarks" / "record.py"
    spec = spec_from_file_location("dragoman_benchmark_record", path) if path.is_file() else None
    if spec is None or spec.loader is None:
        raise Failure(
            "--record needs a checkout of Dragoman",
            f"there is no {path}: this is an installed copy",
            "install from the checkout with `make setup`, or leave --record out",
        )
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _predicted(case: str, suffix: str) -> float | None:
    known = {"": PREDICTED, f"-{Road.TORCH_INT4.value}": PREDICTED_INT4}.get(suffix)
    return None if known is None else known[case]


def _record(keeper: Any, result: dict[str, Any], suffix: str, about: dict[str, str], load: float) -> Any:
    speeds = f"{statistics.median(result['ours']):.1f} tokens/s, llama.cpp {statistics.median(result['peer']):.1f}"
    return keeper.make_record(
        bench="cpu_peer",
        case=result["case"] + suffix,
        metric="ratio_to_llamacpp",
        unit="ratio",
        samples=result["ratios"],
        predicted=_predicted(result["case"], suffix),
        peer={"name": f"llama.cpp in xllamacpp-{about['peer']}", "value": 1.0},
        packages=("numpy", "xllamacpp"),
        command=shlex.join(["dragoman", *sys.argv[1:]]),
        note=(
            f"ours ({about['instruction_set']}) {speeds} tokens/s (its wheel: {about['system']}); "
            f"load average before: {load:.1f}"
        ),
    )
