"""The console that tables are printed on."""

from __future__ import annotations

from rich.console import Console

_PIPE_COLUMNS = 160


def make_console() -> Console:
    """stdout; on a pipe nothing is gained by squeezing a table into 80 columns."""
    console = Console()
    return console if console.is_terminal else Console(width=_PIPE_COLUMNS)
