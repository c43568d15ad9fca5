"""Prefetch hints: from clients, and from requests that wait while their prefix lies on another agent or in a lower tier."""

from __future__ import annotations

import hmac
import secrets
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from dragoman.limits import TICKET_JTI_BYTES, TICKET_MODEL_DIGEST_BYTES, TICKET_VERSION
from dragoman.prefix_hash import UNIT_TOKENS, transfer_digest
from dragoman.v1 import ticket_pb2
from dragoman_controller.agent_view import AgentView
from dragoman_controller.commands import Command, Prefetch
from dragoman_controller.fleet import AgentState, Fleet, Member, ModelSpec
from dragoman_controller.ledger import Grant, Ledger
from dragoman_controller.placer import Placer
from dragoman_controller.prefetch import PrefetchAgent, plan_prefetch
from dragoman_controller.prefix_index import PrefixIndex
from dragoman_controller.requests import AdmissionRequest
from dragoman_controller.tickets import USABLE_SECONDS, TicketMinter

# The same prefix is not looked at again for a request of the queue, nor sent to the same agent, sooner than this.
QUEUE_HINT_SECONDS = 0.5
REPEAT_SECONDS = 5.0
MAX_NUM_REMEMBERED = 4096


@dataclass(frozen=True, slots=True)
class Parts:
    """What hints are made from and sent with."""

    fleet: Fleet
    placer: Placer
    ledger: Ledger
    index: PrefixIndex
    minter: TicketMinter
    send: Callable[[Member, Command], str]
    remaining_seconds: Callable[[Grant], float]
    count: Callable[[str], None]
    clock: Callable[[], float]


class Hints:
    """Owner of which prefixes were hinted at lately. `for_queue` False leaves waiting requests to themselves."""

    def __init__(self, parts: Parts) -> None:
        self.for_queue = True
        self._parts = parts
        # When what was done: (agent id, last unit) sent, ("", last unit) looked at for the queue.
        self._done: OrderedDict[tuple[str, int], float] = OrderedDict()

    def queued(self, request: AdmissionRequest) -> None:
        """A request waits: bring its prefix to the agent that will have room first, where that pays."""
        if (
            not self.for_queue
            or not request.block_hashes
            or self._is_recent(("", request.block_hashes[-1]), QUEUE_HINT_SECONDS)
        ):
            return
        self._remember(("", request.block_hashes[-1]))
        self._hint(request.model, tuple(request.block_hashes), for_queue=True)

    def hint(self, model: str, block_hashes: tuple[int, ...]) -> str:
        """Passes a client's hint to an agent; returns why not, or empty when some agent was told."""
        refused = self._hint(model, block_hashes, for_queue=False)
        self._parts.count("not_accepted" if refused else "accepted")
        return refused

    def _hint(self, model: str, block_hashes: tuple[int, ...], *, for_queue: bool) -> str:
        parts = self._parts
        held = parts.index.lookup(block_hashes)
        below = parts.index.lookup_all_tiers(block_hashes)
        plan = plan_prefetch(self._agents(model), len(block_hashes), held, below, for_queue=for_queue)
        if plan.refused_because:
            return plan.refused_because
        units = block_hashes[: plan.num_units]
        taker, source = parts.fleet.get(plan.agent_id), parts.fleet.get(plan.source_agent_id)
        assert taker is not None, "a plan names members"
        if self._is_recent((taker.agent_id, units[-1]), REPEAT_SECONDS):
            return f"agent {taker.agent_id!r} was told so less than {REPEAT_SECONDS:.0f} s ago"
        self._remember((taker.agent_id, units[-1]))
        ticket = b""
        if source is not None:
            ticket = transfer_ticket(parts.minter, source, _model_of(source, model), units, parts.clock())
        command = Prefetch(model, units, plan.source_address, plan.source_agent_id, ticket, plan.limit_seconds)
        parts.send(taker, command)
        return ""

    def _agents(self, model: str) -> list[PrefetchAgent]:
        candidates = self._parts.placer.candidates(model)
        agents = []
        for view in candidates.views if candidates else ():
            member = self._parts.fleet.get(view.agent_id)
            if member is not None and member.state is AgentState.SERVING:
                spec, load = _model_of(member, model), member.load
                agents.append(
                    PrefetchAgent(
                        member.agent_id,
                        member.spec.data_address,
                        self._free_in_seconds(member, view),
                        spec.steps,
                        spec.kv,
                        load.kv_fetch_bytes_per_second,
                        load.kv_fetch_base_seconds,
                    )
                )
        return agents

    def _free_in_seconds(self, member: Member, view: AgentView) -> float:
        """Predicted time until the agent takes another request: until the first of those that fill it ends."""
        if view.num_free_slots:
            return view.queue_seconds
        grants = self._parts.ledger.open_grants(member.agent_id, member.epoch)
        return min(map(self._parts.remaining_seconds, grants), default=view.queue_seconds)

    def _is_recent(self, key: tuple[str, int], seconds: float) -> bool:
        return self._parts.clock() - self._done.get(key, float("-inf")) < seconds

    def _remember(self, key: tuple[str, int]) -> None:
        self._done[key] = self._parts.clock()
        self._done.move_to_end(key)
        if len(self._done) > MAX_NUM_REMEMBERED:
            self._done.popitem(last=False)


def transfer_ticket(
    minter: TicketMinter, source: Member, model: ModelSpec, units: tuple[int, ...], now: float
) -> bytes:
    """Token that lets its bearer fetch the blocks of these units from `source`, once, and nothing else."""
    keys = minter.agent_keys(source.agent_id, source.epoch)
    key_id, key = next((entry for entry in keys if entry[0] in source.confirmed_key_ids), keys[0])
    claims = ticket_pb2.TicketClaims(
        version=TICKET_VERSION,
        key_id=key_id,
        jti=secrets.token_bytes(TICKET_JTI_BYTES),
        agent_id=source.agent_id,
        epoch=source.epoch,
        model_digest=model.digest[:TICKET_MODEL_DIGEST_BYTES],
        prompt_digest=transfer_digest(units),
        max_prompt_tokens=len(units) * UNIT_TOKENS,
        max_output_tokens=1,
        max_choices=1,
        not_after_ms=source.agent_clock_ms(now) + int(USABLE_SECONDS * 1000),
    ).SerializeToString()
    return ticket_pb2.SignedTicket(claims=claims, mac=hmac.digest(key, claims, "sha256")).SerializeToString()


def _model_of(member: Member, name: str) -> ModelSpec:
    return next(model for model in member.spec.models if model.name == name)
