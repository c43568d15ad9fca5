"""Which prefix units the engine holds, on its device and in the tiers below, and the numbered messages that tell a controller. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from dragoman.v1 import agent_registry_service_pb2

MAX_UNITS_A_MESSAGE = 65_536


class KvJournal:
    """The sets of units held now, fed by the engine's step frames."""

    def __init__(self) -> None:
        self.held: set[int] = set()  # on the device
        self.held_below: set[int] = set()
        self._feeds: list[KvFeed] = []

    def take(self, stored: Iterable[bytes], removed: Iterable[bytes]) -> None:
        """Units that became cached and that were dropped in one step; 8 bytes each, little-endian on the wire."""
        for unit in stored:
            self._change(int.from_bytes(unit, "little"), True)
        for unit in removed:
            self._change(int.from_bytes(unit, "little"), False)

    def take_below(self, stored: Iterable[bytes], removed: Iterable[bytes]) -> None:
        """The same for the tiers below the device."""
        for units, is_held in ((stored, True), (removed, False)):
            for name in units:
                unit = int.from_bytes(name, "little")
                (self.held_below.add if is_held else self.held_below.discard)(unit)
                for feed in self._feeds:
                    feed.pending_below[unit] = is_held

    def _change(self, unit: int, is_held: bool) -> None:
        if is_held:
            self.held.add(unit)
        else:
            self.held.discard(unit)
        for feed in self._feeds:
            feed.pending[unit] = is_held


class KvFeed:
    """The journal as one controller hears it: its own sequence within the epoch, growing by one a message."""

    def __init__(self, journal: KvJournal) -> None:
        self._journal = journal
        self._sequence = 0
        self._snapshot_due = True
        self.pending: dict[int, bool] = {}
        self.pending_below: dict[int, bool] = {}
        journal._feeds.append(self)

    def close(self) -> None:
        """Stop listening."""
        if self in self._journal._feeds:
            self._journal._feeds.remove(self)

    def want_snapshot(self) -> None:
        """Send everything next: on connect, and when the controller missed something."""
        self._snapshot_due = True

    def next_message(self, lease_id: str, epoch: int) -> agent_registry_service_pb2.PublishKvEventsRequest | None:
        """What changed since the last message, or a snapshot where one is due; None when there is nothing to say."""
        if not (self._snapshot_due or self.pending or self.pending_below):
            return None
        message = agent_registry_service_pb2.PublishKvEventsRequest(lease_id=lease_id, epoch=epoch)
        if self._snapshot_due:
            self._snapshot_due = False
            self.pending.clear()
            self.pending_below.clear()
            message.snapshot = True
            message.stored_block_hashes.extend(self._journal.held)
            message.lower_stored_block_hashes.extend(self._journal.held_below)
        else:
            for unit, held in _some_of(self.pending):
                (message.stored_block_hashes if held else message.removed_block_hashes).append(unit)
            for unit, held in _some_of(self.pending_below):
                (message.lower_stored_block_hashes if held else message.lower_removed_block_hashes).append(unit)
        self._sequence += 1
        message.sequence = self._sequence
        return message


def _some_of(pending: dict[int, bool]) -> list[tuple[int, bool]]:
    """What fits a message, taken out."""
    return [(unit, pending.pop(unit)) for unit in list(pending)[:MAX_UNITS_A_MESSAGE]]
