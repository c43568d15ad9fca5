"""`dragoman config show`: the settings in effect for each process, and where each came from."""

from __future__ import annotations

import dataclasses
import json
import os
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from dragoman_cli.config import (
    ENV_PREFIX,
    SECTIONS,
    SETTINGS_TYPES,
    ConfigError,
    Resolved,
    did_you_mean,
    read_file,
    resolve,
)
from dragoman_cli.console import make_console
from dragoman_cli.failure import Failure

app = typer.Typer(
    add_completion=False, rich_markup_mode=None, no_args_is_help=True, help="Show the settings in effect."
)

# Values that are not shown.
_SECRETS = ("api_key",)


@app.callback()
def group() -> None:
    """Show the settings in effect."""


@app.command()
def show(
    process: str = typer.Argument("", help="agent, controller, gateway or up; default: all."),
    origin: bool = typer.Option(False, "--origin", help="Show where each value came from."),
    config: Annotated[Path | None, typer.Option("--config", envvar="DRAGOMAN_CONFIG", help="TOML file.")] = None,
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Show the settings that a process would start with, from environment, file and defaults."""
    if process and process not in SECTIONS:
        raise Failure(f"there is no process {process!r}{did_you_mean(process, SECTIONS)}", remedy=", ".join(SECTIONS))
    names = [process] if process else list(SECTIONS)
    try:
        file = read_file(config.expanduser()) if config else None
        resolved = {name: resolve(_settings_type(name), {}, os.environ, file, section=name) for name in names}
    except ConfigError as error:
        raise Failure(str(error)) from None
    if as_json:
        print(json.dumps({name: _as_dict(entry) for name, entry in resolved.items()}))
        return
    console = make_console()
    for name, entry in resolved.items():
        table = Table(box=SIMPLE_HEAD, title=f"[{name}]".replace("[", "\\["), title_justify="left")
        for column in ("setting", "value", "variable", *(["origin"] if origin else [])):
            table.add_column(column, overflow="fold")
        for key, value in _as_dict(entry).items():
            cells = [key, value["value"], ENV_PREFIX + key.upper(), *([value["origin"]] if origin else [])]
            table.add_row(*(Text("" if cell is None else str(cell)) for cell in cells))
        console.print(table)


def _settings_type(name: str) -> Any:
    module, settings_type = SETTINGS_TYPES[name]
    return getattr(import_module(module), settings_type)


def _as_dict(resolved: Resolved[Any]) -> dict[str, dict[str, Any]]:
    shown = {}
    for field in dataclasses.fields(resolved.settings):
        value = getattr(resolved.settings, field.name)
        if field.name in _SECRETS and value:
            value = "(set)"
        elif isinstance(value, (tuple, Path)):
            value = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        shown[field.name] = {"value": value, "origin": resolved.origins[field.name]}
    return shown
