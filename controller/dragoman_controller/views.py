"""Makes the views that placement reads, from a member, its load and what was granted to it since."""

from __future__ import annotations

from dragoman_controller.candidates import AgentView
from dragoman_controller.fleet import AgentState, Member, ModelSpec
from dragoman_controller.ledger import Debit
from dragoman_controller.quote import Weights
from dragoman_controller.recent import RecentAgents
from dragoman_controller.requests import DEFAULT_OUTPUT_TOKENS

_MIN_WEIGHT = 1 / 64
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


def plan_of(member: Member, model: ModelSpec) -> bytes:
    """What two agents must have in common to give equal tokens; empty when the agent does not tell."""
    return model.plan_digest + member.spec.architecture.encode() if model.plan_digest else b""


def view_of(
    member: Member, model: ModelSpec, debit: Debit, service_times: ServiceTimes, weights: Weights, now: float
) -> AgentView:
    """The view of one model of a member, with what was learnt of it in `weights`.

    Wait at the agent: the prompt tokens in front, at the prefill rate; where no slot is free, one mean request time
    over the number of slots for each request that has to end first; and the step that runs.
    """
    num_requests = debit.num_requests
    backlog_seconds = max(debit.busy_until - now, 0.0)
    num_ahead = num_requests - model.max_running_requests + 1
    if num_ahead > 0:
        backlog_seconds += num_ahead * service_times.mean(member.agent_id, model) / model.max_running_requests
    num_free_slots = max(model.num_slots - num_requests, 0)
    state = member.state
    excluded = "" if state is AgentState.SERVING else _EXCLUSIONS[state]
    if not excluded and not num_free_slots:
        excluded = f"all its {model.num_slots} slots are taken"
    num_running = min(num_requests, model.max_running_requests)
    mean_context, observed = debit.mean_context_tokens, member.load.step_seconds
    running_step = (observed or model.steps.row(num_running).at(mean_context)) if num_running else 0.0
    # Where nothing ran lately the model's own step stands in for the observed one.
    decode_scale = weights.decode if observed else weights.decode + weights.observed_step
    return AgentView(
        agent_id=member.agent_id,
        max_context_tokens=model.max_context_tokens,
        num_free_slots=num_free_slots,
        num_slots=model.num_slots,
        num_running=num_running,
        mean_context_tokens=mean_context,
        queue_seconds=_bounded(weights.queue) * backlog_seconds + weights.step * running_step,
        max_running_requests=model.max_running_requests,
        steps=model.steps,
        row=model.steps.row(min(num_running + 1, model.max_running_requests)),
        plan=plan_of(member, model),
        excluded_because=excluded,
        state=_LABELS[state],
        prefill_scale=_bounded(weights.prefill),
        decode_scale=_bounded(decode_scale),
        decode_offset=weights.observed_step * observed,
        backlog_seconds=backlog_seconds,
        running_step_seconds=running_step,
        observed_step_seconds=observed,
        made_at=now,
    )


def _bounded(weight: float) -> float:
    """No agent is ever thought to need no time, whatever it made the controller learn."""
    return weight if weight > _MIN_WEIGHT else _MIN_WEIGHT
