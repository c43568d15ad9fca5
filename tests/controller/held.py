"""What the prefix index believes of an agent, which only tests ask."""

from __future__ import annotations

from dragoman_controller.prefix_index import PrefixIndex


def held_by(index: PrefixIndex, agent_id: str) -> frozenset[int]:
    """Every unit an agent is believed to hold."""
    holder = index._holders.get(agent_id)
    return frozenset(holder.hashes) if holder else frozenset()
