"""Grants: places a request, mints its tickets, quotes it and debits the agent. Owns the views of every model."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from random import Random
from types import MappingProxyType
from typing import TypeAlias

from dragoman.prefix_hash import UNIT_TOKENS
from dragoman_controller.agent_view import Score, Shape
from dragoman_controller.candidates import Candidates
from dragoman_controller.explain import PlacementRecord, Placements
from dragoman_controller.fleet import AgentState, Fleet, Member, ModelSpec
from dragoman_controller.granted import Destination, Granted, Ticket
from dragoman_controller.ledger import Grant, Ledger
from dragoman_controller.native.library import Library
from dragoman_controller.placement import Choose, Placement, place
from dragoman_controller.prefix_index import PrefixIndex
from dragoman_controller.quote import Judgement, Quote, Quotes, Went
from dragoman_controller.requests import AdmissionRequest, Resume, shape_of
from dragoman_controller.served import Expected, Served, claims_of, expect, quote_of
from dragoman_controller.tickets import USABLE_SECONDS, Bearer, RequestPart, TicketMinter
from dragoman_controller.tuples import new
from dragoman_controller.views import PromptSizes, ServiceTimes, plan_of, view_of

_OTHER_PLAN = "a stream goes on where plan and architecture are those it began with"
_MAX_KNOWN_MODELS = 1024
_MAX_KNOWN_PLANS = 4096
_RATE_SECONDS = 0.5
# No request takes so long; an agent that says so is not believed.
_MAX_TOTAL_SECONDS = 1e6
_USABLE_MS = int(USABLE_SECONDS * 1000)
_NOBODY: Mapping[str, str] = MappingProxyType({})
_NOTHING: Mapping[str, int] = MappingProxyType({})


_Placed: TypeAlias = tuple[Candidates, Shape, Mapping[str, int], Mapping[str, str], Placement]
"""A placement, and what it was decided from: cached tokens, and the excluded with the reason, by agent."""


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
        self._served: dict[tuple[str, str], Served] = {}
        self._served_by: dict[str, tuple[Served, ...]] = {}
        """Every model of an agent, by its id."""
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
        self._quotes.of(member.agent_id)  # a member is not forgotten for others
        self._refresh(member)

    def _refresh(self, member: Member) -> None:
        spec, load, now = member.spec, member.load, self._clock()
        all_served = self._served_by.get(spec.agent_id)
        if all_served is None or all_served[0].member is not member or all_served[0].spec is not spec:
            all_served = self._learn_models(member)
        pending_tokens, pending_seconds = load.pending_prefill_tokens, 0.0
        if pending_tokens:
            weight = all_served[0].quotes.weights.prefill
            pending_seconds = weight * all_served[0].model.steps.prefill_seconds(pending_tokens)
        sampled_at = member.heard_at - load.age_seconds
        debit = self._ledger.debit(spec.agent_id, member.epoch, load, sampled_at, pending_seconds)
        for served in all_served:
            served.candidates.put(
                view_of(member, served.model, debit, self.service_times, served.quotes, now, served.plan)
            )

    def remove(self, member: Member) -> None:
        """Drops the views of a member that left, or whose models changed."""
        self._served_by.pop(member.agent_id, None)
        for name, candidates in self._models.items():
            candidates.remove(member.agent_id)
            self._served.pop((member.agent_id, name), None)
        self._minter.forget(member.agent_id, member.epoch)

    def quote(self, request: AdmissionRequest) -> tuple[Quote, str] | None:
        """The quote and the agent, were the request granted now; None when no agent has room."""
        placed = self._place(request)
        if placed is None:
            return None
        candidates, shape, _, _, placement = placed
        view = candidates.views[placement.chosen]
        served = self._served[view.agent_id, request.model]
        expected = expect(placement.score, shape, served, view, self._clock())
        return quote_of(request, shape, placement.score, expected, served), view.agent_id

    def grant(self, request: AdmissionRequest, queue_seconds: float) -> Granted | None:
        """Places the request, mints and debits; None when no agent can take it now."""
        placed = self._place(request)
        if placed is None:
            return None
        now = self._clock()
        model, (candidates, shape, cached_tokens, excluded, placement) = request.model, placed
        index, score, fallback_index, num_ties = placement
        chosen = candidates.views[index]
        served = self._served[chosen.agent_id, model]
        expected = expect(score, shape, served, chosen, now)
        quote = quote_of(request, shape, score, expected, served)
        part = RequestPart(claims_of, request, served.model)
        ticket = self._ticket(request, served, part, score.cached_tokens, now)
        fallback = None
        if fallback_index is not None:
            other_id = candidates.views[fallback_index].agent_id
            cached = min(cached_tokens.get(other_id, 0), shape.prompt_tokens - 1) if cached_tokens else 0
            other = self._served[other_id, model]
            if other.model.max_context_tokens != served.model.max_context_tokens:
                part = RequestPart(claims_of, request, other.model)
            fallback = self._ticket(request, other, part, cached, now)
        snapshot = candidates.snapshot()
        usable_until = now + USABLE_SECONDS
        self._debit(request, shape, score, expected, quote, served, ticket, fallback, now, usable_until)
        self._placements.add(
            new(
                PlacementRecord,
                (
                    request.request_id,
                    model,
                    shape,
                    snapshot,
                    cached_tokens,
                    excluded,
                    chosen.agent_id,
                    num_ties,
                    queue_seconds,
                    quote,
                ),
            )
        )
        self._refresh(served.member)
        return new(Granted, (ticket, fallback, quote, usable_until))

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
        predicted = grant.ttft_seconds, grant.tpot_seconds, finish
        judgements = quotes.judge(predicted, outcome, grant.lengths, grant.promised)
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

    def _learn_models(self, member: Member) -> tuple[Served, ...]:
        """Takes up what a member serves, which it has told for the first time or anew."""
        spec, quotes = member.spec, self._quotes.of(member.agent_id)
        destination = Destination(spec.agent_id, member.epoch, spec.data_address)
        all_served = tuple(
            Served(
                member,
                spec,
                model,
                self._candidates_of(model.name),
                Bearer(spec.agent_id, member.epoch, model.digest),
                quotes,
                plan_of(member, model),
                destination,
            )
            for model in spec.models
        )
        self._served_by[spec.agent_id] = all_served
        for served in all_served:
            self._served[spec.agent_id, served.model.name] = served
        return all_served

    def _candidates_of(self, name: str) -> Candidates:
        candidates = self._models.get(name)
        if candidates is not None:
            return candidates
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
        held = self._index.lookup(request.block_hashes) if request.block_hashes else None
        cached = {agent_id: units * UNIT_TOKENS for agent_id, units in held.items()} if held else _NOTHING
        if request.block_hashes and self._index.has_lower_tiers:
            cached = self._with_lower_tiers(request, cached)
        shape = shape_of(request, self._prompt_sizes.tokens(request), candidates.largest_context)
        candidates.learn(shape)
        if request.resume is not None:
            other_plans = self._other_plans(request.resume, candidates)
            placement = self._choose(candidates, shape, cached, self._rng, other_plans) if other_plans else None
            if placement is not None:
                return candidates, shape, cached, other_plans, placement
        placement = self._choose(candidates, shape, cached, self._rng, ())
        return None if placement is None else (candidates, shape, cached, _NOBODY, placement)

    def _with_lower_tiers(self, request: AdmissionRequest, cached: Mapping[str, int]) -> Mapping[str, int]:
        """Tokens that an agent need not compute, with those below its device: they count less what bringing them up takes.

        In tokens that it could compute in that time, at its measured or planned rate; where that is not known they do not count.
        """
        found = dict(cached)
        for agent_id, units in self._index.lookup_all_tiers(request.block_hashes).items():
            below = units * UNIT_TOKENS - cached.get(agent_id, 0)
            member = self._fleet.get(agent_id)
            rate = member.load.kv_tier_bytes_per_second if member is not None else 0.0
            if below <= 0 or member is None or rate <= 0:
                continue
            spec = next((model for model in member.spec.models if model.name == request.model), None)
            if spec is None or spec.kv is None:
                continue
            computing = spec.steps.prefill_seconds(below)
            saved = 1.0 - below * spec.kv.bytes_per_token / rate / computing if computing > 0 else 0.0
            if saved > 0:
                found[agent_id] = cached.get(agent_id, 0) + int(below * saved)
        return found

    def _other_plans(self, resume: Resume, candidates: Candidates) -> dict[str, str]:
        """A resumed stream prefers an agent with the plan it began with: equal plans give equal tokens."""
        plan = self._plans.get((resume.origin_agent_id, resume.origin_epoch))
        if not plan:
            return {}
        return {view.agent_id: _OTHER_PLAN for view in candidates.views if view.plan != plan}

    def _ticket(
        self, request: AdmissionRequest, served: Served, part: RequestPart, cached_tokens: int, now: float
    ) -> Ticket:
        member = served.member
        not_after_ms = member.agent_clock_ms(now) + _USABLE_MS
        minted = self._minter.mint(served.bearer, part, request.tenant, not_after_ms, member.confirmed_key_ids)
        return new(Ticket, (minted, served.destination, USABLE_SECONDS, cached_tokens))

    def _debit(
        self,
        request: AdmissionRequest,
        shape: Shape,
        score: Score,
        expected: Expected,
        quote: Quote,
        served: Served,
        ticket: Ticket,
        fallback: Ticket | None,
        now: float,
        usable_until: float,
    ) -> None:
        num_choices, prompt_tokens = request.num_choices, shape.prompt_tokens
        ttft_seconds, tpot_seconds, features, prefill_seconds, shared_seconds, waits_for_slot = expected
        # By position, which takes half as long: there are many.
        self._ledger.add(
            Grant(
                ticket.minted.jti,
                request.key,
                request.tenant,
                request.model,
                served.destination.agent_id,
                served.destination.epoch,
                now,
                usable_until,
                num_choices if num_choices == 1 else min(num_choices, served.model.num_slots),
                prompt_tokens - score.cached_tokens,
                prompt_tokens,
                shape.output_tokens,
                ttft_seconds,
                tpot_seconds,
                fallback.minted.jti if fallback else None,
                request.prompt_bytes if request.prompt_tokens is None else 0,
                features,
                prefill_seconds,
                shared_seconds,
                prefill_seconds,
                waits_for_slot,
                quote.ratios,
            )
        )


def _model_of(member: Member, name: str) -> ModelSpec:
    return next(model for model in member.spec.models if model.name == name)
