"""Decides whether a prefix should be brought to another agent, to which, and from where. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dragoman.prefix_hash import UNIT_TOKENS
from dragoman_controller.fleet import KvTerms
from dragoman_controller.steps import StepTable


@dataclass(frozen=True, slots=True)
class PrefetchAgent:
    """One live agent of the hinted model. `kv` None: it exchanges no blocks. `bytes_per_second` 0: not measured yet."""

    agent_id: str
    data_address: str
    free_in_seconds: float
    steps: StepTable
    kv: KvTerms | None
    bytes_per_second: float = 0.0
    base_seconds: float = 0.0

    def fetch_seconds(self, num_tokens: int) -> float | None:
        """Predicted time to take in the K and V of so many tokens; None while no fetch was measured."""
        if self.kv is None or self.bytes_per_second <= 0:
            return None
        return self.base_seconds + num_tokens * self.kv.bytes_per_token / self.bytes_per_second


@dataclass(frozen=True, slots=True)
class PrefetchPlan:
    """Who should bring how many units, from whom, and within which time; or why nobody should. No source: its own lower tiers."""

    agent_id: str = ""
    source_agent_id: str = ""
    source_address: str = ""
    num_units: int = 0
    limit_seconds: float = 0.0
    refused_because: str = ""


def plan_prefetch(
    agents: Sequence[PrefetchAgent],
    num_units: int,
    held_units: Mapping[str, int],
    units_below: Mapping[str, int] | None = None,
    *,
    for_queue: bool = False,
) -> PrefetchPlan:
    """Picks the agent that is free first of those that lack a part of the prefix, and the holder of most of it as source.

    num_units: full units of 64 tokens in the prefix. held_units: units held from the beginning on the device, by agent id.
    units_below: the same with the tiers below the device; an agent that has as much there as any other has anywhere brings it up
    itself, which costs no other agent anything.
    for_queue: a request waits for it, which goes to the agent that is free first; where that one holds it, nothing is to do.
    """
    if not num_units:
        return _refused("the hint has no block hashes: only full units of 64 tokens can be fetched")
    if not agents:
        return _refused("no live agent serves the model")
    if all(held_units.get(agent.agent_id, 0) >= num_units for agent in agents):
        return _refused("every live agent of the model holds the whole prefix already")
    own = _from_own_tiers(agents, held_units, units_below or {}, for_queue=for_queue)
    if own is not None:
        return own
    source = max(agents, key=lambda agent: (held_units.get(agent.agent_id, 0), agent.kv is not None))
    most = held_units.get(source.agent_id, 0)
    if not most:
        return _refused("no live agent holds any of the prefix, so there is nothing to fetch")
    lacking = [one for one in agents if held_units.get(one.agent_id, 0) < most]
    if not lacking:
        return _refused("every live agent of the model holds as much of the prefix as any")
    if source.kv is None or all(one.kv is None for one in lacking):
        return _refused("the agents that would have to exchange KV blocks hold them on their device only")
    takers = [one for one in lacking if one.kv == source.kv]
    if not takers:
        return _refused(
            "no agent that lacks the prefix can take blocks of the one that holds it: type or layout differ"
        )
    taker = min(takers, key=lambda agent: agent.free_in_seconds)
    if for_queue and any(
        one.free_in_seconds <= taker.free_in_seconds and held_units.get(one.agent_id, 0) >= most for one in agents
    ):
        return _refused("the agent that is free first holds the prefix")
    num_tokens = (most - held_units.get(taker.agent_id, 0)) * UNIT_TOKENS
    compute, fetch = taker.steps.prefill_seconds(num_tokens), taker.fetch_seconds(num_tokens)
    if fetch is not None and fetch >= compute:
        return _refused(
            f"fetching {num_tokens} tokens to {taker.agent_id} would take {fetch:.3g} s, computing them {compute:.3g} s"
        )
    return PrefetchPlan(taker.agent_id, source.agent_id, source.data_address, most, compute)


def _from_own_tiers(
    agents: Sequence[PrefetchAgent], held: Mapping[str, int], below: Mapping[str, int], *, for_queue: bool
) -> PrefetchPlan | None:
    """The agent that brings the prefix up from its own tiers; None where none can, or one does better by fetching."""
    most = max(held.get(agent.agent_id, 0) for agent in agents)
    able = [one for one in agents if below.get(one.agent_id, 0) > held.get(one.agent_id, 0)]
    able = [one for one in able if below[one.agent_id] >= most]
    if not able:
        return None
    if for_queue:
        first = min(agents, key=lambda agent: agent.free_in_seconds)
        taker = next((one for one in able if one.free_in_seconds <= first.free_in_seconds), None)
    else:
        taker = max(able, key=lambda agent: (below[agent.agent_id], -agent.free_in_seconds))
    if taker is None:
        return None
    num_tokens = (below[taker.agent_id] - held.get(taker.agent_id, 0)) * UNIT_TOKENS
    seconds = taker.steps.prefill_seconds(num_tokens)
    return PrefetchPlan(taker.agent_id, num_units=below[taker.agent_id], limit_seconds=seconds)


def _refused(why: str) -> PrefetchPlan:
    return PrefetchPlan(refused_because=why)
