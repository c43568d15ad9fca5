"""Grants: places a request, mints its tickets, quotes it and debits the agent. Owns the views of every model."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from random import Random
from types import MappingProxyType
from typing import NamedTuple

from dragoman.prefix_hash import UNIT_TOKENS
from dragoman_controller.candidates import AgentView, Candidates, Score, Shape
from dragoman_controller.explain import PlacementRecord, Placements
from dragoman_controller.fleet import AgentState, Fleet, Member, ModelSpec
from dragoman_controller.ledger import Grant, Ledger
from dragoman_controller.native.library import Library
from dragoman_controller.placement import Choose, Placement, place
from dragoman_controller.prefix_index import PrefixIndex
from dragoman_controller.quote import AgentQuotes, Features, Judgement, Quote, Quotes, Went
from dragoman_controller.requests import AdmissionRequest, Resume, shape_of
from dragoman_controller.tickets import USABLE_SECONDS, Bearer, Claims, Minted, TicketMinter
from dragoman_controller.views import PromptSizes, ServiceTimes, plan_of, view_of

_OTHER_PLAN = "a stream goes on where plan and architecture are those it began with"
_MAX_KNOWN_MODELS = 1024
_MAX_KNOWN_PLANS = 4096
_RATE_SECONDS = 0.5
# No request takes so long; an agent that says so is not believed.
_MAX_TOTAL_SECONDS = 1e6
_USABLE_MS = int(USABLE_SECONDS * 1000)
_NOBODY: Mapping[str, str] = MappingProxyType({})


class Ticket(NamedTuple):
    """One ticket as handed to a client; `usable_seconds` from now."""

    minted: Minted
    data_address: str
    usable_seconds: float
    expected_cached_tokens: int
    agent_id: str
    epoch: int

    @property
    def token(self) -> bytes:
        """What the client shows the agent."""
        return self.minted.token

    @property
    def jti(self) -> bytes:
        """The id of the ticket."""
        return self.minted.jti


class Granted(NamedTuple):
    """Admission: the ticket, maybe a second one for another agent, and the promise."""

    ticket: Ticket
    fallback: Ticket | None
    quote: Quote
    usable_until: float

    def aged(self, now: float) -> Granted:
        """The same grant given out again later."""
        left = max(self.usable_until - now, 0.0)
        fallback = self.fallback._replace(usable_seconds=left) if self.fallback else None
        return self._replace(ticket=self.ticket._replace(usable_seconds=left), fallback=fallback)


class _Served(NamedTuple):
    """One model of a member, as its tickets need it."""

    member: Member
    model: ModelSpec
    bearer: Bearer
    quotes: AgentQuotes


class _Expected(NamedTuple):
    """Seconds as the weights of the agent have it."""

    ttft_seconds: float
    tpot_seconds: float
    features: Features
    prefill_seconds: float
    waits_for_slot: bool


class _Placed(NamedTuple):
    """A placement with what it was decided from."""

    model: str
    candidates: Candidates
    shape: Shape
    cached_tokens: Mapping[str, int]
    excluded: Mapping[str, str]
    placement: Placement


class Placer:
    """Effects of placement on ledger, tickets and records; the choice itself is `placement.place`."""

    def __init__(
        self,
        fleet: Fleet,
        ledger: Ledger,
        index: PrefixIndex,
        quotes: Quotes,
        minter: TicketMinter,
        placements: Placements,
        clock: Callable[[], float],
        rng: Random,
        choose: Choose = place,
        library: Library | None = None,
    ) -> None:
        self._choose, self._library = choose, library
        self._fleet, self._ledger, self._index, self._quotes = fleet, ledger, index, quotes
        self._minter, self._placements, self._clock, self._rng = minter, placements, clock, rng
        self.service_times = ServiceTimes()
        self._models: dict[str, Candidates] = {}
        self._prompt_sizes = PromptSizes()
        self._served: dict[tuple[str, str], _Served] = {}
        # Read for each request that waits or is turned away: a flood of them must not cost a look at every agent.
        self._rates: dict[str, tuple[float, float]] = {}
        # Outlives the agent: its streams are resumed when it is gone.
        self._plans: OrderedDict[tuple[str, int], bytes] = OrderedDict()

    def candidates(self, model: str) -> Candidates | None:
        """The agents of a model, maybe none any more; None when the model was never served."""
        return self._models.get(model)

    def model_names(self) -> list[str]:
        """Models that are or were served."""
        return sorted(self._models)

    def has_room(self, model: str) -> bool:
        """Whether some agent of the model may be given a request now."""
        candidates = self._models.get(model)
        return candidates is not None and candidates.num_able > 0

    def completions_per_second(self, model: str) -> float:
        """Requests of mean length that the live agents of the model end in a second when they are full."""
        now = self._clock()
        made_at, rate = self._rates.get(model, (-math.inf, 0.0))
        if now - made_at >= _RATE_SECONDS:
            rate = self._completions_per_second(model)
            self._rates[model] = now, rate
        return rate

    def _completions_per_second(self, model: str) -> float:
        candidates = self._models.get(model)
        rate = 0.0
        for view in candidates.views if candidates else ():
            member = self._fleet.get(view.agent_id)
            if member is not None and member.state is AgentState.SERVING:
                spec = _model_of(member, model)
                seconds = self.service_times.mean(view.agent_id, spec)
                rate += spec.max_running_requests / seconds if seconds > 0 else 0.0
        return rate

    def num_running(self, tenant: str) -> int:
        """Open grants of a tenant."""
        return self._ledger.num_running(tenant)

    def uncached_tokens(self, request: AdmissionRequest) -> int:
        """Prompt tokens to be computed at the agent that holds most of the prefix."""
        held = self._index.lookup(request.block_hashes)
        return max(self._prompt_sizes.tokens(request) - max(held.values(), default=0) * UNIT_TOKENS, 1)

    def remember_plan(self, member: Member) -> None:
        """Notes by which plan and architecture the streams of this life were begun."""
        self._plans[member.agent_id, member.epoch] = plan_of(member, member.spec.models[0])
        if len(self._plans) > _MAX_KNOWN_PLANS:
            self._plans.popitem(last=False)

    def refresh(self, member: Member) -> None:
        """Makes the views of a member anew, from its present load and grants."""
        load, now = member.load, self._clock()
        sampled_at = member.heard_at - load.age_seconds
        weight = self._quotes.of(member.agent_id).weights.prefill
        pending_seconds = weight * member.spec.models[0].steps.prefill_seconds(load.pending_prefill_tokens)
        debit = self._ledger.debit(member.agent_id, member.epoch, load, sampled_at, pending_seconds)
        for model in member.spec.models:
            candidates = self._models.get(model.name)
            if candidates is None:
                candidates = self._learn_model(model.name)
            served = self._served.get((member.agent_id, model.name))
            if served is None or served.member is not member or served.model is not model:
                bearer = Bearer(member.agent_id, member.epoch, model.digest)
                served = _Served(member, model, bearer, self._quotes.of(member.agent_id))
                self._served[member.agent_id, model.name] = served
            candidates.put(view_of(member, model, debit, self.service_times, served.quotes, now))

    def remove(self, member: Member) -> None:
        """Drops the views of a member that left, or whose models changed."""
        for name, candidates in self._models.items():
            candidates.remove(member.agent_id)
            self._served.pop((member.agent_id, name), None)
        self._minter.forget(member.agent_id, member.epoch)

    def quote(self, request: AdmissionRequest) -> tuple[Quote, str] | None:
        """The quote and the agent, were the request granted now; None when no agent has room."""
        placed = self._place(request)
        if placed is None:
            return None
        view = placed.candidates.views[placed.placement.chosen]
        expected = self._expect(placed, view, self._clock())
        return self._quote(request, expected, view), view.agent_id

    def grant(self, request: AdmissionRequest, queue_seconds: float) -> Granted | None:
        """Places the request, mints and debits; None when no agent can take it now."""
        placed = self._place(request)
        if placed is None:
            return None
        now = self._clock()
        candidates, shape, placement = placed.candidates, placed.shape, placed.placement
        views = candidates.views
        chosen = views[placement.chosen]
        expected = self._expect(placed, chosen, now)
        quote = self._quote(request, expected, chosen)
        served = self._served[chosen.agent_id, request.model]
        claims = self._claims(request, served.model)
        part = self._minter.request_part(claims)
        ticket = self._ticket(request, served, part, placement.score.cached_tokens, now)
        fallback = None
        if placement.fallback is not None:
            other_id = views[placement.fallback].agent_id
            cached = min(placed.cached_tokens.get(other_id, 0), shape.prompt_tokens - 1)
            other = self._served[other_id, request.model]
            if other.model.max_context_tokens != served.model.max_context_tokens:
                part = self._minter.request_part(self._claims(request, other.model))
            fallback = self._ticket(request, other, part, cached, now)
        snapshot = candidates.snapshot()
        self._debit(request, shape, placement.score, expected, served, ticket, fallback, now)
        self._placements.add(
            PlacementRecord(
                request.request_id,
                request.model,
                shape,
                snapshot,
                placed.cached_tokens,
                placed.excluded,
                chosen.agent_id,
                placement.num_ties,
                queue_seconds,
                quote,
            )
        )
        self.refresh(served.member)
        return Granted(ticket, fallback, quote, now + USABLE_SECONDS)

    def learn(self, grant: Grant, outcome: Went, prompt_tokens: int = 0, cached_tokens: int = 0) -> list[Judgement]:
        """Takes how a request of the agent it was placed at went; tells how its quote did.

        `prompt_tokens` and of them `cached_tokens`: as the agent counted them, 0 where it did not say.
        """
        if not 0.0 <= outcome.ttft_seconds <= outcome.total_seconds <= _MAX_TOTAL_SECONDS:
            return []
        self._prompt_sizes.observe(grant.model, grant.prompt_bytes, prompt_tokens)
        self.service_times.observe(grant.agent_id, outcome.total_seconds)
        quotes = self._quotes.of(grant.agent_id)
        finish = grant.finish_seconds(outcome.output_tokens)
        judgements = quotes.judge((grant.ttft_seconds, grant.tpot_seconds, finish), outcome)
        # Where a slot was waited for, the times say little of the agent's speed.
        if not grant.waits_for_slot:
            features = grant.features
            served = self._served.get((grant.agent_id, grant.model))
            if prompt_tokens and served is not None:
                # Learnt from what was computed, which a text's length or a prefix that nobody told of may have changed.
                computed = max(prompt_tokens - cached_tokens, 1)
                features = features._replace(prefill=served.model.steps.prefill_seconds(computed))
            quotes.learn(features, outcome, self._clock())
        return judgements

    def release(self, granted: Granted) -> None:
        """Undoes a grant whose ticket is not used."""
        grant = self._ledger.end(granted.ticket.jti)
        if grant is not None:
            member = self._fleet.get(grant.agent_id)
            if member is not None and member.epoch == grant.epoch:
                self.refresh(member)

    def _learn_model(self, name: str) -> Candidates:
        if len(self._models) >= _MAX_KNOWN_MODELS:
            gone = next((known for known, candidates in self._models.items() if not candidates.views), None)
            if gone is not None:
                del self._models[gone]
                self._rates.pop(gone, None)
                self._prompt_sizes.forget(gone)
        candidates = self._models[name] = Candidates(self._library)
        return candidates

    def _place(self, request: AdmissionRequest) -> _Placed | None:
        candidates = self._models.get(request.model)
        if candidates is None:
            return None
        held = self._index.lookup(request.block_hashes) if request.block_hashes else {}
        cached = {agent_id: units * UNIT_TOKENS for agent_id, units in held.items()}
        shape = shape_of(request, self._prompt_sizes.tokens(request), candidates.largest_context)
        candidates.learn(shape)
        if request.resume is not None:
            other_plans = self._other_plans(request.resume, candidates)
            placement = self._choose(candidates, shape, cached, self._rng, other_plans) if other_plans else None
            if placement is not None:
                return _Placed(request.model, candidates, shape, cached, other_plans, placement)
        placement = self._choose(candidates, shape, cached, self._rng, ())
        return None if placement is None else _Placed(request.model, candidates, shape, cached, _NOBODY, placement)

    def _other_plans(self, resume: Resume, candidates: Candidates) -> dict[str, str]:
        """A resumed stream prefers an agent with the plan it began with: equal plans give equal tokens."""
        plan = self._plans.get((resume.origin_agent_id, resume.origin_epoch))
        if not plan:
            return {}
        return {view.agent_id: _OTHER_PLAN for view in candidates.views if view.plan != plan}

    def _expect(self, placed: _Placed, view: AgentView, now: float) -> _Expected:
        """What the request is expected to take at the chosen agent, and what that is made of."""
        score, shape = placed.placement.score, placed.shape
        # The view is as old as the agent's last beat or grant; the work in front has gone on since.
        elapsed = max(now - view.made_at, 0.0)
        decode = score.modelled_step_seconds
        quotes = self._served[view.agent_id, placed.model].quotes
        features = Features(
            max(view.backlog_seconds - elapsed, 0.0),
            view.steps.prefill_seconds(shape.prompt_tokens - score.cached_tokens),
            view.running_step_seconds,
            decode,
            view.observed_step_seconds or decode,
        )
        ttft, tpot = quotes.expect(features)
        ttft += max(view.slot_seconds - elapsed, 0.0)
        return _Expected(ttft, tpot, features, quotes.weights.prefill * features.prefill, view.slot_seconds > 0.0)

    def _quote(self, request: AdmissionRequest, expected: _Expected, view: AgentView) -> Quote:
        delivered = request.resume.from_cursor // request.num_choices if request.resume else 0
        num_tokens = max(request.output_tokens(view.max_context_tokens) - delivered, 1)
        finish = expected.ttft_seconds + (num_tokens - 1) * expected.tpot_seconds
        quotes = self._served[view.agent_id, request.model].quotes
        return quotes.quote(expected.ttft_seconds, expected.tpot_seconds, finish)

    def _claims(self, request: AdmissionRequest, model: ModelSpec) -> Claims:
        resume = request.resume
        return Claims(
            request.prompt_digest,
            request.max_prompt_tokens(model.max_context_tokens),
            request.output_tokens(model.max_context_tokens),
            request.priority,
            request.deadline_budget_ms,
            (resume.origin_epoch, resume.attempt, resume.from_cursor) if resume else None,
        )

    def _ticket(
        self, request: AdmissionRequest, served: _Served, part: bytes, cached_tokens: int, now: float
    ) -> Ticket:
        member = served.member
        not_after_ms = member.agent_clock_ms(now) + _USABLE_MS
        minted = self._minter.mint(served.bearer, part, request.tenant, not_after_ms, member.confirmed_key_ids)
        spec = member.spec
        return Ticket(minted, spec.data_address, USABLE_SECONDS, cached_tokens, spec.agent_id, member.epoch)

    def _debit(
        self,
        request: AdmissionRequest,
        shape: Shape,
        score: Score,
        expected: _Expected,
        served: _Served,
        ticket: Ticket,
        fallback: Ticket | None,
        now: float,
    ) -> None:
        self._ledger.add(
            Grant(
                jti=ticket.jti,
                key=request.key,
                tenant=request.tenant,
                model=request.model,
                agent_id=ticket.agent_id,
                epoch=ticket.epoch,
                granted_at=now,
                usable_until=now + USABLE_SECONDS,
                num_slots=min(request.num_choices, served.model.num_slots),
                uncached_tokens=shape.prompt_tokens - score.cached_tokens,
                prompt_tokens=shape.prompt_tokens,
                output_tokens=shape.output_tokens,
                ttft_seconds=expected.ttft_seconds,
                tpot_seconds=expected.tpot_seconds,
                prompt_bytes=request.prompt_bytes if request.prompt_tokens is None else 0,
                features=expected.features,
                prefill_seconds=expected.prefill_seconds,
                waits_for_slot=expected.waits_for_slot,
                fallback_jti=fallback.jti if fallback else None,
            )
        )


def _model_of(member: Member, name: str) -> ModelSpec:
    return next(model for model in member.spec.models if model.name == name)
