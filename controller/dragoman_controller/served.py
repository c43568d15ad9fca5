"""One model of an agent, and what a request is expected to take there. Pure."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from dragoman_controller.agent_view import AgentView, Score, Shape
from dragoman_controller.candidates import Candidates
from dragoman_controller.fleet import AgentSpec, Member, ModelSpec
from dragoman_controller.granted import Destination
from dragoman_controller.intervals import lengths_of
from dragoman_controller.quote import AgentQuotes, Features, Quote
from dragoman_controller.requests import AdmissionRequest
from dragoman_controller.tickets import Bearer, Claims
from dragoman_controller.tuples import new


class Served(NamedTuple):
    """One model of a member, as its views and tickets need it."""

    member: Member
    spec: AgentSpec
    model: ModelSpec
    candidates: Candidates
    bearer: Bearer
    quotes: AgentQuotes
    plan: bytes
    destination: Destination


Expected: TypeAlias = tuple[float, float, Features, float, float, bool]
"""TTFT, TPOT, what they are made of, own prefill in a step of its own and in one of others, each in seconds as the weights of the
agent have it; and whether a slot is waited for."""


def expect(score: Score, shape: Shape, served: Served, view: AgentView, now: float) -> Expected:
    """What the request is expected to take at the chosen agent, and what that is made of."""
    # The view is as old as the agent's last beat or grant; the work in front has gone on since.
    elapsed = now - view.made_at if now > view.made_at else 0.0
    backlog_seconds, slot_seconds = view.backlog_seconds, view.slot_seconds
    decode = score.modelled_step_seconds
    steps, num_uncached = view.steps, shape.prompt_tokens - score.cached_tokens
    prefill = steps.prefill_seconds(num_uncached)
    features = new(
        Features,
        (
            backlog_seconds - elapsed if backlog_seconds > elapsed else 0.0,
            prefill,
            view.running_step_seconds,
            decode,
            view.observed_step_seconds or decode,
        ),
    )
    quotes = served.quotes
    ttft, tpot = quotes.expect(features)
    if slot_seconds > elapsed:
        ttft += slot_seconds - elapsed
    weight = quotes.weights.prefill
    shared = weight * num_uncached * steps.seconds_per_prompt_token
    return ttft, tpot, features, weight * prefill, shared, slot_seconds > 0.0


def quote_of(request: AdmissionRequest, shape: Shape, score: Score, expected: Expected, served: Served) -> Quote:
    """The quote of a request that is expected to take so long."""
    num_tokens = request.output_tokens(served.model.max_context_tokens)
    if request.resume is not None:
        num_tokens = max(num_tokens - request.resume.from_cursor // request.num_choices, 1)
    ttft, tpot = expected[:2]
    lengths = lengths_of(shape.prompt_tokens - score.cached_tokens, shape.output_tokens)
    return served.quotes.quote(ttft, tpot, ttft + (num_tokens - 1) * tpot, lengths)


def claims_of(request: AdmissionRequest, model: ModelSpec) -> Claims:
    """What the tickets of a request say of it."""
    resume = request.resume
    return Claims(
        request.prompt_digest,
        request.max_prompt_tokens(model.max_context_tokens),
        request.output_tokens(model.max_context_tokens),
        request.num_choices,
        request.priority,
        request.deadline_budget_ms,
        (resume.origin_epoch, resume.attempt, resume.from_cursor) if resume else None,
    )
