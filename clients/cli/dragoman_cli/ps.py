"""`dragoman ps`: the agents of a controller, their load, and how quick they are now."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from http.client import HTTPException
from typing import Any

import typer
from rich.box import SIMPLE_HEAD
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dragoman_cli.console import make_console
from dragoman_cli.failure import Failure

app = typer.Typer(add_completion=False, rich_markup_mode=None)

_COUNTER = "dragoman_output_tokens_total"
_SAMPLE_SECONDS = 0.5


@app.command()
def ps(
    controller: str = typer.Option(
        "127.0.0.1:50050", "--controller", envvar="DRAGOMAN_CONTROLLER", help="Address of the controller."
    ),
    watch: bool = typer.Option(False, "--watch", help="Refresh until Ctrl-C."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Show agents, their load, and what runs."""
    if as_json and watch:
        raise Failure(
            "--json and --watch are both given", "JSON is printed once", "ask for one of the two", exit_code=2
        )
    if as_json:
        print(json.dumps(asyncio.run(_rows(controller))))
    elif watch:
        asyncio.run(_watch(controller))
    else:
        make_console().print(_table(asyncio.run(_rows(controller)), controller))


async def _watch(controller: str) -> None:
    with Live(_table(await _rows(controller), controller)) as live:
        while True:
            began = time.monotonic()
            live.update(_table(await _rows(controller), controller))
            # Where no agent's pace is sampled, nothing else holds the loop back.
            await asyncio.sleep(max(0.0, began + _SAMPLE_SECONDS - time.monotonic()))


async def _rows(controller: str) -> list[dict[str, Any]]:
    """One an agent, with the tokens a second over half a second. Raises DragomanError."""
    from dragoman import AsyncClient

    async with AsyncClient(controller) as client:
        addresses = [member.agent.metrics_address for member in await client.agents()]
        paces = dict(zip(addresses, await asyncio.gather(*map(_tokens_per_second, addresses)), strict=True))
        members = await client.agents()
    # An agent that came meanwhile has no pace yet.
    return [_row(member, paces.get(member.agent.metrics_address)) for member in members]


def _row(member: Any, pace: float | None) -> dict[str, Any]:
    from dragoman.durations import seconds_of
    from dragoman.v1 import agent_pb2

    models = member.agent.models
    blocks = models[0].kv_block_count if models else 0
    chosen = [candidate.device for candidate in member.agent.devices if candidate.chosen]
    return {
        "agent_id": member.agent.agent_id,
        "state": agent_pb2.AgentState.Name(member.state).removeprefix("AGENT_STATE_").lower(),
        "models": [model.model for model in models],
        "device": chosen[0].name if chosen else "",
        "running": member.load.running_requests,
        "waiting": member.load.waiting_requests,
        "kv_used_ratio": 1 - member.load.free_kv_blocks / blocks if blocks and member.HasField("load") else None,
        "kv_tokens": blocks * models[0].kv_block_tokens if models else 0,
        "tokens_per_second": pace,
        "step_seconds": member.load.step_seconds,
        "heartbeat_age_seconds": seconds_of(member.heartbeat_age),
        "data_address": member.agent.data_address,
        "version": member.agent.version,
    }


async def _tokens_per_second(metrics_address: str) -> float | None:
    if not metrics_address:
        return None
    first, began = await asyncio.to_thread(_read_counter, metrics_address), time.monotonic()
    await asyncio.sleep(_SAMPLE_SECONDS)
    second, ended = await asyncio.to_thread(_read_counter, metrics_address), time.monotonic()
    return None if first is None or second is None else (second - first) / (ended - began)


def _read_counter(metrics_address: str) -> float | None:
    try:
        # A proxy meant for the web has no way to an agent.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"http://{metrics_address}/metrics", timeout=2) as response:
            lines = response.read().decode().splitlines()
    except (OSError, HTTPException, UnicodeDecodeError):  # nobody answers there, or somebody else does
        return None
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(_COUNTER))


def _table(rows: list[dict[str, Any]], controller: str) -> Table:
    table = Table(box=SIMPLE_HEAD, title=f"agents of {controller}", title_justify="left")
    for name in ("agent", "state", "model", "device", "running", "waiting", "KV used", "tokens/s", "address"):
        table.add_column(name, no_wrap=True, overflow="ellipsis" if name in ("model", "device") else "fold")
    if not rows:
        table.caption = "no agent has registered; start one with: dragoman-agent --controllers " + controller
    for row in rows:
        used = "" if row["kv_used_ratio"] is None else f"{row['kv_used_ratio']:.0%} of {row['kv_tokens']:,}"
        pace = "" if row["tokens_per_second"] is None else f"{row['tokens_per_second']:.1f}"
        cells = (
            row["agent_id"], row["state"], ", ".join(row["models"]), row["device"], str(row["running"]),
            str(row["waiting"]), used, pace, row["data_address"],
        )  # fmt: skip
        table.add_row(*(Text(cell) for cell in cells))
    return table
