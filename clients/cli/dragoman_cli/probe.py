"""`dragoman probe`: the devices of this machine, what was measured of them, and which one would be chosen."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from dragoman_cli.console import make_console
from dragoman_cli.failure import require_extras

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def probe(
    as_json: bool = typer.Option(False, "--json", help="Print the capability matrix as JSON."),
    fresh: bool = typer.Option(False, "--fresh", help="Measure again instead of reading the cached profile."),
    cache_dir: Annotated[Path | None, typer.Option("--cache-dir", help="Where profiles are kept.")] = None,
) -> None:
    """Measure the devices of this machine; show what was chosen and why."""
    require_extras("agent", purpose="dragoman probe")
    from dragoman_agent.model.embedded import default_cache_dir
    from dragoman_agent.pal.probe import probe as measure

    report = measure(cache_dir or default_cache_dir(os.environ), fresh=fresh)
    if as_json:
        print(report.to_json())
        return
    console = make_console()
    console.print(_devices(report))
    for profile in report.profiles:
        console.print(_values(profile, report.from_cache))


def _devices(report: Any) -> Table:
    from dragoman_agent.pal.select import Needs, NoDeviceError, choose_device

    table = Table(box=SIMPLE_HEAD, title="devices", title_justify="left")
    for name in ("device", "kind", "architecture", "memory", "chosen", "why"):
        table.add_column(name)
    try:
        # No model is named here: what would be chosen for one that fits everywhere.
        verdicts = choose_device(report.inventory, "auto", Needs("any model", 0, 0)).verdicts
    except NoDeviceError as error:
        table.caption = str(error)
        verdicts = ()
    for verdict in verdicts:
        facts = verdict.device.facts
        memory = f"{facts.memory_bytes / 2**30:.1f} GiB"
        table.add_row(
            *(Text(str(cell)) for cell in (facts.name, facts.kind, facts.architecture, memory)),
            "yes" if verdict.chosen else "no",
            Text(verdict.reason),
        )
    return table


def _values(profile: Any, from_cache: bool) -> Table:
    origin = "from the cache; --fresh measures again" if from_cache else "measured now"
    table = Table(
        box=SIMPLE_HEAD, title=f"profile of {profile.device.name} ({origin}, {profile.created})", title_justify="left"
    )
    for name in ("value", "", "unit", "provenance", "spread", "note"):
        table.add_column(name, justify="right" if name == "" else "left", no_wrap=name != "note", overflow="fold")
    for name, value in sorted(profile.values.items()):
        spread = f"{value.spread:.1%}" if value.spread is not None else ""
        table.add_row(*(Text(cell) for cell in (name, _shown(value), value.unit, value.provenance, spread, value.note)))
    return table


def _shown(value: Any) -> str:
    if isinstance(value.value, tuple):
        labels = value.labels or [""] * len(value.value)
        return ", ".join(
            f"{label}:{_number(item)}" if label else _number(item)
            for label, item in zip(labels, value.value, strict=False)
        )
    return _number(value.value)


def _number(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.4g}"
