"""Which agent holds which prefix units, from the agents' numbered events. Pure.

A unit is 64 tokens, named by the wire form of its chained hash, so equal hashes mean equal prefixes up to there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

# A snapshot that has not come after so many further messages is asked for again: it may have been lost itself.
ASK_AGAIN_MESSAGES = 8


@dataclass(slots=True)
class _Holder:
    """One life of one agent; `bit` is its place in the masks."""

    epoch: int
    bit: int
    sequence: int = 0
    in_sync: bool = True
    num_since_asked: int = 0
    """Messages since a snapshot was asked for, that one included; 0 where none is awaited."""
    hashes: set[int] = field(default_factory=set)  # on its device
    below: set[int] = field(default_factory=set)  # in its lower tiers


class Applied(NamedTuple):
    """What to tell the agent: the last sequence number taken, and whether a snapshot is wanted next."""

    acknowledged_sequence: int
    snapshot_wanted: bool


class PrefixIndex:
    """Owns the holders of every unit, as one bit mask a unit; another where the unit lies below an agent's device."""

    def __init__(self) -> None:
        self._holders: dict[str, _Holder] = {}
        self._agent_of_bit: dict[int, str] = {}
        self._masks: dict[int, int] = {}
        self._masks_below: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._masks)

    def start_stream(self, agent_id: str, epoch: int) -> None:
        """A stream of events begins. What was known of an earlier life is dropped."""
        holder = self._holders.get(agent_id)
        if holder is not None and holder.epoch == epoch:
            holder.num_since_asked = 0
            return
        self.remove_agent(agent_id)
        bit = next(bit for bit in range(len(self._agent_of_bit) + 1) if bit not in self._agent_of_bit)
        self._holders[agent_id] = _Holder(epoch, bit)
        self._agent_of_bit[bit] = agent_id

    def apply(
        self,
        agent_id: str,
        epoch: int,
        sequence: int,
        stored: Iterable[int],
        removed: Iterable[int],
        snapshot: bool = False,
        *,
        stored_below: Iterable[int] = (),
        removed_below: Iterable[int] = (),
    ) -> Applied:
        """Takes one message of the agent's present life; removed units are taken away before stored ones are added.

        A message that was taken already changes nothing. After a gap nothing but a snapshot is taken, and what was
        known stays until then: it is only predicted from, never relied upon.
        """
        self._begin_life(agent_id, epoch)
        holder = self._holders[agent_id]
        if sequence <= holder.sequence:
            return Applied(holder.sequence, False)
        if snapshot:
            self._discard(holder, holder.hashes - (fresh := set(stored)))
            self._add(holder, fresh)
            below = set(stored_below)
            self._change_below(holder, below - holder.below, holder.below - below)
            holder.sequence, holder.in_sync, holder.num_since_asked = sequence, True, 0
            return Applied(sequence, False)
        if not holder.in_sync or sequence != holder.sequence + 1:
            holder.in_sync = False
            wanted = holder.num_since_asked % ASK_AGAIN_MESSAGES == 0
            holder.num_since_asked += 1
            return Applied(holder.sequence, wanted)
        self._discard(holder, removed)
        self._add(holder, stored)
        if stored_below or removed_below:
            self._change_below(holder, stored_below, removed_below)
        holder.sequence = sequence
        return Applied(sequence, False)

    def remove_agent(self, agent_id: str) -> None:
        """Forgets an agent."""
        holder = self._holders.pop(agent_id, None)
        if holder is not None:
            self._discard(holder, set(holder.hashes))
            self._change_below(holder, (), set(holder.below))
            del self._agent_of_bit[holder.bit]

    def lookup(self, block_hashes: Sequence[int]) -> dict[str, int]:
        """Units held from the beginning without a hole, for each agent that holds any."""
        found: dict[str, int] = {}
        alive = -1
        masks = self._masks
        for depth, block_hash in enumerate(block_hashes):
            mask = alive & masks.get(block_hash, 0)
            if depth and mask != alive:
                self._note(found, alive & ~mask, depth)
            alive = mask
            if not alive:
                return found
        if block_hashes:
            self._note(found, alive, len(block_hashes))
        return found

    @property
    def has_lower_tiers(self) -> bool:
        """Whether any agent holds anything below its device."""
        return bool(self._masks_below)

    def lookup_all_tiers(self, block_hashes: Sequence[int]) -> dict[str, int]:
        """The same, where a unit may lie on the device or in any tier below it."""
        found: dict[str, int] = {}
        alive = -1
        for depth, block_hash in enumerate(block_hashes):
            mask = alive & (self._masks.get(block_hash, 0) | self._masks_below.get(block_hash, 0))
            if depth and mask != alive:
                self._note(found, alive & ~mask, depth)
            alive = mask
            if not alive:
                return found
        if block_hashes:
            self._note(found, alive, len(block_hashes))
        return found

    def _begin_life(self, agent_id: str, epoch: int) -> None:
        holder = self._holders.get(agent_id)
        if holder is None or holder.epoch != epoch:
            self.start_stream(agent_id, epoch)

    def _note(self, found: dict[str, int], mask: int, depth: int) -> None:
        while mask:
            lowest = mask & -mask
            found[self._agent_of_bit[lowest.bit_length() - 1]] = depth
            mask ^= lowest

    def _add(self, holder: _Holder, hashes: Iterable[int]) -> None:
        mask, masks = 1 << holder.bit, self._masks
        for block_hash in hashes:
            if block_hash not in holder.hashes:
                holder.hashes.add(block_hash)
                masks[block_hash] = masks.get(block_hash, 0) | mask

    def _discard(self, holder: _Holder, hashes: Iterable[int]) -> None:
        mask, masks = 1 << holder.bit, self._masks
        for block_hash in hashes:
            if block_hash in holder.hashes:
                holder.hashes.discard(block_hash)
                _clear(masks, block_hash, mask)

    def _change_below(self, holder: _Holder, stored: Iterable[int], removed: Iterable[int]) -> None:
        mask, masks = 1 << holder.bit, self._masks_below
        for block_hash in removed:
            if block_hash in holder.below:
                holder.below.discard(block_hash)
                _clear(masks, block_hash, mask)
        for block_hash in stored:
            holder.below.add(block_hash)
            masks[block_hash] = masks.get(block_hash, 0) | mask


def _clear(masks: dict[int, int], block_hash: int, mask: int) -> None:
    """Take an agent's bit off a hash that has it; a hash that nobody holds is forgotten."""
    rest = masks[block_hash] & ~mask
    if rest:
        masks[block_hash] = rest
    else:
        del masks[block_hash]
