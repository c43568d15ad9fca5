"""`dragoman probe`: the devices of this machine, what was measured of them, and which one would be chosen."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dragoman_agent.pal.words import is_bound, quantity
from dragoman_cli.console import make_console
from dragoman_cli.failure import require_extras
from dragoman_cli.process import log_to_stderr

app = typer.Typer(add_completion=False, rich_markup_mode=None)

# The three dimensions of a profile, and what bounds them; each takes the values whose names begin so.
_GROUPS = (
    ("compute", ("compute",)),
    ("memory", ("memory", "link")),
    ("scheduling", ("scheduling",)),
    ("limits", ()),
)
_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@app.command()
def probe(
    as_json: bool = typer.Option(False, "--json", help="Print the capability matrix as JSON."),
    full: bool = typer.Option(False, "--full", help="Take every measurement: up to a minute a GPU, else 3 s."),
    fresh: bool = typer.Option(False, "--fresh", help="Measure again instead of reading the cached profile."),
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        typer.Option("--log-level", help="debug prints a line to stderr at the start and end of each step."),
    ] = "warning",
    cache_dir: Annotated[Path | None, typer.Option("--cache-dir", help="Where profiles are kept.")] = None,
) -> None:
    """Measure the devices of this machine; show what was chosen and why."""
    require_extras("agent", purpose="dragoman probe")
    from dragoman_agent.model.embedded import default_cache_dir
    from dragoman_agent.pal.probe import probe as measure

    log_to_stderr(log_level)
    report = measure(cache_dir or default_cache_dir(os.environ), fresh=fresh, full=full)
    if as_json:
        print(report.to_json())
        return
    console = make_console()
    _show_devices(console, report.inventory)
    for profile in report.profiles:
        _show_profile(console, profile, report.from_cache)


def _show_devices(console: Console, inventory: Any) -> None:
    """Every device with its verdict, then the remarks on each."""
    from dragoman_agent.pal.matrix import verdicts

    table = Table(box=SIMPLE_HEAD, title="devices", title_justify="left")
    for name in ("device", "kind", "architecture", "memory", "chosen", "why"):
        table.add_column(name, overflow="fold")
    remarks: list[str] = []
    for verdict in verdicts(inventory):
        facts = verdict.device.facts
        memory = quantity(facts.memory_bytes, "bytes") if facts.memory_bytes else "unknown"
        table.add_row(
            *(Text(str(cell)) for cell in (facts.name, _kind(facts.kind), facts.architecture, memory)),
            "yes" if verdict.chosen else "no",
            Text(verdict.reason),
        )
        remarks.extend(f"{facts.name}: {note}" for note in verdict.device.notes)
    if inventory.cuda_problem:
        remarks.insert(0, f"no CUDA device: {inventory.cuda_problem}")
    console.print(table)
    for remark in remarks:
        console.print(Text(f"  {remark}"))


def _kind(kind: str) -> str:
    from dragoman_agent.pal.found import UNTESTED_KINDS

    return f"{kind} (untested)" if kind in UNTESTED_KINDS else kind


def _show_profile(console: Console, profile: Any, from_cache: bool) -> None:
    origin = "from the cache; --fresh measures again" if from_cache else "measured now"
    console.print(Text(f"\nprofile of {profile.device.name} ({origin}, {profile.created})", style="italic"))
    left = dict(sorted(profile.values.items()))
    for title, dimensions in _GROUPS:
        chosen = {name: value for name, value in left.items() if not dimensions or name.split(".")[0] in dimensions}
        left = {name: value for name, value in left.items() if name not in chosen}
        if chosen:
            console.print(_table(title, chosen.items()))


def _table(title: str, values: Iterable[tuple[str, Any]]) -> Table:
    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left")
    for name in ("value", "", "unit", "provenance", "spread", "note"):
        table.add_column(
            name, justify="right" if name == "" else "left", no_wrap=name not in ("note", ""), overflow="fold"
        )
    for name, value in values:
        shown, unit = _shown(value)
        spread = f"{value.spread:.1%}" if value.spread is not None else ""
        table.add_row(*(Text(cell) for cell in (name, shown, unit, value.provenance, spread, value.note)))
    return table


def _shown(value: Any) -> tuple[str, str]:
    """A value and its unit as a person reads them; a list with the label of each number."""
    match value.value:
        case bool():
            return ("yes" if value.value else "no"), ""
        case str():
            return value.value, ""
        case tuple():
            labels = value.labels or ("",) * len(value.value)
            parts = [(label, _quantity(item, value.unit)) for label, item in zip(labels, value.value, strict=False)]
            return ", ".join(f"{label}: {text}" if label else text for label, text in parts), ""
        case _:
            shown, _, unit = _quantity(value.value, value.unit).partition(" ")
            return f"<= {shown}" if is_bound(value) else shown, unit


def _quantity(value: float, unit: str) -> str:
    """`quantity`, with a prefix for hertz and operations too."""
    if unit in ("Hz", "operations/s"):
        scale, prefix = next((entry for entry in _PREFIXES if abs(value) >= entry[0]), (1.0, ""))
        return f"{value / scale:.4g} {prefix}{unit}"
    return quantity(value, unit)
