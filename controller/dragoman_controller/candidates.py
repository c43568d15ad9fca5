"""The agents of one model as placement sees them, with lower bounds of their seconds that are quick to search."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from dragoman_controller.steps import DecodeRow, StepTable

BLOCK_SIZE = 16
# After so many replaced views the blocks are made anew.
_SORT_INTERVAL = 256
# The usual request follows the last fifty or so.
_USUAL_WEIGHT = 0.02

Terms: TypeAlias = tuple[float, float, float, float, float, tuple[int, ...], tuple[float, ...], tuple[float, ...]]
"""(queue, base, per_token, others, share, contexts, times, slopes): the exact seconds of a request of one choice are

queue + max(base, u * per_token) + (o - 1) * step(others + share * x) for u uncached prompt tokens, o output tokens and a
mean context of x of the request itself; `contexts`, `times` and `slopes` are those of the decode row. A plain tuple: it is
unpacked for each agent that a request is weighed at.
"""

Line: TypeAlias = tuple[float, float, float, float, float]
"""(queue, base, per_token, intercept, slope): as Terms, with a straight line that is nowhere above the step."""

FULL: Line = (math.inf, 0.0, 0.0, 0.0, 0.0)


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

    @property
    def mean_context_tokens(self) -> float:
        """The request's own context, on average over its output."""
        return self.prompt_tokens + self.output_tokens / 2


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


@dataclass(slots=True, eq=False)
class AgentView:
    """One agent of one model at one instant, as placement sees it; never changed once made.

    `row` is that of the batch a request of one choice joins. `excluded_because` empty: the agent may be chosen.
    """

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

    @property
    def is_able(self) -> bool:
        """Whether it may be given a request of one choice."""
        return not self.excluded_because and self.num_free_slots > 0

    def terms(self) -> Terms:
        """What its seconds for a request of one choice are made of."""
        batch_size = min(self.num_running + 1, self.max_running_requests)
        steps, row = self.steps, self.row
        return (
            self.queue_seconds,
            steps.base_seconds,
            steps.seconds_per_prompt_token,
            self.mean_context_tokens * (batch_size - 1) / batch_size,
            1 / batch_size,
            row.contexts,
            row.seconds,
            row.slopes,
        )

    def line(self, terms: Terms, usual_context: float) -> Line:
        """A lower bound of its seconds, nearest for a request whose own mean context is the usual one."""
        queue, base, per_token, others, share, *_ = terms
        intercept, slope = self.row.floor_at(others + share * usual_context)
        return queue, base, per_token, intercept + slope * others, slope * share

    def step_seconds(self, shape: Shape) -> float:
        """Predicted decode step in the batch the request would join."""
        choices = min(shape.num_choices, self.max_running_requests)
        batch_size = min(self.num_running + choices, self.max_running_requests)
        row = self.row if choices == 1 else self.steps.row(batch_size)
        others = self.mean_context_tokens * (batch_size - choices) / batch_size
        return row.at(others + choices / batch_size * shape.mean_context_tokens)

    def finish_seconds(self, shape: Shape, cached_tokens: int) -> float:
        """The predicted seconds, exactly. At least the prompt's last token is computed, whatever is cached."""
        prefill = self.steps.prefill_seconds(max(shape.prompt_tokens - cached_tokens, 1))
        return self.queue_seconds + prefill + (shape.output_tokens - 1) * self.step_seconds(shape)

    def score(self, shape: Shape, cached_tokens: int) -> Score:
        """`finish_seconds` in its parts."""
        step = self.step_seconds(shape)
        return Score(
            self.queue_seconds,
            self.steps.prefill_seconds(max(shape.prompt_tokens - cached_tokens, 1)),
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
    """The agents of one model in parallel lists, and in blocks. Replaced view by view as loads change."""

    __slots__ = (
        "_block_of",
        "_dirty",
        "_lines",
        "_num_until_sort",
        "_position",
        "_states",
        "_usual",
        "blocks",
        "floors",
        "largest_context",
        "num_able",
        "smallest_context",
        "terms",
        "views",
    )

    def __init__(self) -> None:
        self.views: list[AgentView] = []
        self.terms: list[Terms] = []
        self.smallest_context = 0
        self.largest_context = 0
        self.num_able = 0
        """Agents that may be given a request now."""
        self.blocks: list[list[int]] = []
        """Positions of the agents that may be chosen, by block; see `tighten`."""
        self.floors: list[Line] = []
        """A line below those of all agents of each block."""
        self._usual = (1000.0, 100.0)
        self._lines: list[Line] = []
        self._block_of: list[int] = []
        self._dirty: set[int] = set()
        self._num_until_sort = 0
        self._states: Counter[str] = Counter()
        self._position: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.views)

    def position(self, agent_id: str) -> int | None:
        """Index of an agent in `views` and `terms`."""
        return self._position.get(agent_id)

    def num_in_state(self, state: str) -> int:
        """Agents in a state, such as "serving"."""
        return self._states[state]

    def put(self, view: AgentView) -> None:
        """Adds an agent or replaces its view."""
        index = self._position.get(view.agent_id)
        terms = view.terms()
        line = view.line(terms, self._usual_context) if view.is_able else FULL
        if index is None:
            self._position[view.agent_id] = len(self.views)
            self.views.append(view)
            self.terms.append(terms)
            self._lines.append(line)
            self._states[view.state] += 1
            self.num_able += line is not FULL
            self._members_changed()
            return
        before, line_before = self.views[index], self._lines[index]
        if before.state != view.state:
            self._states[before.state] -= 1
            self._states[view.state] += 1
        self.views[index], self.terms[index], self._lines[index] = view, terms, line
        if (line is FULL) != (line_before is FULL):
            self.num_able += 1 if line_before is FULL else -1
            self._num_until_sort = 0
        if before.max_context_tokens != view.max_context_tokens:
            self._members_changed()
        elif self._num_until_sort > 0:
            self._num_until_sort -= 1
            self._dirty.add(self._block_of[index])

    def remove(self, agent_id: str) -> None:
        """Drops an agent; the last one takes its place."""
        index = self._position.pop(agent_id, None)
        if index is None:
            return
        self._states[self.views[index].state] -= 1
        self.num_able -= self._lines[index] is not FULL
        view, terms, line = self.views.pop(), self.terms.pop(), self._lines.pop()
        if view.agent_id != agent_id:
            self.views[index], self.terms[index], self._lines[index] = view, terms, line
            self._position[view.agent_id] = index
        self._members_changed()

    def learn(self, shape: Shape) -> None:
        """Lets the usual request follow this one. It shapes the blocks, and so the work of a search, not its result."""
        prompt, output = self._usual
        self._usual = (
            prompt + _USUAL_WEIGHT * (shape.prompt_tokens - prompt),
            output + _USUAL_WEIGHT * (shape.output_tokens - output),
        )

    def tighten(self) -> None:
        """Brings `blocks` and `floors` up to date. Agents alike for the usual request share a block: its floor is near."""
        if self._num_until_sort <= 0:
            self._sort()
        for block in self._dirty:
            self.floors[block] = _floor([self._lines[index] for index in self.blocks[block]])
        self._dirty.clear()

    @property
    def _usual_context(self) -> float:
        return self._usual[0] + self._usual[1] / 2

    def _sort(self) -> None:
        prompt, output = self._usual
        context = prompt + output / 2

        def usual_seconds(index: int) -> float:
            queue, base, per_token, intercept, slope = self._lines[index]
            return queue + max(base, prompt * per_token) + output * (intercept + slope * context)

        able = [index for index, line in enumerate(self._lines) if line is not FULL]
        able.sort(key=usual_seconds)
        self.blocks = [able[start : start + BLOCK_SIZE] for start in range(0, len(able), BLOCK_SIZE)]
        self.floors = [FULL] * len(self.blocks)
        self._block_of = [0] * len(self.views)
        for block, members in enumerate(self.blocks):
            for index in members:
                self._block_of[index] = block
        self._dirty = set(range(len(self.blocks)))
        self._num_until_sort = _SORT_INTERVAL

    def _members_changed(self) -> None:
        self._num_until_sort = 0
        self._dirty.clear()
        contexts = [view.max_context_tokens for view in self.views]
        self.smallest_context, self.largest_context = min(contexts, default=0), max(contexts, default=0)


def _floor(lines: list[Line]) -> Line:
    """The line below all of these: the least of each term."""
    queue, base, per_token, intercept, slope = zip(*lines, strict=True)
    return min(queue), min(base), min(per_token), min(intercept), min(slope)
