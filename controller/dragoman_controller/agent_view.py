"""An agent as placement sees it, and the exact seconds of a request on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from dragoman_controller.steps import DecodeRow, StepTable

Terms: TypeAlias = tuple[
    float, float, float, float, float, tuple[int, ...], tuple[float, ...], tuple[float, ...], float
]
"""(queue, base, per_token, others, share, contexts, times, slopes, pace): the exact seconds of a request of one choice are

queue + max(base, u * per_token) + (o - 1) * pace * step(others + share * x) for u uncached prompt tokens, o output
tokens and a mean context of x of the request itself; `contexts`, `times` and `slopes` are those of the decode row. A plain
tuple: it is unpacked for each agent that a request is weighed at.
"""


class Shape(NamedTuple):
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
    modelled_step_seconds: float = 0.0
    """`step_seconds` by the step model alone."""

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
    pace: float = 1.0
    """What its requests took in the long run over what the step model says; `queue_seconds` has it in already."""
    backlog_seconds: float = 0.0
    """Until the prompt tokens in front have been computed, as expected of the agent."""
    slot_seconds: float = 0.0
    """Wait for a slot, without the pace."""
    running_step_seconds: float = 0.0
    """A step of what runs now; 0 where nothing does."""
    observed_step_seconds: float = 0.0
    """Mean step of the agent's last second; 0 where nothing ran."""
    made_at: float = 0.0

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
            steps.base_seconds * self.pace,
            steps.seconds_per_prompt_token * self.pace,
            self.mean_context_tokens * (batch_size - 1) / batch_size,
            1 / batch_size,
            row.contexts,
            row.seconds,
            row.slopes,
            self.pace,
        )

    def step_seconds(self, shape: Shape) -> float:
        """Expected decode step in the batch the request would join."""
        return self.pace * self.modelled_step_seconds(shape)

    def modelled_step_seconds(self, shape: Shape) -> float:
        """The same by the step model alone."""
        choices = min(shape.num_choices, self.max_running_requests)
        batch_size = min(self.num_running + choices, self.max_running_requests)
        row = self.row if choices == 1 else self.steps.row(batch_size)
        others = self.mean_context_tokens * (batch_size - choices) / batch_size
        return row.at(others + choices / batch_size * shape.mean_context_tokens)

    def prefill_seconds(self, shape: Shape, cached_tokens: int) -> float:
        """Expected prefill. At least the prompt's last token is computed, whatever is cached."""
        steps, pace = self.steps, self.pace
        base = steps.base_seconds * pace
        seconds = max(shape.prompt_tokens - cached_tokens, 1) * (steps.seconds_per_prompt_token * pace)
        return seconds if seconds > base else base

    def finish_seconds(self, shape: Shape, cached_tokens: int) -> float:
        """The predicted seconds, exactly."""
        prefill = self.prefill_seconds(shape, cached_tokens)
        return self.queue_seconds + prefill + (shape.output_tokens - 1) * self.step_seconds(shape)

    def score(self, shape: Shape, cached_tokens: int) -> Score:
        """`finish_seconds` in its parts."""
        modelled = self.modelled_step_seconds(shape)
        step = self.pace * modelled
        return Score(
            self.queue_seconds,
            self.prefill_seconds(shape, cached_tokens),
            (shape.output_tokens - 1) * step,
            step,
            min(cached_tokens, shape.prompt_tokens - 1),
            modelled,
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
