"""Decides what to do with a hint that a prompt with some prefix is likely soon. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrefetchAgent:
    """One live agent of the hinted model. `fetches`: it told that it can fetch KV blocks from elsewhere."""

    agent_id: str
    data_address: str
    finish_seconds: float
    fetches: bool


@dataclass(frozen=True, slots=True)
class PrefetchPlan:
    """Who should fetch, and from where; or why nobody should."""

    agent_id: str = ""
    source_address: str = ""
    refused_because: str = ""


def plan_prefetch(agents: Sequence[PrefetchAgent], num_units: int, held_units: Mapping[str, int]) -> PrefetchPlan:
    """Picks the least busy agent that lacks a part of the prefix, and the holder of most of it as source.

    num_units: full units of 64 tokens in the prefix. held_units: units held from the beginning, by agent id.
    """
    if not num_units:
        return PrefetchPlan(refused_because="the hint has no block hashes: only full units of 64 tokens can be fetched")
    if not agents:
        return PrefetchPlan(refused_because="no live agent serves the model")
    lacking = [agent for agent in agents if held_units.get(agent.agent_id, 0) < num_units]
    if not lacking:
        return PrefetchPlan(refused_because="every live agent of the model holds the whole prefix already")
    source = max(agents, key=lambda agent: held_units.get(agent.agent_id, 0))
    most = held_units.get(source.agent_id, 0)
    if not most:
        return PrefetchPlan(refused_because="no live agent holds any of the prefix, so there is nothing to fetch")
    takers = [a for a in lacking if a.fetches and held_units.get(a.agent_id, 0) < most]
    if not takers:
        return PrefetchPlan(
            refused_because="no agent that lacks the prefix can fetch KV blocks: they hold them on their device only"
        )
    taker = min(takers, key=lambda agent: agent.finish_seconds)
    return PrefetchPlan(taker.agent_id, source.data_address)
