"""Orders to agents, kept until the agent says what became of them: at least once, in order."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

MAX_NUM_PENDING = 1024


@dataclass(frozen=True, slots=True)
class Drain:
    """Finish and accept nothing more; what still runs after the grace period is handed over."""

    grace_seconds: float


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Bring prefix units closer to the device; `source_address` empty: from the agent's own lower tiers."""

    model: str
    block_hashes: tuple[int, ...]
    source_address: str = ""
    source_agent_id: str = ""
    source_ticket: bytes = b""
    limit_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class RotateKeys:
    """Take new ticket keys: (key id, key), the newest first."""

    keys: tuple[tuple[int, bytes], ...]


@dataclass(frozen=True, slots=True)
class Undrain:
    """Take requests again."""


Command = Drain | Prefetch | RotateKeys | Undrain


class Outbox:
    """Commands of one member without a result yet."""

    def __init__(self) -> None:
        self._pending: OrderedDict[str, Command] = OrderedDict()

    def put(self, command_id: str, command: Command) -> None:
        """Adds a command. The oldest falls out beyond 1024, which only hints could ever reach."""
        self._pending[command_id] = command
        if len(self._pending) > MAX_NUM_PENDING:
            self._pending.popitem(last=False)

    def acknowledge(self, command_id: str) -> Command | None:
        """Ends a command; None when it had ended before."""
        return self._pending.pop(command_id, None)

    def unsent(self, sent: set[str]) -> list[tuple[str, Command]]:
        """Commands that have not gone out on this stream; adds them to `sent`."""
        if not self._pending:
            return []
        fresh = [(command_id, command) for command_id, command in self._pending.items() if command_id not in sent]
        sent.update(command_id for command_id, _ in fresh)
        return fresh
