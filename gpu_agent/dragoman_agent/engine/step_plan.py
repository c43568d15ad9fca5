"""What one step computes, and which sequence makes way first when blocks are short. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from dragoman_agent.engine.request import Sequence


@dataclass(slots=True)
class StepPlan:
    """One step: every decode sequence computes one token, every prefill sequence its count."""

    decodes: list[Sequence] = field(default_factory=list)
    prefills: list[tuple[Sequence, int]] = field(default_factory=list)
    grown: list[Sequence] = field(default_factory=list)  # decode sequences whose block table got longer
    preempted: list[Sequence] = field(default_factory=list)

    def add_prefill(self, sequence: Sequence, budget: int) -> int:
        """Add as much of a sequence's prefill as `budget` allows; how many tokens that is."""
        count = min(sequence.num_uncomputed, budget)
        self.prefills.append((sequence, count))
        return count

    @property
    def sequences(self) -> list[Sequence]:
        """All that take part."""
        return self.decodes + [sequence for sequence, _ in self.prefills]

    @property
    def num_prefill_tokens(self) -> int:
        """Prompt tokens, or tokens computed again, in this step."""
        return sum(count for _, count in self.prefills)

    @property
    def num_tokens(self) -> int:
        """Tokens in this step; 0 is no step."""
        return len(self.decodes) + self.num_prefill_tokens


def preemption_key(sequence: Sequence) -> tuple[bool, int, float, int]:
    """The greatest goes first: out of credit, then lowest class, then youngest."""
    return (
        not sequence.has_credit,
        sequence.effective_class,
        sequence.request.arrived,
        sequence.choice,
    )
