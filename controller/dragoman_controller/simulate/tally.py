"""What was seen in a cell: a row a request, and counts. Small to send from one process to another."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from dragoman_controller.policy import Policy
from dragoman_controller.quote import Judgement, Quote
from dragoman_controller.requests import Priority
from dragoman_controller.simulate.streams import Stream


def _doubles() -> array[float]:
    return array("d")


@dataclass(slots=True)
class Tally:
    """Everything a report is made from. Times are the client's, from its first ask; -1 where there is none."""

    tenant: array[int] = field(default_factory=lambda: array("I"))
    priority: array[int] = field(default_factory=lambda: array("B"))
    end: array[int] = field(default_factory=lambda: array("B"))
    output_tokens: array[int] = field(default_factory=lambda: array("I"))
    ttft: array[float] = field(default_factory=_doubles)
    tpot: array[float] = field(default_factory=_doubles)
    finish: array[float] = field(default_factory=_doubles)
    queue_waits: array[float] = field(default_factory=_doubles)
    regrets: array[float] = field(default_factory=_doubles)
    """Seconds of the chosen agent over those of the least, less one, at sampled placements."""
    quote_errors: dict[str, array[float]] = field(default_factory=dict)
    quotes_inside: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    tickets: Counter[str] = field(default_factory=Counter)
    last_seconds: float = 0.0
    max_num_running: int = 0
    max_num_queued: int = 0

    # What a cell tells (CellObserver).

    def ticket(self, result: str) -> None:
        """See Observer."""
        self.tickets[result] += 1

    def waited(self, priority: Priority, seconds: float) -> None:
        """See Observer."""
        self.queue_waits.append(seconds)

    def quoted(self, priority: Priority, quote: Quote, policy: Policy) -> None:
        """See Observer."""

    def judged(self, judgements: Sequence[Judgement]) -> None:
        """See CellObserver."""
        for quantity, error, inside in judgements:
            errors = self.quote_errors.get(quantity)
            if errors is None:
                errors = self.quote_errors[quantity] = array("d")
            errors.append(error)
            self.quotes_inside[quantity] += inside

    def hinted(self, outcome: str) -> None:
        """See CellObserver."""
        self.counts[f"hint {outcome}"] += 1

    # What the run tells.

    def ended(self, stream: Stream, now: float) -> None:
        """A request is over."""
        self.tenant.append(stream.tenant)
        self.priority.append(stream.priority)
        self.end.append(stream.end)
        finished = stream.end == 1
        tokens = stream.output_tokens
        first = stream.first_at
        self.output_tokens.append(tokens if finished else 0)
        self.ttft.append(first - stream.arrived_at if first >= 0.0 else -1.0)
        self.tpot.append((now - first) / (tokens - 1) if finished and tokens > 1 else -1.0)
        self.finish.append(now - stream.arrived_at if finished else -1.0)
        self.last_seconds = now

    def __len__(self) -> int:
        return len(self.end)

    def merge(self, other: Tally) -> None:
        """Adds the rows and counts of another cell, which ran at the same virtual time."""
        for name in ("tenant", "priority", "end", "output_tokens", "ttft", "tpot", "finish", "queue_waits", "regrets"):
            getattr(self, name).extend(getattr(other, name))
        for quantity, errors in other.quote_errors.items():
            self.quote_errors.setdefault(quantity, array("d")).extend(errors)
        self.quotes_inside.update(other.quotes_inside)
        self.counts.update(other.counts)
        self.tickets.update(other.tickets)
        self.last_seconds = max(self.last_seconds, other.last_seconds)
        self.max_num_running += other.max_num_running
        self.max_num_queued += other.max_num_queued
