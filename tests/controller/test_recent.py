"""Agents that come and go under new names do not fill the memory."""

from __future__ import annotations

from dragoman_controller.quote import Quotes
from dragoman_controller.recent import MAX_NUM_AGENTS, RecentAgents
from dragoman_controller.views import ServiceTimes


def test_the_agent_used_longest_ago_is_dropped() -> None:
    recent: RecentAgents[int] = RecentAgents(2)
    recent.put("a", 1)
    recent.put("b", 2)
    assert recent.get("a") == 1
    recent.put("c", 3)
    assert (recent.get("a"), recent.get("b"), recent.get("c")) == (1, None, 3)


def test_quotes_and_service_times_stay_bounded() -> None:
    quotes, times = Quotes(max_num_agents=10), ServiceTimes()
    learnt = quotes.of("kept")
    for number in range(MAX_NUM_AGENTS + 50):
        quotes.of(f"agent-{number}")
        times.observe(f"agent-{number}", 1.0)
        assert quotes.of("kept") is learnt
    assert len(quotes._agents) == 10
    assert len(times._seconds) == MAX_NUM_AGENTS
