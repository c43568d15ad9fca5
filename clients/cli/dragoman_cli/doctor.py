"""`dragoman doctor`: is this machine fit to serve, and what to do about what is not."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(add_completion=False, rich_markup_mode=None)

_STYLE = {"ok": "green", "warn": "yellow", "fail": "bold red"}


@app.command()
def doctor(
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
    cache_dir: Annotated[Path | None, typer.Option("--cache-dir", help="Where models are kept.")] = None,
) -> None:
    """Check this machine and say how to fix what is wrong. Exits with 1 when something fails."""
    from dragoman_agent.model.embedded import default_cache_dir
    from dragoman_cli.checks import run_checks

    checks = run_checks(cache_dir or default_cache_dir(os.environ))
    if as_json:
        print(json.dumps([asdict(check) for check in checks]))
    else:
        console = Console(highlight=False)
        for check in checks:
            console.print(f"[{_STYLE[check.level]}]{check.level:<4}[/] {check.name:<18} ", end="")
            console.print(check.finding, markup=False, soft_wrap=True)
            if check.fix and check.level != "ok":
                console.print(f"{'':<24}fix: {check.fix}", markup=False, soft_wrap=True)
    if any(check.level == "fail" for check in checks):
        raise typer.Exit(1)
