"""One runner process of a language: instructions down, observations up, one JSON object a line (README.md)."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from clients.conformance.observe import BadRunnerError

PROTOCOL = 1
_LINE_BYTES = 64 << 20


class Runner:
    """Owner of the process. A runner that breaks the protocol, hangs or dies is replaced at the next case."""

    def __init__(self, command: list[str], folder: Path, log: Path) -> None:
        self._command, self._folder, self._log = command, folder, log
        self._process: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()

    async def run(
        self, instruction: dict[str, Any], timeout_seconds: float, seen: Callable[[dict[str, Any]], None]
    ) -> list[dict[str, Any]]:
        """Every observation of one instruction; each also goes to `seen` as it comes. Raises BadRunnerError."""
        async with self._lock:
            try:
                async with asyncio.timeout(timeout_seconds):
                    return await self._exchange(instruction, seen)
            except TimeoutError:
                await self.stop()
                raise BadRunnerError(f"no end within {timeout_seconds:g} s{self._tail()}") from None
            except BaseException:
                await self.stop()
                raise

    async def _exchange(
        self, instruction: dict[str, Any], seen: Callable[[dict[str, Any]], None]
    ) -> list[dict[str, Any]]:
        process = self._process or await self._start()
        assert process.stdin is not None
        process.stdin.write(json.dumps(instruction).encode() + b"\n")
        await process.stdin.drain()
        lines: list[dict[str, Any]] = []
        while True:
            line = await self._read(process)
            if line["event"] == "done":
                if line.get("id") != instruction["id"]:
                    raise BadRunnerError(f"done with {line.get('id')!r}, not with {instruction['id']!r}")
                return lines
            if line["event"] == "unsupported":
                raise BadRunnerError(f"not supported: {line.get('what')}")
            lines.append(line)
            seen(line)

    async def _read(self, process: asyncio.subprocess.Process) -> dict[str, Any]:
        assert process.stdout is not None
        raw = await process.stdout.readline()
        if not raw:
            code = await process.wait()
            raise BadRunnerError(f"the runner ended with {code}{self._tail()}")
        try:
            line = json.loads(raw)
        except ValueError:
            raise BadRunnerError(f"not JSON: {raw[:200]!r}") from None
        if not isinstance(line, dict) or not isinstance(line.get("event"), str):
            raise BadRunnerError(f"not an observation: {raw[:200]!r}")
        return line

    async def _start(self) -> asyncio.subprocess.Process:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("DRAGOMAN_")}
        with self._log.open("ab") as stderr:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                cwd=self._folder,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=stderr,
                limit=_LINE_BYTES,
                env=environ,
            )
        self._process = process
        hello = await self._read(process)
        if hello["event"] != "hello" or hello.get("protocol") != PROTOCOL:
            raise BadRunnerError(f'the first line must be {{"event": "hello", "protocol": {PROTOCOL}}}, not {hello}')
        return process

    async def stop(self) -> None:
        """Closes its stdin, at which a runner ends by itself; kills it after 2 s."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), 2)
        except TimeoutError:
            process.kill()
            await process.wait()

    def _tail(self) -> str:
        text = self._log.read_text(encoding="utf-8", errors="replace").strip() if self._log.exists() else ""
        return f"; its stderr ends: {text[-1500:]}" if text else ""
