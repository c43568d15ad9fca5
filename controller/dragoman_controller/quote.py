"""What a request will cost in seconds, with an interval learnt from how earlier predictions turned out."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from typing import NamedTuple

from dragoman_controller.recent import MAX_NUM_AGENTS, RecentAgents

# Observed over predicted before anything was observed: eleven values whose median is 1, p10 0.75 and p90 1.5.
# Chosen wide, so that the first quotes promise little; each observation moves the interval, and these fade out.
PRIOR_RATIOS = (0.6, 0.75, 0.85, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.5, 2.0)
MAX_NUM_RATIOS = 256


class Estimate(NamedTuple):
    """One prediction in seconds; one in ten is below `p10`, one in ten above `p90`."""

    expected: float
    p10: float
    p90: float


class Quote(NamedTuple):
    """What is promised of a request, from its acceptance at the agent."""

    time_to_first_token: Estimate
    time_per_output_token: Estimate
    finish: Estimate


class ErrorRatios:
    """The latest ratios of observed to predicted seconds of one quantity."""

    __slots__ = ("_latest", "_sorted", "p10", "p50", "p90")

    def __init__(self) -> None:
        self._latest = deque(PRIOR_RATIOS)
        self._sorted = list(PRIOR_RATIOS)
        self._measure()

    def add(self, ratio: float) -> None:
        """Takes one observation and forgets the oldest beyond 256."""
        self._latest.append(ratio)
        insort(self._sorted, ratio)
        if len(self._latest) > MAX_NUM_RATIOS:
            del self._sorted[bisect_left(self._sorted, self._latest.popleft())]
        self._measure()

    def estimate(self, predicted_seconds: float) -> Estimate:
        """The calibrated prediction."""
        return Estimate(predicted_seconds * self.p50, predicted_seconds * self.p10, predicted_seconds * self.p90)

    def _measure(self) -> None:
        last = len(self._sorted) - 1
        self.p10, self.p50, self.p90 = (self._sorted[round(share * last)] for share in (0.1, 0.5, 0.9))


class Judgement(NamedTuple):
    """How one quoted quantity turned out: relative error of the expected value, and whether it lay in p10 to p90."""

    quantity: str
    error: float
    inside: bool


class AgentQuotes:
    """Quotes of one agent and what was learnt of it."""

    __slots__ = ("_finish", "_tpot", "_ttft")

    def __init__(self) -> None:
        self._ttft, self._tpot, self._finish = ErrorRatios(), ErrorRatios(), ErrorRatios()

    def quote(self, ttft_seconds: float, tpot_seconds: float, finish_seconds: float) -> Quote:
        """The quote from uncalibrated predictions."""
        return Quote(
            self._ttft.estimate(ttft_seconds), self._tpot.estimate(tpot_seconds), self._finish.estimate(finish_seconds)
        )

    def learn(
        self,
        predicted: tuple[float, float, float],
        observed_ttft: float,
        observed_total: float,
        output_tokens: int,
    ) -> list[Judgement]:
        """Takes an outcome; `predicted` are TTFT, TPOT and finish for the tokens that were generated, in seconds."""
        observed_tpot = (observed_total - observed_ttft) / (output_tokens - 1) if output_tokens > 1 else 0.0
        judgements = []
        for quantity, ratios, expected, observed in (
            ("time_to_first_token", self._ttft, predicted[0], observed_ttft),
            ("time_per_output_token", self._tpot, predicted[1], observed_tpot),
            ("finish", self._finish, predicted[2], observed_total),
        ):
            if expected <= 0 or observed <= 0:
                continue
            promised = ratios.estimate(expected)
            judgements.append(
                Judgement(
                    quantity,
                    abs(observed - promised.expected) / promised.expected,
                    promised.p10 <= observed <= promised.p90,
                )
            )
            ratios.add(observed / expected)
        return judgements


class Quotes:
    """Owns what was learnt of each agent. An agent keeps it over restarts: its device is the same.

    Names may come and go for as long as the controller runs: of more than `max_num_agents`, the one not asked about
    for longest is forgotten and starts with the prior again.
    """

    def __init__(self, max_num_agents: int = MAX_NUM_AGENTS) -> None:
        self._agents: RecentAgents[AgentQuotes] = RecentAgents(max_num_agents)

    def of(self, agent_id: str) -> AgentQuotes:
        """The quotes of an agent."""
        quotes = self._agents.get(agent_id)
        if quotes is None:
            quotes = AgentQuotes()
            self._agents.put(agent_id, quotes)
        return quotes
