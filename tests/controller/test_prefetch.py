"""Which agent is told to fetch a prefix, and why none is."""

from __future__ import annotations

import pytest

from dragoman_controller.prefetch import PrefetchAgent, plan_prefetch


def agent(name: str, finish: float = 1.0, fetches: bool = True) -> PrefetchAgent:
    return PrefetchAgent(name, f"{name}:1", finish, fetches)


def test_the_least_busy_agent_that_lacks_it_fetches_from_the_one_that_holds_most() -> None:
    agents = [agent("full", 0.1), agent("part", 3.0), agent("idle", 2.0), agent("blocked", 0.5, fetches=False)]
    plan = plan_prefetch(agents, 4, {"full": 4, "part": 2})
    assert (plan.agent_id, plan.source_address, plan.refused_because) == ("idle", "full:1", "")


@pytest.mark.parametrize(
    ("agents", "num_units", "held", "reason"),
    [
        ([agent("a")], 0, {}, "no block hashes"),
        ([], 4, {}, "no live agent serves"),
        ([agent("a")], 4, {"a": 4}, "holds the whole prefix"),
        ([agent("a"), agent("b")], 4, {}, "nothing to fetch"),
        ([agent("a"), agent("b", fetches=False)], 4, {"a": 4}, "on their device only"),
        ([agent("a"), agent("b")], 4, {"a": 2, "b": 2}, "on their device only"),
    ],
)
def test_a_hint_that_helps_nobody_is_refused(
    agents: list[PrefetchAgent], num_units: int, held: dict[str, int], reason: str
) -> None:
    plan = plan_prefetch(agents, num_units, held)
    assert not plan.agent_id and reason in plan.refused_because
