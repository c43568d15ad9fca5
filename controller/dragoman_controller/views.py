"""Makes the views that placement reads, from a member, its load and what was granted to it since."""

from __future__ import annotations

import math

from dragoman_controller.agent_view import AgentView
from dragoman_controller.fleet import AgentState, Member, ModelSpec
from dragoman_controller.ledger import Debit
from dragoman_controller.quote import AgentQuotes
from dragoman_controller.recent import RecentAgents
from dragoman_controller.requests import BYTES_PER_TOKEN_GUESS, DEFAULT_OUTPUT_TOKENS, AdmissionRequest

# A beat every 0.2 s, and the way of a ticket to the agent.
_ROUND_TRIP_SECONDS = 0.3
_MIN_NUM_AHEAD = 2
# How little the prompts in front may come to count: an engine may compute several at once, but none in no time.
_MIN_WEIGHT = 1 / 8
# Slots come free by chance: nine in ten waits for one are shorter than this many times the mean wait (ln 10), and a request
# is placed by what it can rely on.
_SLOT_CAUTION = 2.3
_EXCLUSIONS = {
    AgentState.STARTING: "it is still loading the model",
    AgentState.DRAINING: "it is draining",
    AgentState.SUSPECT: "it has been silent, or its connection broke",
    AgentState.DEAD: "it has been silent for too long",
}
# Enum members are slow to ask, and views are made for each grant and each beat.
_LABELS = {state: state.label for state in AgentState}


class ServiceTimes:
    """Mean time of the requests of each agent in seconds, moving; first guessed from the step model."""

    _WEIGHT = 0.1

    def __init__(self) -> None:
        self._seconds: RecentAgents[float] = RecentAgents()

    def observe(self, agent_id: str, total_seconds: float) -> None:
        """Takes one finished request."""
        before = self._seconds.get(agent_id)
        mean = total_seconds if before is None else before + self._WEIGHT * (total_seconds - before)
        self._seconds.put(agent_id, mean)

    def mean(self, agent_id: str, model: ModelSpec) -> float:
        """Mean seconds of a request at this agent."""
        seconds = self._seconds.get(agent_id)
        if seconds is None:
            step = model.steps.row(model.max_running_requests).at(DEFAULT_OUTPUT_TOKENS)
            seconds = DEFAULT_OUTPUT_TOKENS * step
        return seconds


class PromptSizes:
    """Bytes a token of prompts whose length in tokens only the agent knew, by model; a moving mean."""

    _WEIGHT, _MOST = 0.1, 64.0

    def __init__(self) -> None:
        self._bytes_per_token: dict[str, float] = {}

    def tokens(self, request: AdmissionRequest) -> int:
        """Tokens of a request, as far as they are known."""
        return request.predicted_prompt_tokens(self._bytes_per_token.get(request.model, BYTES_PER_TOKEN_GUESS))

    def observe(self, model: str, num_bytes: int, num_tokens: int) -> None:
        """Takes a prompt that has been tokenized; 0 of either says nothing."""
        if num_bytes and num_tokens:
            before = self._bytes_per_token.get(model, BYTES_PER_TOKEN_GUESS)
            seen = min(max(num_bytes / num_tokens, 1.0), self._MOST)
            self._bytes_per_token[model] = before + self._WEIGHT * (seen - before)

    def forget(self, model: str) -> None:
        """A model that is no longer served."""
        self._bytes_per_token.pop(model, None)


def plan_of(member: Member, model: ModelSpec) -> bytes:
    """What two agents must have in common to give equal tokens; empty when the agent does not tell."""
    return model.plan_digest + member.spec.architecture.encode() if model.plan_digest else b""


def view_of(
    member: Member,
    model: ModelSpec,
    debit: Debit,
    service_times: ServiceTimes,
    quotes: AgentQuotes,
    now: float,
    plan: bytes,
) -> AgentView:
    """The view of one model of a member; `quotes`: what was learnt of it; `plan`: as `plan_of`.

    Wait at the agent: the prompt tokens in front, at the prefill rate; where no slot is free, one mean request time
    over the number of slots for each request that has to end first; and the step that runs. Of the agent's own queue
    only so much is used as keeps it busy: who waits is for the fair queue here to say.
    """
    # Made for each grant and each beat: comparisons are written out, and the view is made by position.
    num_requests, _, context_tokens, num_contexts, busy_until = debit
    most, steps, state = model.max_running_requests, model.steps, member.state
    slot_seconds, num_slots = 0.0, most + model.max_waiting_requests
    backlog_seconds = busy_until - now if busy_until > now else 0.0
    num_running, num_joined = num_requests, num_requests + 1
    if num_requests >= most:
        mean_seconds = service_times.mean(member.spec.agent_id, model)
        slot_seconds = (num_requests - most + 1) * mean_seconds / most
        num_slots = most + min(model.max_waiting_requests, _num_ahead(most, mean_seconds))
        num_running = num_joined = most
    num_free_slots = num_slots - num_requests if num_slots > num_requests else 0
    excluded = "" if state is AgentState.SERVING else _EXCLUSIONS[state]
    if not excluded and not num_free_slots:
        excluded = f"all its {num_slots} slots are taken"
    mean_context = context_tokens / num_contexts if num_contexts else 0.0
    observed = member.load.step_seconds
    modelled_step = steps.row(num_running).at(mean_context) if num_running else 0.0
    queue_weight, pace = quotes.weights.queue, quotes.pace
    queue_weight = 1.0 if queue_weight > 1.0 else _MIN_WEIGHT if queue_weight < _MIN_WEIGHT else queue_weight
    return AgentView(
        member.spec.agent_id,
        model.max_context_tokens,
        num_free_slots,
        num_slots,
        num_running,
        mean_context,
        _SLOT_CAUTION * slot_seconds + queue_weight * backlog_seconds + pace * modelled_step,
        most,
        steps,
        steps.row(num_joined),
        plan,
        excluded,
        _LABELS[state],
        pace,
        backlog_seconds,
        slot_seconds,
        (observed or modelled_step) if num_running else 0.0,
        observed,
        now,
    )


def _num_ahead(max_running_requests: int, mean_seconds: float) -> int:
    """Requests to put into a full agent's queue: as many as end before the controller has heard of it and answered.

    More would gain nothing and take from the controller whom to serve next.
    """
    num_ending = max_running_requests * _ROUND_TRIP_SECONDS / max(mean_seconds, 1e-3)
    return max(_MIN_NUM_AHEAD, math.ceil(num_ending))
