"""`dragoman up`: one command from nothing to a served model, and back to nothing with Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from dragoman_cli.config import Resolved, flag_of, misspelled_variables, parse_with_origins, read_file, resolve
from dragoman_cli.failure import Failure, report, require_extras
from dragoman_cli.loading import Loading
from dragoman_cli.ports import check_host, check_port
from dragoman_cli.ready import Summary, build_curl, human_bytes, human_count, prove_token, read_facts
from dragoman_cli.supervisor import Child, Supervisor
from dragoman_cli.up_settings import PORTS, UpSettings, agent_arguments, controller_arguments, gateway_arguments

app = typer.Typer(add_completion=False, rich_markup_mode=None)

_START_SECONDS = 60.0


@app.command(
    # The settings have one reader for flags, environment and file; it prints --help as well.
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []},
    add_help_option=False,
)
def up(context: typer.Context) -> None:
    """Start controller, agent and gateway here, and serve a model."""
    began = time.monotonic()
    resolved = parse_with_origins(UpSettings, "dragoman up", list(context.args))
    # Here and not in the servers, which do not know each other's settings.
    for warning in misspelled_variables(os.environ):
        print(f"warning: {warning}", file=sys.stderr)
    check_machine(resolved.settings)
    raise typer.Exit(asyncio.run(Up(resolved, began).run()))


def check_machine(settings: UpSettings) -> None:
    """Finds what would fail, before anything is started. Raises Failure."""
    require_extras("agent", "controller", "gateway", purpose="dragoman up")
    check_host(settings.host)
    taken: dict[int, str] = {}
    for name, what in PORTS.items():
        port = getattr(settings, name)
        if port and port in taken:
            raise Failure(
                f"port {port} for {what} cannot be used",
                f"{flag_of(taken[port])} is {port} as well",
                f"pass another {flag_of(name)} (0 takes a free one)",
            )
        taken[port] = name
        check_port(settings.host if name == "port" else "127.0.0.1", port, flag_of(name), what)
    if settings.model == "embedded" and settings.device != "null":
        from dragoman_agent.model.embedded import default_cache_dir, embedded_path, fetch_command
        from dragoman_agent.model.errors import ModelFileError

        cache_dir = settings.cache_dir or default_cache_dir(os.environ)
        try:
            embedded_path(cache_dir)
        except ModelFileError as error:
            raise Failure(
                "the embedded model is not here yet", f"{error.path}: {error.what}", fetch_command(cache_dir)
            ) from None


class Up:
    """One run: start, show, prove, wait, stop."""

    def __init__(self, resolved: Resolved[UpSettings], began: float) -> None:
        self._settings = resolved.settings
        self._resolved = resolved
        self._began = began
        self._console = Console(stderr=True)
        self._loading = Loading(self._console)
        self._supervisor = Supervisor(self._show_log)
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._stopping = False

    async def run(self) -> int:
        """Returns the exit status: 0 after a stop that was asked for, 1 when something failed."""
        self._catch_signals()
        work = asyncio.create_task(self._serve())
        asked = asyncio.create_task(self._stop.wait())
        code = 0
        try:
            await asyncio.wait({work, asked}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                await work
        except Exception as error:  # whatever it was, the children must not outlive it
            code = report(error)
        finally:
            work.cancel()
            asked.cancel()
            await asyncio.gather(work, asked, return_exceptions=True)
            self._stopping = True
            if self._supervisor.children and code == 0:
                self._say("stopping")
            await self._supervisor.stop(self._hurry)
        return code

    def _catch_signals(self) -> None:
        def caught() -> None:
            if self._stop.is_set():
                self._hurry.set()
            self._stop.set()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, caught)

    async def _serve(self) -> None:
        with self._loading:
            addresses, info = await self._start()
            summary = await self._supervisor.unless_death(self._summary(addresses, info))
        if self._settings.json_summary:
            print(summary.to_json(), flush=True)
        else:
            show_box(summary)
        raise (await self._supervisor.first_death()).death()

    async def _start(self) -> tuple[dict[str, str], Mapping[str, Any]]:
        environ = self._child_environ()
        settings = self._settings
        self._say("starting the controller, the agent and the gateway")
        start = self._supervisor.start
        controller = await start("controller", "dragoman_controller.main", controller_arguments(settings), environ)
        serving = await self._first("serving", controller)
        grpc_address = str(serving["grpc"])
        agent = await start(
            "agent", "dragoman_agent.main", agent_arguments(settings, self._resolved.origins, grpc_address), environ
        )
        gateway = await start("gateway", "dragoman_gateway.main", gateway_arguments(settings, grpc_address), environ)
        addresses = {"controller": grpc_address, "controller_metrics": str(serving.get("metrics", ""))}
        http = asyncio.create_task(self._first("serving", gateway))
        try:
            info = await self._load(agent, addresses)
            addresses["http"] = str((await http)["http"])
        finally:
            http.cancel()
        return addresses, info

    async def _load(self, agent: Child, addresses: dict[str, str]) -> Mapping[str, Any]:
        """Follows the agent until its model has made a first step."""
        while True:
            event = await agent.event()
            match event.get("event"):
                case "serving":
                    addresses["agent"] = str(event["grpc"])
                    addresses["agent_metrics"] = str(event.get("metrics", ""))
                    addresses["agent_id"] = str(event.get("agent_id", ""))
                    await self._supervisor.unless_death(self._show_device(addresses))
                case "progress":
                    self._loading.event(event)
                case "ready":
                    info = event.get("info")
                    return info if isinstance(info, dict) else {}
                case "fatal":
                    raise Failure("the agent cannot serve the model", str(event.get("message", "")))

    async def _first(self, kind: str, child: Child) -> Mapping[str, Any]:
        try:
            async with asyncio.timeout(_START_SECONDS):
                return await child.expect(kind)
        except TimeoutError:
            raise Failure(f"the {child.name} did not start within {_START_SECONDS:.0f} s", child.last_error()) from None

    async def _show_device(self, addresses: Mapping[str, str]) -> None:
        facts = await read_facts(addresses["agent"], addresses["agent_id"])
        self._say(f"device   {facts['device']} ({facts['device_kind']}): {facts['device_reason']}")
        for rejected in facts["rejected_devices"]:
            self._say(f"         not {rejected}")
        if facts["profile"]:
            self._say(f"profile  {facts['profile']}: {facts['profile_reason']}")
        if facts["switches_off"]:
            self._say(f"         switched off: {facts['switches_off']}")
        self._say(
            f"plan     {facts['road']}, KV in {facts['kv_dtype']}, context {facts['max_context_tokens']:,} tokens, "
            f"KV for {facts['num_kv_tokens']:,} tokens, {facts['max_num_seqs']} sequences at once"
        )
        if facts["road_reason"]:
            self._say(f"         {facts['road']}: {facts['road_reason']}")

    async def _summary(self, addresses: Mapping[str, str], info: Mapping[str, Any]) -> Summary:
        facts = await read_facts(addresses["agent"], addresses["agent_id"])
        host, port = addresses["http"].rsplit(":", 1)
        model = str(info.get("model") or facts["model"])
        key = gateway_key(self._resolved.path)
        proof = await prove_token(host.strip("[]"), int(port), model, key)
        facts["model"] = model
        facts["weight_bytes"] = facts["weight_bytes"] or int(info.get("weight_bytes", 0))
        url = f"http://{addresses['http']}"
        metrics = (addresses["controller_metrics"], addresses["agent_metrics"], addresses["http"])
        return Summary(
            **facts,
            num_parameters=int(info.get("num_parameters", 0)),
            sampling_defaults=str(info.get("sampling_defaults", "")),
            chat_problem=proof.chat_problem,
            http_url=url,
            controller=addresses["controller"],
            agent=addresses["agent"],
            metrics_urls=tuple(f"http://{address}/metrics" for address in metrics if address),
            first_token=proof.first_token,
            elapsed_seconds=round(time.monotonic() - self._began, 2),
            curl=build_curl(url, model, with_key=bool(key), with_chat=not proof.chat_problem),
        )

    def _child_environ(self) -> dict[str, str]:
        environ = dict(os.environ)
        if self._resolved.path is not None:
            environ["DRAGOMAN_CONFIG"] = str(self._resolved.path.resolve())
        return environ

    def _show_log(self, name: str, line: str) -> None:
        # What a process says while it is being stopped is no news, unless someone looks for trouble.
        if not self._stopping or os.environ.get("DRAGOMAN_DEBUG"):
            self._loading.line(f"{name} | {line}")

    def _say(self, text: str) -> None:
        self._loading.line(text)


def gateway_key(config: Path | None) -> str:
    """A key that the gateway takes, from its own settings; empty when it asks for none."""
    from dragoman_gateway.config import GatewaySettings

    file = read_file(config) if config else None
    settings = resolve(GatewaySettings, {}, os.environ, file, section="gateway").settings
    if settings.api_key or settings.api_key_file is None:
        return settings.api_key
    # The gateway itself has read this file before, and refuses one without a key.
    return next(words[0] for line in settings.api_key_file.read_text().splitlines() if (words := line.split()))


def show_box(summary: Summary) -> None:
    """The ready box, and below it the command to paste: outside, so that no border comes with it."""
    table = Table.grid(padding=(0, 2))
    for name, value in _box_rows(summary):
        table.add_row(name, Text(value))
    Console().print(Panel(table, title="Dragoman is ready", title_align="left", expand=False))
    print(f"\n{summary.curl}\n\nCtrl-C stops everything.", flush=True)


def _box_rows(summary: Summary) -> list[tuple[str, str]]:
    size = human_bytes(summary.weight_bytes) if summary.weight_bytes else ""
    parameters = f"{human_count(summary.num_parameters)} parameters" if summary.num_parameters else ""
    about = ", ".join(part for part in (parameters, size) if part)
    return [
        ("model", f"{summary.model} ({about})" if about else summary.model),
        (
            "computed",
            f"{summary.road}, KV {summary.kv_dtype}" + (f": {reason}" if (reason := summary.road_reason) else ""),
        ),
        ("device", f"{summary.device}: {summary.device_reason}"),
        *_planning_rows(summary),
        ("context", f"{summary.max_context_tokens:,} tokens"),
        ("KV cache", f"{summary.num_kv_tokens:,} tokens, up to {summary.max_num_seqs} sequences at once"),
        ("defaults", summary.sampling_defaults),
        *([("no chat", summary.chat_problem)] if summary.chat_problem else []),
        ("OpenAI API", f"{summary.http_url}/v1"),
        ("gRPC", f"controller {summary.controller}, agent {summary.agent}"),
        ("metrics", "  ".join(summary.metrics_urls)),
        ("first token", f"{summary.first_token!r} through the gateway"),
        ("ready in", f"{summary.elapsed_seconds:.1f} s"),
    ]


def _planning_rows(summary: Summary) -> list[tuple[str, str]]:
    """What makes this plan another than the measured device's own."""
    rows = []
    if summary.profile_reason.startswith("asked for"):
        rows.append(("profile", f"{summary.profile}: {summary.profile_reason}"))
    if summary.switches_off:
        rows.append(("switched off", summary.switches_off))
    return rows
