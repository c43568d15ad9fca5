"""Plays a case against one language: sets the stage, runs the runner, compares what was seen with what is expected."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from clients.conformance.case import Case
from clients.conformance.certificates import Authority
from clients.conformance.expect import differences
from clients.conformance.fleet import Fleet
from clients.conformance.language import Language, built
from clients.conformance.observe import BadRunnerError, documents
from clients.conformance.processes import Server, StartError, start_agent
from clients.conformance.runner import Runner
from clients.conformance.scripted import ScriptedStage

# What the servers saw may arrive after the client's end: a cancel, a ticket given back.
_STAGE_SECONDS = 5.0
_NOWHERE = "127.0.0.1:1"

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a case went. `problems` is empty where it passed."""

    case: str
    language: str
    problems: tuple[str, ...]
    seconds: float


@dataclass
class Stage:
    """The servers of one case: what the runner connects to, and what they saw."""

    connect: dict[str, Any]
    fleet: Fleet | None = None
    scripted: ScriptedStage | None = None

    async def document(self) -> dict[str, Any]:
        """What the servers saw."""
        if self.scripted is not None:
            return self.scripted.document()
        return {"running": sum((await self.fleet.running()).values())} if self.fleet is not None else {}


@dataclass
class Harness:
    """Owner of an event loop in a thread, of the servers and of the runners. Use as a context manager."""

    _folder: tempfile.TemporaryDirectory[str] = field(default_factory=tempfile.TemporaryDirectory)
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)
    _runners: dict[str, Runner] = field(default_factory=dict)
    _fleets: dict[str, Fleet] = field(default_factory=dict)
    _open_agent: Server | None = None
    _authorities: dict[str, Authority] = field(default_factory=dict)

    def __enter__(self) -> Harness:
        threading.Thread(target=self._loop.run_forever, name="conformance", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._do(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._folder.cleanup()

    def play(self, case: Case, language: Language) -> Outcome:
        """Plays one case. Builds the runner at the first one; raises BuildError."""
        began = time.monotonic()
        if language.name not in self._runners:
            log = Path(self._folder.name) / f"{language.name}.log"
            self._runners[language.name] = Runner(language.command(built(language)), language.folder, log)
        try:
            problems = self._do(self._play(case, self._runners[language.name]))
        except StartError as error:
            problems = [str(error)]
        return Outcome(case.name, language.name, tuple(problems), time.monotonic() - began)

    def _do(self, work: Coroutine[Any, Any, R]) -> R:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _play(self, case: Case, runner: Runner) -> list[str]:
        async with self._stage(case) as stage:
            harm = _Harm(case.harness, stage.fleet)
            try:
                lines = await runner.run(self._instruction(case, stage), case.timeout_seconds, harm.saw)
                calls = documents(lines, len(case.calls))
            except BadRunnerError as error:
                return [str(error)]
            finally:
                await harm.finish()
            root: dict[str, Any] = {"calls": calls}
            expected = {"calls": [{"problems": [], **call["expect"]} for call in case.calls]}
            found = [*harm.problems, *_surprises(case, calls), *differences(expected, root, root)]
            return found + await _stage_differences(case.expect_stage, stage, root)

    def _instruction(self, case: Case, stage: Stage) -> dict[str, Any]:
        calls = [{key: value for key, value in call.items() if key != "expect"} for call in case.calls]
        tls = case.connect.get("tls")
        instruction = {
            "id": case.name,
            **stage.connect,
            "tenant": case.connect.get("tenant", ""),
            "retry": dict(case.retry),
            "calls": calls,
        }
        if tls:
            server, trusted = self._authority("ours"), self._authority(tls)
            key, certificate = server.issue("client")
            instruction["tls"] = {"ca_pem": trusted.pem, "certificate_pem": certificate, "key_pem": key}
        return instruction

    @contextlib.asynccontextmanager
    async def _stage(self, case: Case) -> AsyncIterator[Stage]:
        if case.stage_kind == "scripted":
            tls = self._authority("ours") if case.connect.get("tls") else None
            scripted = ScriptedStage(dict(case.stage), tls)
            await scripted.start()
            try:
                direct = case.connect.get("agent")
                controllers = [*case.connect.get("before", []), *scripted.controllers]
                where = (
                    {"controller": ",".join(controllers)} if direct is None else {"agent": scripted.addresses[direct]}
                )
                yield Stage(where, scripted=scripted)
            finally:
                await scripted.stop()
        elif case.stage_kind == "open":
            yield Stage({"agent": await self._open()})
        elif case.stage_kind == "nowhere":
            yield Stage({case.stage.get("as", "controller"): ",".join([*case.connect.get("before", []), _NOWHERE])})
        else:
            fleet = await self._fleet(case.stage_kind)
            fleet.prepare(case.stage)
            yield Stage({"controller": fleet.address}, fleet=fleet)

    async def _fleet(self, kind: str) -> Fleet:
        if kind not in self._fleets:
            folder = Path(self._folder.name) / kind
            folder.mkdir()
            # A doomed agent takes its time, so that it is in the middle of a stream when it dies.
            arguments = ("--null-speed", "1") if kind == "doomed" else ()
            self._fleets[kind] = Fleet(folder, *arguments, proxied=kind == "fleet")
        await self._fleets[kind].start()
        return self._fleets[kind]

    async def _open(self) -> str:
        if self._open_agent is None:
            folder = Path(self._folder.name) / "open"
            folder.mkdir()
            self._open_agent = await asyncio.to_thread(start_agent, folder, "--open", "--null-oracle", "echo")
        return self._open_agent.address

    def _authority(self, name: str) -> Authority:
        if name not in self._authorities:
            self._authorities[name] = Authority()
        return self._authorities[name]

    async def _stop(self) -> None:
        await asyncio.gather(*(runner.stop() for runner in self._runners.values()))
        await asyncio.gather(*(fleet.stop() for fleet in self._fleets.values()))
        if self._open_agent is not None:
            await asyncio.to_thread(self._open_agent.stop)


class _Harm:
    """Kills or freezes the agent that runs the stream, once so many of its tokens were seen."""

    def __init__(self, actions: Mapping[str, Any], fleet: Fleet | None) -> None:
        self._actions, self._fleet = actions, fleet
        self._num_tokens = 0
        self._task: asyncio.Task[None] | None = None

    def saw(self, line: dict[str, Any]) -> None:
        """Counts the tokens of an observation."""
        if line["event"] != "token" or self._task is not None or self._fleet is None:
            return
        self._num_tokens += len(line["token_ids"])
        for name, number in (("kill_after_tokens", signal.SIGKILL), ("freeze_after_tokens", signal.SIGSTOP)):
            if name in self._actions and self._num_tokens >= self._actions[name]:
                self._task = asyncio.get_running_loop().create_task(self._fleet.harm(number))

    async def finish(self) -> None:
        """Waits for the harm to be done, and takes what was harmed away."""
        if self._task is not None and self._fleet is not None:
            await self._task
            await self._fleet.bury()

    @property
    def problems(self) -> list[str]:
        """A fault that did not happen proves nothing."""
        return ["the agent was never harmed"] if self._actions and self._task is None else []


def _surprises(case: Case, calls: list[dict[str, Any]]) -> list[str]:
    """What the errors were that no one expected."""
    pairs = enumerate(zip(case.calls, calls, strict=True))
    return [
        f"calls[{index}]: {seen['error']['reason']}: {seen['error']['message']}"
        for index, (call, seen) in pairs
        if seen["end"] == "error" and call["expect"].get("end") != "error"
    ]


async def _stage_differences(expected: Mapping[str, Any], stage: Stage, root: dict[str, Any]) -> list[str]:
    if not expected:
        return []
    deadline = time.monotonic() + _STAGE_SECONDS
    while True:
        seen = await stage.document()
        found = differences(expected, seen, {**root, "stage": seen}, "stage")
        if not found or time.monotonic() >= deadline:
            return found
        await asyncio.sleep(0.02)
