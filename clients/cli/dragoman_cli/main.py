"""The `dragoman` command: finds the verb, imports only its file, and turns errors into words."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

from dragoman.channel import quiet_grpc

# verb -> (module, what --help lists); the order is the order of a newcomer's first day.
VERBS = {
    "up": ("up", "Start controller, agent and gateway here, and serve a model."),
    "chat": ("chat", "Talk to a served model."),
    "ps": ("ps", "Show agents, their load, and what runs."),
    "drain": ("drain", "Take an agent out of service: it finishes what runs there."),
    "probe": ("probe", "Measure the devices of this machine; show what was chosen and why."),
    "plan": ("plan", "Plan a model on a card without having it: memory, choices, predicted speed."),
    "explain": ("explain", "Explain the decisions of an agent, or of a plan, in plain words."),
    "doctor": ("doctor", "Check this machine and say how to fix what is wrong."),
    "models": ("models", "List, show, verify and fetch models."),
    "simulate": ("simulate", "Simulate a fleet under load: admission, placement and quotes in virtual time."),
    "bench": ("bench", "Measure against other engines."),
    "config": ("config_show", "Show the settings in effect and where each came from."),
    "version": ("version", "Show versions."),
}


class LazyGroup(TyperGroup):
    """Lists the verbs from the table, and imports the file of the one that runs."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, stub, rest = super().resolve_command(ctx, args)
        if stub is None or name is None:
            return name, stub, rest
        return name, load_verb(name), rest


def load_verb(name: str) -> Any:
    """The command of a verb, imported now."""
    module = import_module(f"dragoman_cli.{VERBS[name][0]}")
    command = typer.main.get_command(module.app)
    command.name = name
    return command


def build_app() -> Any:
    """The root command."""
    app = typer.Typer(cls=LazyGroup, add_completion=True, no_args_is_help=True, rich_markup_mode=None)

    @app.callback(help="LLM serving that measures the device, plans from the measurement and explains each decision.")
    def root(
        verbose: bool = typer.Option(False, "-v", "--verbose", help="Show tracebacks of errors."),
    ) -> None:
        if verbose:
            os.environ["DRAGOMAN_DEBUG"] = "1"

    for name, (_, summary) in VERBS.items():
        app.command(name, help=summary)(_stub)
    return typer.main.get_command(app)


def _stub() -> None:
    """Stands for a verb in the listing."""


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line and exits."""
    quiet_grpc()
    args = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character shows "?" and not an error
    try:
        build_app().main(args=args, prog_name="dragoman")
    except (KeyboardInterrupt, BrokenPipeError):
        sys.exit(130)
    except Exception as error:  # the rim: every error becomes words, and a traceback with -v
        from dragoman_cli.failure import report

        sys.exit(report(error))


if __name__ == "__main__":
    main()
