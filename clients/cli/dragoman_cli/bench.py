"""`dragoman bench cpu-peer`: our CPU step beside llama.cpp's, same file, prompt and threads, in one run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from dragoman_cli.failure import Failure, require_extras

app = typer.Typer(
    add_completion=False, rich_markup_mode=None, no_args_is_help=True, help="Measure against other engines."
)


@app.callback()
def group() -> None:
    """Measure against other engines."""


@app.command("cpu-peer")
def cpu_peer(
    model: Annotated[Path | None, typer.Option("--model", help="GGUF file; default: the embedded model.")] = None,
    threads: int = typer.Option(os.cpu_count() or 1, "--threads", min=1, help="Threads for both."),
    rounds: int = typer.Option(5, "--rounds", min=1, help="Interleaved rounds; the median counts."),
) -> None:
    """Run llama.cpp and Dragoman on one file and print the ratios of decode and prefill."""
    require_extras("agent", "bench", purpose="dragoman bench cpu-peer")
    from dragoman_agent.model.embedded import default_cache_dir, embedded_path
    from dragoman_agent.model.errors import ModelFileError
    from dragoman_kernels.cpu.bench_peer import LlamaCpp, OurEngine, format_table, measure
    from dragoman_kernels.cpu.build import KernelBuildError

    try:
        path = model or embedded_path(default_cache_dir(os.environ))
        if not path.is_file():
            raise Failure(f"there is no model file {path}", remedy="dragoman models fetch embedded, or pass --model")
        ours = OurEngine(path, threads, "int8", "native", None)
        peer = LlamaCpp(path, threads)
    except (ModelFileError, KernelBuildError, ValueError) as error:
        raise Failure("the benchmark cannot start", str(error)) from None
    print(f"{path.name}, {threads} threads, ours {ours.step.instruction_set}; {peer.system}", flush=True)
    print(format_table(measure(ours, peer, rounds)))
