"""`dragoman drain`: takes an agent out of service, and shows what still runs there and for how long."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import typer

app = typer.Typer(add_completion=False, rich_markup_mode=None)

_NUM_SHOWN = 5


@app.command()
def drain(
    agent: str = typer.Argument(help="Id of the agent, as 'dragoman ps' shows it."),
    grace: float = typer.Option(180.0, "--grace", min=0.0, help="Seconds until what still runs is handed over."),
    undo: bool = typer.Option(False, "--undo", help="Take back a drain that has not come to its end."),
    controller: str = typer.Option(
        "127.0.0.1:50050",
        "--controller",
        envvar="DRAGOMAN_CONTROLLER",
        help="Address of the controller, several with commas.",
    ),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON line for each report."),
) -> None:
    """Let an agent finish its requests and leave; it gets no new ones. Ctrl-C stops watching, not the drain."""
    if undo:
        asyncio.run(_undo(agent, controller))
        print(json.dumps({"agent_id": agent, "drained": False}) if as_json else f"{agent} takes requests again")
    else:
        asyncio.run(_drain(agent, grace, controller, as_json))


async def _drain(agent: str, grace: float, controller: str, as_json: bool) -> None:
    from dragoman import AsyncClient

    shown = ""
    async with AsyncClient(controller) as client:
        async for report in client.drain(agent, grace_seconds=grace):
            line = json.dumps(_fields(agent, report)) if as_json else _sentence(agent, report)
            if line != shown:
                print(line, flush=True)
            shown = line


async def _undo(agent: str, controller: str) -> None:
    from dragoman import AsyncClient

    async with AsyncClient(controller) as client:
        await client.undrain(agent)


def _fields(agent: str, report: Any) -> dict[str, Any]:
    from dragoman.durations import seconds_of

    streams = [{"request_id": one.request_id, "seconds": seconds_of(one.predicted_remaining)} for one in report.streams]
    return {"agent_id": agent, "drained": report.drained, "streams": streams}


def _sentence(agent: str, report: Any) -> str:
    if report.drained:
        return f"{agent} is drained"
    streams = sorted(_fields(agent, report)["streams"], key=lambda one: -float(one["seconds"]))
    if not streams:
        return f"{agent} drains: what still runs was granted by another controller, or is about to end"
    each = ", ".join(f"{one['request_id']} {one['seconds']:.1f} s" for one in streams[:_NUM_SHOWN])
    more = f" and {len(streams) - _NUM_SHOWN} more" if len(streams) > _NUM_SHOWN else ""
    return f"{agent} drains: {len(streams)} running, done in about {streams[0]['seconds']:.1f} s ({each}{more})"
