"""What happened beside what was predicted: completes decisions from the loaded engine and from its steps."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from dragoman_agent.pal.decisions import Decision, DecisionLog
from dragoman_agent.pal.plan import Plan

LOAD, KV_BLOCKS, DECODE, PREFILL, PREFETCH = "load", "kv-blocks", "step-model", "prefill-rate", "prefetch"
MIXED = "mixed-graphs"
WINDOW_STEPS = 128
MIN_NUM_STEPS = 4
PUBLISH_SECONDS = 1.0


class StepLoad(Protocol):
    """What a step computed, see `engine.messages.Load`."""

    running_context_tokens: int
    total_blocks: int
    prefill_tokens: int
    decode_tokens: int


class TierSums(Protocol):
    """One KV tier, see `engine.messages.TierCounts`."""

    name: str
    capacity_blocks: int
    read_bytes: int
    read_seconds: float
    problem: str


class Observations:
    """Medians over the last steps, told to the decision log once a second at most. Used from one event loop.

    Decode: steps of one sequence and no prompt, each beside the prediction at its own context; the median ratio times
    the decision's prediction. Prefill: steps of prompts alone that are long enough for the rate to show.
    """

    def __init__(
        self,
        plan: Plan,
        log: DecisionLog,
        on_measured: Callable[[Decision], None] = lambda decision: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_measured` hears of each decision that got a measured value."""
        self._plan = plan
        self._log = log
        self._on_measured = on_measured
        self._clock = clock
        self._decode_ratios: deque[float] = deque(maxlen=WINDOW_STEPS)
        self._prefill_rates: deque[float] = deque(maxlen=WINDOW_STEPS)
        self._changed: set[str] = set()
        self._published = 0.0
        self._has_blocks = False
        self._tier_blocks: dict[str, int] = {}
        self._tier_problems: dict[str, str] = {}
        self._num_blocks = plan.num_blocks  # of the arena as it was taken
        self._decode_subject = DECODE

    def use(self, plan: Plan, subject: str) -> None:
        """From now on steps are held against this plan's step model, whose decision is on `subject`."""
        self._plan, self._decode_subject = plan, subject
        self._decode_ratios.clear()
        self._prefill_rates.clear()
        self._changed.clear()

    def loaded(self, info: Mapping[str, Any]) -> None:
        """The engine's Ready information: the rate at which weights came in, the step with a prompt that it timed."""
        if rate := info.get("weights_gb_per_second"):
            self._measured(LOAD, float(rate) * 1e9)
        if seconds := info.get("mixed_step_seconds"):
            self._measured(MIXED, float(seconds))

    def take_tiers(self, tiers: Sequence[TierSums]) -> None:
        """What the KV tiers hold and have moved: their sizes as they were taken, and what a token's KV took to come back."""
        for tier in tiers:
            self._tell_problem(tier)
            self._measure_once(f"{tier.name}-tier", tier.capacity_blocks)
            if tier.name == "host" and tier.read_bytes > 0 and tier.read_seconds > 0:
                predicted, link = self._predicted(PREFETCH), self._plan.kv_link_bytes_per_second
                if predicted is not None and link:
                    self._measured(PREFETCH, predicted * link * tier.read_seconds / tier.read_bytes)

    def _tell_problem(self, tier: TierSums) -> None:
        """A tier that is off or smaller than planned is a decision of its own: the plan alone would say that it is there."""
        subject = f"{tier.name}-tier"
        if not tier.problem or self._tier_problems.get(subject) == tier.problem:
            return
        self._tier_problems[subject] = tier.problem
        planned = next((decision for decision in reversed(self._log.all()) if decision.subject == subject), None)
        if planned is not None:
            chosen = planned.chosen if tier.capacity_blocks else "off"
            self._log.record(replace(planned, chosen=chosen, reason=tier.problem))

    def _measure_once(self, subject: str, num_blocks: int) -> None:
        """The size of a tier in the blocks that it has, whenever that changed."""
        block_bytes = self._predicted(KV_BLOCKS)
        if block_bytes is None or self._tier_blocks.get(subject) == num_blocks:
            return
        self._tier_blocks[subject] = num_blocks
        self._measured(subject, num_blocks * block_bytes / self._num_blocks)

    def _predicted(self, subject: str) -> float | None:
        return next((d.predicted for d in reversed(self._log.all()) if d.subject == subject), None)

    def take_step(self, load: StepLoad, step_seconds: float) -> None:
        """A step or an idle tick, which takes 0 seconds."""
        if not self._has_blocks:
            self._has_blocks = True
            self._blocks_taken(load.total_blocks)
        if step_seconds > 0:
            self._take_times(load, step_seconds)
        now = self._clock()
        if self._changed and now - self._published >= PUBLISH_SECONDS and self._publish():
            self._published = now

    def _blocks_taken(self, num_blocks: int) -> None:
        """The engine says what it really has; the null block counts as memory."""
        for decision in self._log.all():
            if decision.subject == KV_BLOCKS and decision.predicted is not None:
                self._measured(KV_BLOCKS, decision.predicted * (num_blocks + 1) / self._num_blocks)
                return

    def _take_times(self, load: StepLoad, step_seconds: float) -> None:
        model = self._plan.step_model
        if load.decode_tokens == 1 and not load.prefill_tokens:
            predicted = model.decode_step_seconds(1, load.running_context_tokens)
            if predicted > 0:
                self._decode_ratios.append(step_seconds / predicted)
                self._changed.add(DECODE)
            return
        base_tokens = model.prefill_base_seconds * model.prefill_tokens_per_second
        if not load.decode_tokens and load.prefill_tokens >= max(base_tokens, 1):
            self._prefill_rates.append(load.prefill_tokens / step_seconds)
            self._changed.add(PREFILL)

    def _publish(self) -> bool:
        told = False
        if DECODE in self._changed and len(self._decode_ratios) >= MIN_NUM_STEPS:
            self._changed.discard(DECODE)
            predicted = self._predicted(self._decode_subject)
            if predicted is not None:
                self._measured(self._decode_subject, predicted * statistics.median(self._decode_ratios))
                told = True
        if PREFILL in self._changed:
            self._changed.discard(PREFILL)
            self._measured(PREFILL, statistics.median(self._prefill_rates))
            told = True
        return told

    def _measured(self, subject: str, value: float) -> None:
        decision = self._log.measured(subject, value)
        if decision is not None:
            self._on_measured(decision)
