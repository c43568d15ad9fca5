"""What each running sequence does in the next step. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from dragoman_agent.engine.request import Sequence

CALM_STEPS = 4  # in which all decode, before account is kept: it would not pay where requests come and go


class Next(Enum):
    """What a sequence does next."""

    DECODE = auto()
    GROW = auto()  # and decode: its block table is full
    PREFILL = auto()
    CREDIT = auto()  # waits for it
    NOTHING = auto()  # its last token is under way


def next_of(sequence: Sequence, page_size: int) -> Next:
    """What `sequence` does next; one that decodes says by its `quiet_tokens` how long nothing else can come."""
    num_tokens, request = sequence.num_tokens, sequence.request
    num_uncomputed = num_tokens - sequence.num_computed
    if sequence.future_step and num_tokens >= sequence.max_num_tokens:
        return Next.NOTHING
    if num_tokens - sequence.num_prompt >= request.credit and not request.is_embedding:
        return Next.CREDIT
    if num_uncomputed != 1 or request.is_embedding:
        return Next.PREFILL if num_uncomputed > 0 else Next.NOTHING
    room = len(sequence.block_table) * page_size
    if room < num_tokens:
        return Next.GROW
    # From here on each step computes one token and samples the next, until it loses its blocks.
    sequence.quiet_tokens = min(sequence.max_num_tokens, sequence.num_prompt + request.credit, room + 1)
    return Next.DECODE


@dataclass(slots=True)
class Ready:
    """Running sequences by what they do next. Nobody changes the lists."""

    decodes: list[Sequence]
    growing: list[Sequence] = field(default_factory=list)  # of those in decode
    prefilling: list[Sequence] = field(default_factory=list)
    without_credit: list[Sequence] = field(default_factory=list)


class RunningSequences:
    """Says what those that run do next. While all of them decode in each step, so that each has a token more with every one, it
    keeps account of when which has to be asked again, and asks no others.
    """

    def __init__(self, page_size: int) -> None:
        self.context_tokens = 0  # of all that run, at the last call of `ready`
        self._page_size = page_size
        self._decodes: list[Sequence] | None = None  # all that run, while account is kept
        self._due: dict[int, list[Sequence]] = {}  # by `_num_asked`
        self._num_asked = 0  # calls of `ready`: no sequence gets more than a token from one to the next
        self._num_calm = 0

    def changed(self) -> None:
        """Somebody came or went, or was left out of a step."""
        self._decodes = None
        self._due = {}
        self._num_calm = 0

    def ready(self, running: list[Sequence]) -> Ready:
        """What `running` do in the next step."""
        self._num_asked += 1
        if self._decodes is not None:
            growing = self._growing()
            if growing is not None:
                self.context_tokens += len(self._decodes)
                return Ready(self._decodes, growing)
            self.changed()
        ready = self._look_at_all(running)
        if len(ready.decodes) == len(running):
            self._num_calm += 1
            if self._num_calm >= CALM_STEPS:
                self._decodes = ready.decodes
                for sequence in ready.decodes:
                    self._ask_again(sequence)
        return ready

    def _growing(self) -> list[Sequence] | None:
        """Those whose block table is full; None where somebody does not decode."""
        growing: list[Sequence] = []
        for sequence in self._due.pop(self._num_asked, ()):
            what = next_of(sequence, self._page_size)
            if what is Next.GROW:
                growing.append(sequence)
            elif what is not Next.DECODE:
                return None
            self._ask_again(sequence)
        return growing

    def _ask_again(self, sequence: Sequence) -> None:
        """When it has its `quiet_tokens`; where it has them already, it was found to grow, and is asked before the next step."""
        num_quiet = sequence.quiet_tokens - sequence.num_computed - 1
        self._due.setdefault(self._num_asked + max(num_quiet, 1), []).append(sequence)

    def _look_at_all(self, running: list[Sequence]) -> Ready:
        ready = Ready([])
        decodes, context = ready.decodes, 0
        for sequence in running:
            num_tokens = sequence.num_computed + 1
            if num_tokens < sequence.quiet_tokens:  # most of them, between two steps: nothing else is looked at
                decodes.append(sequence)
                context += num_tokens
                continue
            context += sequence.num_tokens
            what = next_of(sequence, self._page_size)
            if what is Next.DECODE or what is Next.GROW:
                decodes.append(sequence)
                if what is Next.GROW:
                    ready.growing.append(sequence)
            elif what is Next.PREFILL:
                ready.prefilling.append(sequence)
            elif what is Next.CREDIT:
                ready.without_credit.append(sequence)
        self.context_tokens = context
        return ready
