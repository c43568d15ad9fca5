"""Exchanges of KV blocks with the engine: what it was asked for and has not answered yet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from dragoman_agent.engine.messages import BlocksExported, BlocksImported, BringBlocks, ExportBlocks, ImportBlocks

Command = ExportBlocks | ImportBlocks | BringBlocks
Answer = BlocksExported | BlocksImported


class EngineExchanges:
    """Owns the futures of the answers, by exchange id."""

    def __init__(self, send: Callable[[Command], None]) -> None:
        self._send = send
        self._asked: dict[str, asyncio.Future[Answer]] = {}

    async def ask(self, command: Command) -> Answer:
        """Send a command, whose exchange has no other under way, and wait for its answer. Raises what `fail` is given."""
        assert command.exchange_id not in self._asked, "an exchange has one command at a time"
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._asked[command.exchange_id] = future
        try:
            self._send(command)
            return await future
        finally:
            del self._asked[command.exchange_id]

    def take(self, answer: Answer) -> None:
        """One whose asker has gone meanwhile is dropped."""
        future = self._asked.get(answer.exchange_id)
        if future is not None and not future.done():
            future.set_result(answer)

    def fail(self, make: Callable[[], Exception]) -> None:
        """Nothing is answered any more: each asker gets an exception of its own."""
        for future in self._asked.values():
            if not future.done():
                future.set_exception(make())
