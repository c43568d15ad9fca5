"""`dragoman plan`: what would be served on a card, how it fits and how quick it would be. Needs no GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from dragoman_agent.pal.words import quantity
from dragoman_cli.console import make_console
from dragoman_cli.plan_text import field_text, newest
from dragoman_cli.planning import Planned, Request, plan_offline

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def plan(
    model: Annotated[
        str, typer.Option("--model", help="A model's name (see `dragoman models ls`), file or directory.")
    ],
    profile: Annotated[
        str, typer.Option("--profile", help="A card of the library or a profile file; default: this machine's device.")
    ] = "",
    context: Annotated[str, typer.Option("--context", help="Tokens of a request, such as 4k.")] = "",
    concurrency: Annotated[int | None, typer.Option("--concurrency", min=1, max=4096, help="Requests at once.")] = None,
    memory_utilization: Annotated[
        float | None, typer.Option("--memory-utilization", min=0.01, max=0.99, help="Share of the free memory to use.")
    ] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="Number format on a CPU: auto, int8 or float32.")] = "auto",
    kv_dtype: Annotated[str, typer.Option("--kv-dtype", help="K and V on a GPU: auto, bf16 or fp8.")] = "auto",
    deterministic: Annotated[bool, typer.Option("--deterministic", help="The same tokens whatever else runs.")] = False,
    pal: Annotated[str, typer.Option("--pal", help="off: the one fixed configuration.")] = "on",
    pal_arena: Annotated[str, typer.Option("--pal-arena", help="on or off.")] = "on",
    pal_launch_tuning: Annotated[str, typer.Option("--pal-launch-tuning", help="on or off.")] = "on",
    pal_async_copy: Annotated[str, typer.Option("--pal-async-copy", help="on or off.")] = "on",
    pal_link_policy: Annotated[str, typer.Option("--pal-link-policy", help="on or off.")] = "on",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    cache_dir: Annotated[Path | None, typer.Option("--cache-dir", help="Where models and profiles are kept.")] = None,
) -> None:
    """Plan a model on a card without having it: memory line by line, predicted speed. Exits with 1 where it does not fit."""
    switches = {
        "pal": pal, "arena": pal_arena, "launch_tuning": pal_launch_tuning, "async_copy": pal_async_copy,
        "link_policy": pal_link_policy,
    }  # fmt: skip
    request = Request(
        profile, model, context, concurrency, memory_utilization, dtype, switches, cache_dir, deterministic, kv_dtype
    )
    planned = plan_offline(request, "dragoman plan")
    if as_json:
        print(_to_json(planned))
    else:
        _show(planned)
    if planned.outlook.problem:
        raise typer.Exit(1)


def _to_json(planned: Planned) -> str:
    from google.protobuf.json_format import MessageToDict

    from dragoman_agent.pal.offline import outlook_to_dict

    profile = planned.named.profile
    decisions = MessageToDict(planned.to_message(), preserving_proto_field_name=True).get("decisions", [])
    body = {
        "model": planned.model.name,
        "profile": {"name": profile.name, "origin": planned.named.origin, "device": profile.device.name},
        **outlook_to_dict(planned.outlook),
        "decisions": decisions,
    }
    return json.dumps(body, indent=1)


def _show(planned: Planned) -> None:
    from dragoman_agent.pal.forced import describe

    console = make_console()
    profile, outlook = planned.named.profile, planned.outlook
    print(f"{planned.model.name} on {profile.device.name}")
    print(f"profile {describe(profile)}: {planned.named.origin}")
    message = planned.to_message()
    if outlook.plan is not None:
        console.print(_fields(message))
        console.print(_memory(message.plan.memory))
        console.print(_forecasts(outlook.forecasts))
    if outlook.problem:
        print(f"It does not fit: {outlook.problem}")
        if outlook.changes:
            print("What would make it fit, cheapest first:")
            for number, change in enumerate(outlook.changes, 1):
                print(f"  {number}. {change}")


def _fields(message: Any) -> Table:
    reasons = {decision.decision_id: decision.reason for decision in newest(message.decisions).values()}
    table = Table(box=SIMPLE_HEAD, title="plan", title_justify="left")
    for name in ("field", "value", "why"):
        table.add_column(name, no_wrap=name == "field", overflow="fold")
    for entry in message.plan.fields:
        why = Text(reasons.get(entry.decision_id, ""))
        table.add_row(Text(entry.name), Text(field_text(entry)), why)
    return table


def _memory(lines: Any) -> Table:
    total = sum(line.size_bytes for line in lines)
    table = Table(box=SIMPLE_HEAD, title="memory budget", title_justify="left", show_footer=True)
    table.add_column("line", footer="total")
    table.add_column("size", justify="right", footer=quantity(total, "bytes"))
    table.add_column("share", justify="right", footer="100%")
    for line in lines:
        table.add_row(line.name, quantity(line.size_bytes, "bytes"), f"{line.size_bytes / total:.1%}")
    return table


def _forecasts(forecasts: Any) -> Table:
    table = Table(box=SIMPLE_HEAD, title="predicted", title_justify="left")
    for name in ("requests at once", "tokens each", "running", "TTFT", "TPOT", "tokens/s"):
        table.add_column(name, justify="right")
    for entry in forecasts:
        told = entry.prediction
        table.add_row(
            f"{entry.concurrency:,}", f"{entry.context_tokens:,}", f"{told.num_running:,}",
            quantity(told.ttft_seconds, "s"), quantity(told.tpot_seconds, "s"), f"{told.tokens_per_second:,.0f}",
        )  # fmt: skip
    return table
