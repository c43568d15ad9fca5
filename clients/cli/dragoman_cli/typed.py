"""Options that were typed on the command line: one without effect is refused there, and passed over in the environment."""

from __future__ import annotations

from collections.abc import Iterable

import typer

from dragoman_cli.failure import Failure


def is_typed(context: typer.Context, name: str) -> bool:
    """Whether the option of this parameter was typed, not taken from the environment or its default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def refuse_typed(context: typer.Context, names: Iterable[str], why: str) -> None:
    """Raises Failure for the first of these parameters that was typed, which has no effect for the reason `why`."""
    for name in names:
        if is_typed(context, name):
            raise Failure(f"--{name.replace('_', '-')} has no effect here", why, "leave it out", exit_code=2)
