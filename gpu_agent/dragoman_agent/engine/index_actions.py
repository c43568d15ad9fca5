"""What an index may set off: a change that predicts a gain, tried for 100 steps, kept where the gain is seen, else undone. Pure.

One trial at a time, so that an effect has one cause. idle -> trial -> kept or undone; then a pause before the same action is tried
again.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from dragoman.step_model import StepModel
from dragoman_agent.engine.indices import CacheView, IndexSample, StepFacts, bound_seconds
from dragoman_agent.pal.plan import ShortGroups, groups_for

Action = Literal["release-cached-kv", "raise-prefill-budget", "group-short-sequences", "prefetch-ahead"]

SUSTAINED_STEPS = 50
TRIAL_STEPS = 100
SETTLING_STEPS = 5  # a change reaches the engine while steps are under way
MIN_COUNTED_STEPS = 20  # of a trial's steps that do the work in question
MIN_GAIN = 0.02  # a smaller one could not be told from noise
SEEN_SHARE = 0.5  # of the predicted gain
PAUSE_STEPS = {"kept": 500, "undone": 5000, "declined": 5000}
MPI_LIMIT, CSL_LIMIT, PBS_LIMIT = 0.9, 0.7, 0.8
_UPPER_LIMITS = {"mpi": MPI_LIMIT, "pbs": PBS_LIMIT}
# What comes first is tried first; the next while that is declined or pausing.
_ACTIONS: dict[str, tuple[Action, ...]] = {
    "mpi": ("release-cached-kv",),
    "csl": ("raise-prefill-budget", "group-short-sequences"),
    "pbs": ("prefetch-ahead",),
}


@dataclass(frozen=True, slots=True)
class Knobs:
    """What actions change; the rest of the engine's limits is the plan's."""

    max_step_tokens: int
    num_ready_blocks: int = 0
    prefetch_ahead: bool = False
    attention_rows: int = 1  # short sequences that share a program of decode attention


@dataclass(frozen=True, slots=True)
class Limits:
    """How far the knobs may be turned: what the plan took memory for, and what the engine can do."""

    max_step_tokens: int
    total_blocks: int
    read_bandwidth: float | None = None  # bytes/s, to turn bytes from memory into time
    can_prefetch: bool = False  # whether another tier holds KV that could be brought ahead
    num_layers: int = 0  # of the model, each with its attention
    short_groups: tuple[ShortGroups, ...] = ()  # the plan's
    company_tokens: int = 0  # of a step beside sequences that decode, to begin with; 0: the most


@dataclass(frozen=True, slots=True)
class Proposal:
    """A change with the gain it predicts: 0.1 is a tenth more work a second. A gain of 0 with `reason` is declined."""

    action: Action
    knobs: Knobs
    predicted_gain: float
    index: IndexSample
    reason: str


@dataclass(frozen=True, slots=True)
class Act:
    """Something to record, and the knobs from now on."""

    kind: Literal["started", "kept", "undone", "declined"]
    proposal: Proposal
    knobs: Knobs
    measured_gain: float | None = None
    reason: str = ""


@dataclass(slots=True)
class _Trial:
    proposal: Proposal
    before: Knobs
    speed_before: float
    num_steps: int = 0
    num_counted: int = 0
    work: float = 0.0
    seconds: float = 0.0


class IndexActions:
    """Fed with every step; says what to do. Costs a few microseconds a step."""

    def __init__(self, limits: Limits, *, prefetch_ahead: bool = False) -> None:
        """`prefetch_ahead`: the plan has it on already."""
        self.knobs = Knobs(limits.company_tokens or limits.max_step_tokens, prefetch_ahead=prefetch_ahead)
        self._limits = limits
        self._trial: _Trial | None = None
        self._recent: deque[StepFacts] = deque(maxlen=SUSTAINED_STEPS)
        self._sustained: dict[str, int] = {"mpi": 0, "csl": 0, "pbs": 0}
        self._pause_until: dict[Action, int] = {}
        self._num_steps = 0
        self._grouped: Proposal | None = None  # whose groups were kept
        self._num_long_steps = 0  # one after another, since then

    def rebase(self, knobs: Knobs) -> None:
        """A new plan: what was tried under the old one says nothing any more."""
        self.knobs = knobs
        self._trial = self._grouped = None
        self._recent.clear()
        self._sustained = dict.fromkeys(self._sustained, 0)
        self._pause_until.clear()

    def take(self, facts: StepFacts, indices: Sequence[IndexSample], cache: CacheView, model: StepModel) -> Act | None:
        """One step that computed something, and the indices as they stand."""
        self._num_steps += 1
        self._recent.append(facts)
        sustained = self._sustained
        for index in indices:
            name = index.name
            passed = index.value < CSL_LIMIT if name == "csl" else index.value > _UPPER_LIMITS[name]
            sustained[name] = sustained[name] + 1 if passed else 0
        if self._trial is not None:
            return self._follow(self._trial, facts, model)
        if self._grouped is not None and (act := self._watch_lengths(self._grouped, facts)):
            return act
        for index in indices:
            if sustained[index.name] < SUSTAINED_STEPS:
                continue
            for action in _ACTIONS[index.name]:
                if self._num_steps >= self._pause_until.get(action, 0):
                    act = self._consider(self._propose(action, index, cache, model), model)
                    if act is not None:
                        return act
        return None

    def _consider(self, proposal: Proposal, model: StepModel) -> Act | None:
        if proposal.predicted_gain < MIN_GAIN:
            self._pause(proposal.action, "declined")
            return Act("declined", proposal, self.knobs, reason=proposal.reason)
        counted = [facts for facts in self._recent if _counts(proposal.action, facts)]
        work = sum(_work(proposal.action, facts, model) for facts in counted)
        speed = work / sum(facts.seconds for facts in counted)
        if speed <= 0:
            return None  # a step model of zeros: nothing to hold a gain against
        self._trial = _Trial(proposal, self.knobs, speed)
        self.knobs = proposal.knobs
        return Act("started", proposal, self.knobs, reason=proposal.reason)

    def _follow(self, trial: _Trial, facts: StepFacts, model: StepModel) -> Act | None:
        trial.num_steps += 1
        action = trial.proposal.action
        if trial.num_steps > SETTLING_STEPS and _counts(action, facts):
            trial.num_counted += 1
            trial.work += _work(action, facts, model)
            trial.seconds += facts.seconds
        if trial.num_steps < TRIAL_STEPS:
            return None
        self._trial = None
        if trial.num_counted < MIN_COUNTED_STEPS:
            return self._end(trial, None, f"only {trial.num_counted} steps did this work, too few to see a gain")
        gain = trial.work / trial.seconds / trial.speed_before - 1.0
        predicted = trial.proposal.predicted_gain
        if gain >= SEEN_SHARE * predicted:
            self._pause(action, "kept")
            if action == "group-short-sequences":
                self._grouped, self._num_long_steps = trial.proposal, 0
            return Act("kept", trial.proposal, self.knobs, gain, f"{gain:+.1%} seen, {predicted:+.1%} predicted")
        return self._end(trial, gain, f"{gain:+.1%} seen where {predicted:+.1%} was predicted")

    def _end(self, trial: _Trial, gain: float | None, reason: str) -> Act:
        self.knobs = trial.before
        self._pause(trial.proposal.action, "undone")
        return Act("undone", trial.proposal, self.knobs, gain, reason)

    def _pause(self, action: Action, why: str) -> None:
        self._pause_until[action] = self._num_steps + PAUSE_STEPS[why]

    def _watch_lengths(self, grouped: Proposal, facts: StepFacts) -> Act | None:
        """Groups that were kept end once sequences have not been short for so many steps: few programs read long ones slowly."""
        limit = max(one.context_tokens for one in self._limits.short_groups)
        self._num_long_steps = self._num_long_steps + 1 if _mean_context(facts) > limit else 0
        if self._num_long_steps < SUSTAINED_STEPS:
            return None
        self._grouped = None
        self.knobs = replace(self.knobs, attention_rows=1)
        self._pause(grouped.action, "kept")
        reason = f"sequences have {_mean_context(facts):.0f} tokens on average by now, and it was timed with {limit}"
        return Act("undone", grouped, self.knobs, reason=reason)

    def _propose(self, action: Action, index: IndexSample, cache: CacheView, model: StepModel) -> Proposal:
        match action:
            case "release-cached-kv":
                return self._release_cached(index, cache)
            case "raise-prefill-budget":
                return self._raise_budget(index, model)
            case "group-short-sequences":
                return self._group_short(index)
            case "prefetch-ahead":
                return self._prefetch(index)

    def _release_cached(self, index: IndexSample, cache: CacheView) -> Proposal:
        """Gain: evictions that steps wait for, and reads from memory beyond what the shape needs."""
        mean = statistics.fmean(facts.seconds for facts in self._recent)
        evicting = statistics.fmean(facts.eviction_seconds for facts in self._recent)
        excess = 0.0
        if self._limits.read_bandwidth:
            excess = cache.excess_bytes_per_second * mean / self._limits.read_bandwidth
        saved = min(evicting + excess, 0.9 * mean)
        gain = saved / (mean - saved) if mean > saved else 0.0
        ready = max(self._limits.total_blocks // 16, 1)
        reason = (
            f"{1e6 * evicting:.0f} us a step go into evicting blocks that are needed at once, and {1e6 * excess:.0f} us "
            f"into reads that L2 should have served; {ready} blocks are kept unused instead"
        )
        if self.knobs.num_ready_blocks >= ready:
            gain, reason = 0.0, f"{ready} blocks are kept unused already"
        return Proposal("release-cached-kv", replace(self.knobs, num_ready_blocks=ready), gain, index, reason)

    def _raise_budget(self, index: IndexSample, model: StepModel) -> Proposal:
        """Gain: what a step costs beyond the model is spread over twice the tokens."""
        budget = self.knobs.max_step_tokens
        raised = min(2 * budget, self._limits.max_step_tokens)
        knobs = replace(self.knobs, max_step_tokens=raised)
        full = [facts for facts in self._recent if _counts("raise-prefill-budget", facts)]

        def declined(reason: str) -> Proposal:
            return Proposal("raise-prefill-budget", knobs, 0.0, index, reason)

        if len(full) < MIN_COUNTED_STEPS:
            return declined("no prompt waits for room in a step, so a larger step would hold no more")
        if raised <= budget:
            return declined(f"a step already has the {budget} tokens that the plan took memory for")
        tokens = statistics.fmean(facts.num_tokens for facts in full)
        seconds = statistics.fmean(facts.seconds for facts in full)
        prefill = statistics.fmean(facts.prefill_tokens for facts in full)
        more = min(float(raised - budget), statistics.fmean(facts.pending_prefill_tokens for facts in full))
        longer = model.prefill_seconds(prefill + more) - model.prefill_seconds(prefill)
        gain = (tokens + more) / (seconds + longer) / (tokens / seconds) - 1.0
        reason = (
            f"a step of {tokens:.0f} tokens takes {1e3 * seconds:.2f} ms, {more:.0f} more should add "
            f"{1e3 * longer:.2f} ms"
        )
        return Proposal("raise-prefill-budget", knobs, gain, index, reason)

    def _group_short(self, index: IndexSample) -> Proposal:
        """Gain: what the plan timed that attention saves in each layer where short sequences share programs."""
        groups, knobs = self._limits.short_groups, self.knobs
        decoding = [facts for facts in self._recent if _counts("group-short-sequences", facts)]

        def declined(reason: str) -> Proposal:
            return Proposal("group-short-sequences", knobs, 0.0, index, reason)

        if not groups:
            return declined(
                "sequences that share programs were timed to be quicker at no batch, see attention-grouping"
            )
        if knobs.attention_rows > 1:
            return declined(f"up to {knobs.attention_rows} sequences share a program already")
        if len(decoding) < MIN_COUNTED_STEPS:
            return declined(
                f"{len(decoding)} of the last {len(self._recent)} steps were without prompts, {MIN_COUNTED_STEPS} are wanted: "
                "beside prompts each sequence has programs of its own"
            )
        batch = round(statistics.fmean(facts.decode_tokens for facts in decoding))
        context = statistics.fmean(map(_mean_context, decoding))
        group = groups_for(groups, batch)
        if group is None:
            ranges = ", ".join(f"{one.min_batch} to {one.max_batch}" for one in groups)
            return declined(f"steps have {batch} sequences; sharing programs was timed to be quicker for {ranges}")
        if context > group.context_tokens:
            timed = f"sharing programs was timed to be quicker with {group.context_tokens}"
            return declined(f"sequences have {context:.0f} tokens on average; {timed}")
        mean = statistics.fmean(facts.seconds for facts in decoding)
        gain = self._limits.num_layers * (group.ungrouped_seconds - group.grouped_seconds) / mean
        reason = (
            f"{batch} sequences of {context:.0f} tokens: where {group.rows} share a program, attention of each of "
            f"{self._limits.num_layers} layers takes {1e6 * group.grouped_seconds:.1f} us instead of "
            f"{1e6 * group.ungrouped_seconds:.1f}, {gain:.1%} of a step of {1e3 * mean:.2f} ms"
        )
        # The most of any range of batches: in each one the device takes no more than was timed for it, and batches change.
        rows = max(one.rows for one in groups)
        return Proposal("group-short-sequences", replace(knobs, attention_rows=rows), gain, index, reason)

    def _prefetch(self, index: IndexSample) -> Proposal:
        """Gain: copies that run beside the computation instead of before it."""
        knobs = replace(self.knobs, prefetch_ahead=True)
        if not self._limits.can_prefetch:
            reason = "this engine keeps KV on its device only: there is nothing to bring ahead"
            return Proposal("prefetch-ahead", knobs, 0.0, index, reason)
        if self.knobs.prefetch_ahead:
            return Proposal("prefetch-ahead", knobs, 0.0, index, "it is on already")
        copying = min(index.value, 1.0)
        gain = 1.0 / max(1.0 - copying, copying) - 1.0
        reason = f"copies take {copying:.0%} of a step; beside the computation they would cost nothing more"
        return Proposal("prefetch-ahead", knobs, gain, index, reason)


def _counts(action: Action, facts: StepFacts) -> bool:
    """Whether a step shows what the action is about: for the budget, one beside sequences that decode, full while prompts waited;
    for groups, one without prompts.
    """
    if facts.seconds <= 0 or not facts.num_tokens:
        return False
    if action == "raise-prefill-budget":
        return facts.pending_prefill_tokens > 0 and facts.prefill_tokens > 0 and facts.decode_tokens > 0
    if action == "group-short-sequences":
        return facts.decode_tokens > 0 and not facts.prefill_tokens
    return True


def _mean_context(facts: StepFacts) -> float:
    """Tokens of a running sequence."""
    return facts.context_tokens / max(facts.running, 1)


def _work(action: Action, facts: StepFacts, model: StepModel) -> float:
    """Tokens for the budget; else the step model's seconds, so that a batch that changes its shape does not look like a gain."""
    return float(facts.num_tokens) if action == "raise-prefill-budget" else bound_seconds(model, facts)
