"""A tenant at ten times its share, in virtual time: the real Cell, agents that run what they are given, beats at 5 Hz."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from random import Random
from typing import Any

from dragoman_controller.admission import Answer
from dragoman_controller.cell import Outcome
from dragoman_controller.fleet import Load
from dragoman_controller.granted import Granted
from dragoman_controller.shares import num_reserved

NUM_AGENTS, NUM_SLOTS, NUM_WAITING = 4, 64, 64
NUM_TENANTS = 20
PREFILL_SECONDS, SHORTEST, LONGEST = 0.3, 2.0, 6.0
USUAL_UTILIZATION = 0.7
WARM_SECONDS, END_SECONDS = 20.0, 80.0


@dataclass
class Agent:
    """Runs up to 64 requests, and queues the others in the order in which they come."""

    running: int = 0
    waiting: deque[tuple[float, Granted, str, float]] = field(default_factory=deque)
    outcomes: list[Outcome] = field(default_factory=list)


class Traffic:
    """Tenants that ask at their own rates."""

    def __init__(self, bench: Any, rates: list[float]) -> None:
        self.bench, self.rng = bench, Random(11)
        self.agents = {f"agent-{number}": Agent() for number in range(NUM_AGENTS)}
        for agent_id in self.agents:
            bench.join(agent_id, max_running=NUM_SLOTS, max_waiting=NUM_WAITING)
        self.first_token: dict[str, list[float]] = defaultdict(list)
        self.served: Counter[str] = Counter()
        self.refused = 0
        self._events: list[tuple[float, int, str, Any]] = []
        self._order = itertools.count()
        self.rates = rates
        for tenant in range(len(rates)):
            self.at(bench.now + self.rng.expovariate(rates[tenant]), "ask", tenant)
        for agent_id in self.agents:
            self.at(bench.now + self.rng.random() * 0.2, "beat", agent_id)

    def at(self, time: float, what: str, value: Any) -> None:
        heapq.heappush(self._events, (time, next(self._order), what, value))

    def run(self) -> None:
        began = self.bench.now
        while self._events[0][0] < began + END_SECONDS:
            self.bench.now, _, what, value = heapq.heappop(self._events)
            self.is_counting = self.bench.now > began + WARM_SECONDS
            getattr(self, what)(value)

    def ask(self, tenant: int) -> None:
        self.at(self.bench.now + self.rng.expovariate(self.rates[tenant]), "ask", tenant)
        asked_at, name = self.bench.now, f"tenant-{tenant}"
        request = self.bench.request(tenant=name, prompt_tokens=600, max_output_tokens=200)

        def take(answer: Answer) -> None:
            if isinstance(answer, Granted):
                self.agents[answer.ticket.agent_id].waiting.append((asked_at, answer, name, self.bench.now))
                self.start(answer.ticket.agent_id)
            elif isinstance(answer, Exception):
                self.refused += 1

        self.bench.cell.admission.submit(request, take)

    def start(self, agent_id: str) -> None:
        agent = self.agents[agent_id]
        while agent.waiting and agent.running < NUM_SLOTS:
            asked_at, granted, tenant, granted_at = agent.waiting.popleft()
            agent.running += 1
            seconds = self.rng.uniform(SHORTEST, LONGEST)
            if self.is_counting:
                self.first_token[tenant].append(self.bench.now + PREFILL_SECONDS - asked_at)
                self.served[tenant] += 1
            self.at(self.bench.now + seconds, "finish", (agent_id, granted, granted_at, self.bench.now))

    def finish(self, value: tuple[str, Granted, float, float]) -> None:
        agent_id, granted, granted_at, started = value
        agent = self.agents[agent_id]
        agent.running -= 1
        ttft = started + PREFILL_SECONDS - granted_at
        agent.outcomes.append(Outcome(granted.ticket.jti, ttft, self.bench.now - granted_at, 200, False))
        self.start(agent_id)

    def beat(self, agent_id: str) -> None:
        agent = self.agents[agent_id]
        self.at(self.bench.now + 0.2, "beat", agent_id)
        outcomes, agent.outcomes = agent.outcomes, []
        load = Load(
            waiting_requests=len(agent.waiting),
            running_requests=agent.running,
            running_context_tokens=700 * agent.running,
            step_seconds=0.02,
        )
        self.bench.beat(agent_id, load, outcomes=outcomes)
        self.bench.cell.tick()


def p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * len(values))]


def test_a_tenant_at_ten_times_its_share_hardly_moves_the_first_tokens_of_others(bench_of: Any) -> None:
    capacity = NUM_AGENTS * NUM_SLOTS / ((SHORTEST + LONGEST) / 2)
    share = USUAL_UTILIZATION * capacity / NUM_TENANTS
    seen = {}
    for name, factor in (("alone", 1.0), ("beside", 10.0)):
        traffic = Traffic(bench_of(), [factor * share] + [share] * (NUM_TENANTS - 1))
        traffic.run()
        others = [seconds for tenant, times in traffic.first_token.items() if tenant != "tenant-0" for seconds in times]
        assert len(others) > 1000
        seen[name] = p99(others)
        if factor > 1:
            # It is over its share, so it waits; and it gets what the others leave but for the places kept for them.
            assert p99(traffic.first_token["tenant-0"]) > 4 * PREFILL_SECONDS
            spare = capacity * (END_SECONDS - WARM_SECONDS) - sum(
                count for tenant, count in traffic.served.items() if tenant != "tenant-0"
            )
            kept = (
                num_reserved(NUM_AGENTS * NUM_SLOTS)
                / (NUM_AGENTS * NUM_SLOTS)
                * capacity
                * (END_SECONDS - WARM_SECONDS)
            )
            assert spare - 1.5 * kept < traffic.served["tenant-0"] <= spare
    assert seen["beside"] < 1.1 * seen["alone"], seen
