"""Picks an agent for a request by predicted seconds: wait at the agent, prefill of uncached tokens, decode. Pure.

A cheap lower bound of every agent's seconds is one line of arithmetic over a list; only agents that could win by
their bound are computed exactly.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from dragoman_controller.steps import DecodeRow, StepTable

TIE_RATIO = 1.02
_INFINITE = math.inf


@dataclass(frozen=True, slots=True)
class Shape:
    """What placement needs of a request. `prompt_tokens` are all to be in the context at the first output token."""

    prompt_tokens: int
    output_tokens: int
    num_choices: int = 1
    min_context_tokens: int = 1
    """Least context that holds the request at all."""
    wanted_context_tokens: int = 1
    """Context that holds the prompt and the whole output; agents with less are used only when none has it."""


class Score(NamedTuple):
    """Predicted seconds of one request at one agent."""

    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float
    step_seconds: float
    cached_tokens: int

    @property
    def finish_seconds(self) -> float:
        """From acceptance to the last token."""
        return self.queue_seconds + self.prefill_seconds + self.decode_seconds


class Line(NamedTuple):
    """Lower bound of an agent's seconds: queue + max(base, u * per_token) + (o - 1) * (step + slope * x).

    u: uncached prompt tokens; o: output tokens; x: the request's own mean context.
    """

    queue: float
    base: float
    per_token: float
    step: float
    slope: float


FULL = Line(_INFINITE, 0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class AgentView:
    """One agent of one model at one instant, as placement sees it. `excluded_because` empty: it may be chosen."""

    agent_id: str
    max_context_tokens: int
    num_free_slots: int
    num_slots: int
    num_running: int
    mean_context_tokens: float
    queue_seconds: float
    max_running_requests: int
    steps: StepTable
    row: DecodeRow
    plan: bytes = b""
    excluded_because: str = ""
    state: str = "serving"

    def line(self) -> Line:
        """The lower bound for a request of one choice."""
        if self.excluded_because or not self.num_free_slots:
            return FULL
        batch_size = min(self.num_running + 1, self.max_running_requests)
        others = self.mean_context_tokens * (batch_size - 1) / batch_size
        step, slope = self.row.floor_from(others)
        model = self.steps.model
        return Line(
            self.queue_seconds,
            model.prefill_base_seconds,
            self.steps.seconds_per_prompt_token,
            step,
            slope / batch_size,
        )

    def score(self, shape: Shape, cached_tokens: int) -> Score:
        """The predicted seconds, exactly. At least the prompt's last token is computed, whatever is cached."""
        uncached = max(shape.prompt_tokens - cached_tokens, 1)
        choices = min(shape.num_choices, self.max_running_requests)
        batch_size = min(self.num_running + choices, self.max_running_requests)
        row = self.row if choices == 1 else self.steps.row(batch_size)
        own_context = shape.prompt_tokens + shape.output_tokens / 2
        context = (self.mean_context_tokens * (batch_size - choices) + choices * own_context) / batch_size
        step = row.at(context)
        return Score(
            self.queue_seconds,
            self.steps.prefill_seconds(uncached),
            (shape.output_tokens - 1) * step,
            step,
            min(cached_tokens, shape.prompt_tokens - 1),
        )

    def refusal(self, shape: Shape) -> str:
        """Why this request cannot go here; empty where it can."""
        if self.excluded_because:
            return self.excluded_because
        if self.max_context_tokens < shape.min_context_tokens:
            return f"its context is {self.max_context_tokens} tokens, {shape.min_context_tokens} are needed"
        # A request of more choices than there are slots gets the whole agent.
        if self.num_free_slots < min(shape.num_choices, self.num_slots):
            return f"{self.num_free_slots} slots are free, {shape.num_choices} are needed"
        return ""


class Candidates:
    """The agents of one model with their bounds, in parallel lists. Replaced view by view as loads change."""

    __slots__ = ("_position", "_states", "largest_context", "lines", "smallest_context", "views")

    def __init__(self) -> None:
        self.views: list[AgentView] = []
        self.lines: list[Line] = []
        self.smallest_context = 0
        self.largest_context = 0
        self._states: Counter[str] = Counter()
        self._position: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.views)

    def position(self, agent_id: str) -> int | None:
        """Index of an agent in `views` and `lines`."""
        return self._position.get(agent_id)

    def num_in_state(self, state: str) -> int:
        """Agents in a state, such as "serving"."""
        return self._states[state]

    def put(self, view: AgentView) -> None:
        """Adds an agent or replaces its view."""
        index = self._position.get(view.agent_id)
        self._states[view.state] += 1
        if index is None:
            self._position[view.agent_id] = len(self.views)
            self.views.append(view)
            self.lines.append(view.line())
            self._measure()
            return
        self._states[self.views[index].state] -= 1
        contexts_differ = self.views[index].max_context_tokens != view.max_context_tokens
        self.views[index] = view
        self.lines[index] = view.line()
        if contexts_differ:
            self._measure()

    def remove(self, agent_id: str) -> None:
        """Drops an agent; the last one takes its place."""
        index = self._position.pop(agent_id, None)
        if index is None:
            return
        self._states[self.views[index].state] -= 1
        view, line = self.views.pop(), self.lines.pop()
        if view.agent_id != agent_id:
            self.views[index], self.lines[index] = view, line
            self._position[view.agent_id] = index
        self._measure()

    def _measure(self) -> None:
        contexts = [view.max_context_tokens for view in self.views]
        self.smallest_context, self.largest_context = min(contexts, default=0), max(contexts, default=0)


_Exact = Callable[[int], Score]


class Placement(NamedTuple):
    """Where a request goes: indices into the candidates."""

    chosen: int
    score: Score
    fallback: int | None
    num_ties: int


def place(
    candidates: Candidates,
    shape: Shape,
    cached_tokens: Mapping[str, int],
    rng: Random,
    excluded: Iterable[str] = (),
) -> Placement | None:
    """The agent that finishes first, within 2 %; None when no agent may take the request.

    Agents within 2 % of the best count as equal: of two of them drawn by `rng` the faster is taken, so that many
    controllers with one view do not all choose the same.
    """
    bounds = _bounds(candidates, shape, cached_tokens, excluded)
    if not bounds:
        return None
    views = candidates.views

    def exact(index: int) -> Score:
        view = views[index]
        return view.score(shape, cached_tokens.get(view.agent_id, 0))

    lowest = min(bounds)
    if lowest == _INFINITE:
        return None
    best = bounds.index(lowest)
    best_score = exact(best)
    best_score, best = _refine(bounds, best, best_score, exact)
    limit = best_score.finish_seconds * TIE_RATIO
    ties = [index for index, bound in enumerate(bounds) if bound <= limit]
    chosen, score = best, best_score
    if len(ties) > 1:
        chosen, score = _choose_of_two(ties, best, best_score, limit, rng, exact)
    return Placement(chosen, score, _second(bounds, chosen), len(ties))


def _refine(bounds: list[float], best: int, score: Score, exact: _Exact) -> tuple[Score, int]:
    """Looks at every agent whose bound says that it might beat the best by more than a tie."""
    threshold = score.finish_seconds / TIE_RATIO
    if bounds[best] >= threshold:
        return score, best
    for index in sorted((i for i, bound in enumerate(bounds) if bound < threshold), key=bounds.__getitem__):
        if bounds[index] >= score.finish_seconds / TIE_RATIO:
            break
        other = exact(index)
        if other.finish_seconds < score.finish_seconds:
            score, best = other, index
    return score, best


def _choose_of_two(
    ties: list[int], best: int, best_score: Score, limit: float, rng: Random, exact: _Exact
) -> tuple[int, Score]:
    # int(random() * n) is several times cheaper than randrange, and the bias of 2**-53 is of no matter here.
    first = int(rng.random() * len(ties))
    second = int(rng.random() * (len(ties) - 1))
    second += second >= first
    chosen, score = best, best_score
    chosen_seconds = _INFINITE
    for index in (ties[first], ties[second]):
        candidate = exact(index)
        if candidate.finish_seconds <= limit and candidate.finish_seconds < chosen_seconds:
            chosen, score, chosen_seconds = index, candidate, candidate.finish_seconds
    return chosen, score


def _second(bounds: list[float], chosen: int) -> int | None:
    """The next best other agent, by its bound."""
    saved, bounds[chosen] = bounds[chosen], _INFINITE
    lowest = min(bounds)
    second = bounds.index(lowest) if lowest < _INFINITE else None
    bounds[chosen] = saved
    return second


def _bounds(
    candidates: Candidates, shape: Shape, cached_tokens: Mapping[str, int], excluded: Iterable[str]
) -> list[float]:
    """Lower bounds in seconds, infinite for an agent that may not be chosen."""
    u, o, x = shape.prompt_tokens, shape.output_tokens - 1, shape.prompt_tokens + shape.output_tokens / 2
    if shape.num_choices > 1:
        bounds = [
            _INFINITE
            if view.excluded_because or not view.num_free_slots
            else view.score(shape, cached_tokens.get(view.agent_id, 0)).finish_seconds
            for view in candidates.views
        ]
    else:
        bounds = [q + (b if u * p < b else u * p) + o * (step + slope * x) for q, b, p, step, slope in candidates.lines]
        for agent_id, num_cached in cached_tokens.items():
            index = candidates.position(agent_id)
            if index is not None:
                q, b, p, step, slope = candidates.lines[index]
                bounds[index] = q + max(b, max(u - num_cached, 1) * p) + o * (step + slope * x)
    for agent_id in excluded:
        index = candidates.position(agent_id)
        if index is not None:
            bounds[index] = _INFINITE
    if shape.num_choices > 1 or candidates.smallest_context < shape.wanted_context_tokens:
        _exclude_by_shape(candidates, shape, bounds)
    return bounds


def _exclude_by_shape(candidates: Candidates, shape: Shape, bounds: list[float]) -> None:
    views = candidates.views
    for index, view in enumerate(views):
        if bounds[index] < _INFINITE and view.refusal(shape):
            bounds[index] = _INFINITE
    roomy = [i for i, view in enumerate(views) if view.max_context_tokens >= shape.wanted_context_tokens]
    if any(bounds[index] < _INFINITE for index in roomy):
        for index in set(range(len(views))).difference(roomy):
            bounds[index] = _INFINITE
