"""Which agent is told to fetch a prefix, from whom, and why none is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dragoman.step_model import StepModel
from dragoman_controller.fleet import KvTerms
from dragoman_controller.prefetch import PrefetchAgent, plan_prefetch
from dragoman_controller.steps import StepTable

STEPS = StepTable(StepModel((1,), (0,), (0.01,), 1000.0, 0.0))  # 1,000 prompt tokens a second
KV = KvTerms("float16", "k v", 16, 1000)


def agent(
    name: str, free_in: float = 1.0, kv: KvTerms | None = KV, rate: float = 0.0, base: float = 0.0
) -> PrefetchAgent:
    return PrefetchAgent(name, f"{name}:1", free_in, STEPS, kv, rate, base)


def test_the_agent_that_is_free_first_fetches_from_the_one_that_holds_most() -> None:
    agents = [agent("full", 0.1), agent("part", 3.0), agent("idle", 2.0), agent("blocked", 0.5, kv=None)]
    plan = plan_prefetch(agents, 6, {"full": 4, "part": 2})
    assert (plan.agent_id, plan.source_agent_id, plan.source_address) == ("idle", "full", "full:1")
    assert plan.num_units == 4, "what nobody holds is not asked for"
    assert plan.limit_seconds == pytest.approx(0.256), "what computing 256 tokens takes"


@pytest.mark.parametrize(
    ("agents", "num_units", "held", "reason"),
    [
        ([agent("a")], 0, {}, "no block hashes"),
        ([], 4, {}, "no live agent serves"),
        ([agent("a")], 4, {"a": 4}, "holds the whole prefix"),
        ([agent("a"), agent("b")], 4, {}, "nothing to fetch"),
        ([agent("a"), agent("b", kv=None)], 4, {"a": 4}, "on their device only"),
        ([agent("a", kv=None), agent("b")], 4, {"a": 4}, "on their device only"),
        ([agent("a"), agent("b", kv=replace(KV, kv_type="float32"))], 4, {"a": 4}, "type or layout differ"),
        ([agent("a"), agent("b", kv=replace(KV, block_tokens=32))], 4, {"a": 4}, "type or layout differ"),
        ([agent("a"), agent("b")], 4, {"a": 2, "b": 2}, "as much of the prefix as any"),
    ],
)
def test_a_hint_that_helps_nobody_is_refused(
    agents: list[PrefetchAgent], num_units: int, held: dict[str, int], reason: str
) -> None:
    plan = plan_prefetch(agents, num_units, held)
    assert not plan.agent_id and reason in plan.refused_because


@pytest.mark.parametrize(
    ("rate", "base", "fetches"),
    [
        (0.0, 0.0, True),
        (1.1e6, 0.0, True),
        (0.9e6, 0.0, False),
        (1.1e6, 0.1, False),
        (1e9, 0.25, True),
        (1e9, 0.26, False),
    ],
)
def test_only_a_transfer_that_beats_computing_is_planned(rate: float, base: float, fetches: bool) -> None:
    """256 tokens take 0.256 s to compute, and are 256,000 bytes. Where nothing was measured yet a fetch shows the rate."""
    plan = plan_prefetch([agent("a"), agent("b", rate=rate, base=base)], 4, {"a": 4})
    assert bool(plan.agent_id) is fetches
    assert fetches or "would take" in plan.refused_because


def test_only_what_is_missing_counts() -> None:
    agents = [agent("a"), agent("b", rate=0.9e6, base=0.0)]
    assert plan_prefetch(agents, 4, {"a": 4, "b": 3}).refused_because.startswith("fetching 64 tokens")


def test_a_request_of_the_queue_needs_no_hint_where_the_holder_is_free_first() -> None:
    held = {"holder": 4}
    sooner, later = [agent("holder", 1.0), agent("b", 2.0)], [agent("holder", 2.0), agent("b", 1.0)]
    assert "free first" in plan_prefetch(sooner, 4, held, for_queue=True).refused_because
    assert plan_prefetch(later, 4, held, for_queue=True).agent_id == "b"
    assert plan_prefetch(sooner, 4, held).agent_id == "b", "a client's hint spreads the prefix all the same"


def test_an_agent_brings_up_what_it_has_itself() -> None:
    agents = [agent("low", 2.0), agent("idle", 0.1), agent("full", 3.0)]
    plan = plan_prefetch(agents, 6, {"full": 4, "low": 1}, {"full": 4, "low": 6})
    assert (plan.agent_id, plan.source_agent_id, plan.source_address, plan.num_units) == ("low", "", "", 6)
    assert plan.limit_seconds == pytest.approx(0.32), "what computing the five units takes"


def test_fetching_more_is_preferred_to_bringing_up_less() -> None:
    plan = plan_prefetch([agent("low", 0.1), agent("full", 3.0)], 6, {"full": 6}, {"full": 6, "low": 2})
    assert (plan.agent_id, plan.source_agent_id, plan.num_units) == ("low", "full", 6)


def test_of_the_queue_the_agent_that_is_free_first_brings_it_up() -> None:
    agents, below = [agent("low", 1.0, kv=None), agent("other", 2.0)], {"low": 4, "other": 6}
    plan = plan_prefetch(agents, 6, {}, below, for_queue=True)
    assert (plan.agent_id, plan.source_agent_id, plan.num_units) == ("low", "", 4)
    elsewhere = plan_prefetch([agent("low", 3.0), agent("other", 2.0)], 6, {}, {"low": 4}, for_queue=True)
    assert not elsewhere.agent_id, "the request will not go there"
