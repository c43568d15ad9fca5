"""The controller's metrics: one registry a process, written on the event loop."""

from __future__ import annotations

import platform
from bisect import bisect_left
from collections import Counter as Count
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, disable_created_metrics
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

import dragoman
from dragoman_controller.cell import Cell
from dragoman_controller.fleet import AgentState
from dragoman_controller.policy import Policy
from dragoman_controller.quote import Judgement, Quote
from dragoman_controller.requests import Priority

_WAIT_BUCKETS = (0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_ERROR_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0)
HINT_OUTCOMES = ("accepted", "not_accepted", "used", "late", "clipped", "refused", "unused")


class _Decisions(Collector):
    """What is counted at each decision, as plain numbers: a locked counter of the library takes many times as long."""

    def __init__(self) -> None:
        self.tickets: Count[str] = Count(granted=0)
        # By the number of the class: to look a member of an enum up in a dict takes longer than the rest of this.
        self._waits = [[0] * (len(_WAIT_BUCKETS) + 1) for _ in range(max(Priority) + 1)]
        self._waited_seconds = [0.0] * len(self._waits)

    def waited(self, priority: Priority, seconds: float) -> None:
        """A request waited for so long; a bucket holds what is at most its bound."""
        self._waits[priority][bisect_left(_WAIT_BUCKETS, seconds)] += 1
        self._waited_seconds[priority] += seconds

    def collect(self) -> Iterator[Metric]:
        """See Collector; called on the scraper's thread."""
        tickets = CounterMetricFamily("dragoman_tickets", "Answers to requests for a ticket.", labels=["result"])
        for result, count in list(self.tickets.items()):
            tickets.add_metric([result], count)
        yield tickets
        waits = HistogramMetricFamily(
            "dragoman_queue_seconds", "Time in the queue of requests that got a ticket.", labels=["class"]
        )
        bounds = (*map(floatToGoString, _WAIT_BUCKETS), "+Inf")
        for priority in Priority:
            buckets = list(zip(bounds, map(float, accumulate(list(self._waits[priority]))), strict=True))
            waits.add_metric([priority.label], buckets, self._waited_seconds[priority])
        yield waits


class ControllerMetrics:
    """Counts for the cell; implements CellObserver."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        registry = self.registry = CollectorRegistry()
        self._decisions = _Decisions()
        registry.register(self._decisions)
        self._waiting = Gauge("dragoman_requests_waiting", "Requests in the queue.", ["class"], registry=registry)
        self._error = Histogram(
            "dragoman_quote_error_ratio",
            "Difference of observed and quoted seconds, relative to the quoted.",
            ["quantity"],
            buckets=_ERROR_BUCKETS,
            registry=registry,
        )
        self._judged = Counter(
            "dragoman_quotes_judged",
            "Quotes that met their outcome, by whether it lay between p10 and p90.",
            ["quantity", "inside"],
            registry=registry,
        )
        self._past_target = Counter(
            "dragoman_targets_missed",
            "Admitted requests predicted past the target of their class.",
            ["class", "quantity"],
            registry=registry,
        )
        self._hints = Counter("dragoman_hints", "Prefetch hints, by outcome.", ["outcome"], registry=registry)
        self._agents = Gauge("dragoman_agents", "Members by state.", ["state"], registry=registry)
        self._granted = Gauge("dragoman_granted_requests", "Requests granted and not yet ended.", registry=registry)
        self._units = Gauge("dragoman_prefix_units", "Prefix units in the index.", registry=registry)
        build = Gauge("dragoman_build_info", "Version of this process.", ["version", "python"], registry=registry)
        build.labels(dragoman.__version__, platform.python_version()).set(1)
        for outcome in HINT_OUTCOMES:
            self._hints.labels(outcome)

    def ticket(self, result: str) -> None:
        """One answer."""
        self._decisions.tickets[result] += 1

    def waited(self, priority: Priority, seconds: float) -> None:
        """A request left the queue with a ticket."""
        self._decisions.waited(priority, seconds)

    def quoted(self, priority: Priority, quote: Quote, policy: Policy) -> None:
        """A quote was given; counted where it is past the target of the class."""
        target = policy.targets.get(priority.label) if policy.targets else None
        if target is None:
            return
        if 0 < target.time_to_first_token_seconds < quote.time_to_first_token.expected:
            self._past_target.labels(priority.label, "time_to_first_token").inc()
        if 0 < target.time_per_output_token_seconds < quote.time_per_output_token.expected:
            self._past_target.labels(priority.label, "time_per_output_token").inc()

    def judged(self, judgements: Sequence[Judgement]) -> None:
        """A quote met its outcome."""
        for judgement in judgements:
            self._error.labels(judgement.quantity).observe(judgement.error)
            self._judged.labels(judgement.quantity, "yes" if judgement.inside else "no").inc()

    def hinted(self, outcome: str) -> None:
        """A prefetch hint was taken, turned down, or ended."""
        self._hints.labels(outcome).inc()

    def sample(self, cell: Cell) -> None:
        """Reads the gauges off the cell. Called on the event loop: the scraper's thread must not see it change."""
        states = Count(member.state for member in cell.fleet)
        for state in AgentState:
            self._agents.labels(state.label).set(states[state])
        for priority in Priority:
            self._waiting.labels(priority.label).set(cell.admission.num_waiting(priority))
        self._granted.set(len(cell.ledger))
        self._units.set(len(cell.index))
