"""The controller's metrics: one registry a process, written on the event loop."""

from __future__ import annotations

import platform
from collections import Counter as Count
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

import dragoman
from dragoman_controller.cell import Cell
from dragoman_controller.fleet import AgentState
from dragoman_controller.policy import Policy
from dragoman_controller.quote import Judgement, Quote
from dragoman_controller.requests import Priority

_WAIT_BUCKETS = (0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_ERROR_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0)
HINT_OUTCOMES = ("accepted", "not_accepted", "used", "late", "clipped", "refused", "unused")


class ControllerMetrics:
    """Counts for the cell; implements CellObserver."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        registry = self.registry = CollectorRegistry()
        self._tickets = Counter("dragoman_tickets", "Answers to requests for a ticket.", ["result"], registry=registry)
        self._waiting = Gauge("dragoman_requests_waiting", "Requests in the queue.", ["class"], registry=registry)
        self._queue = Histogram(
            "dragoman_queue_seconds",
            "Time in the queue of requests that got a ticket.",
            ["class"],
            buckets=_WAIT_BUCKETS,
            registry=registry,
        )
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
        self._ticket_counters = {"granted": self._tickets.labels("granted")}
        """The labelled children are kept: a look-up by label costs as much as a small part of a placement."""
        self._queue_of = {priority: self._queue.labels(priority.label) for priority in Priority}
        for outcome in HINT_OUTCOMES:
            self._hints.labels(outcome)

    def ticket(self, result: str) -> None:
        """One answer."""
        counter = self._ticket_counters.get(result)
        if counter is None:
            counter = self._ticket_counters[result] = self._tickets.labels(result)
        counter.inc()

    def waited(self, priority: Priority, seconds: float) -> None:
        """A request left the queue with a ticket."""
        self._queue_of[priority].observe(seconds)

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
