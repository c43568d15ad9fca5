"""FleetService."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from dragoman.durations import duration_of, seconds_of
from dragoman.errors import DragomanError
from dragoman.serving import Context
from dragoman.v1 import agent_pb2, error_pb2
from dragoman.v1 import fleet_service_pb2 as pb
from dragoman.v1 import fleet_service_pb2_grpc as pb_grpc
from dragoman_controller.cell import Cell
from dragoman_controller.commands import Drain
from dragoman_controller.explain import reason, weigh
from dragoman_controller.fleet import AgentState, Member
from dragoman_controller.rpc.convert import controller_messages, fill_quote, invalid, load_message
from dragoman_controller.shared import Shared

DEFAULT_GRACE_SECONDS = 180.0
_PROGRESS_SECONDS = 0.5
_UNDRAIN_SECONDS, _UNDRAIN_POLL_SECONDS = 3.0, 0.05


class FleetServicer(pb_grpc.FleetServiceServicer):
    """Answers operators, the command line and gateways."""

    def __init__(self, cell: Cell, shared: Shared) -> None:
        self._cell = cell
        self._shared = shared

    async def ListAgents(self, request: pb.ListAgentsRequest, context: Context) -> pb.ListAgentsResponse:
        """Every member, by id."""
        members = sorted(self._cell.fleet, key=lambda member: member.agent_id)
        return pb.ListAgentsResponse(members=[self._message(member) for member in members])

    async def WatchFleet(self, request: pb.WatchFleetRequest, context: Context) -> AsyncIterator[pb.WatchFleetResponse]:
        """Every member at once, maybe none, then members that are new, changed their state or life, or left."""
        changed = asyncio.Event()
        unwatch = self._cell.watch(changed.set)
        known: dict[str, tuple[int, AgentState, bytes]] = {}
        is_first = True
        try:
            while True:
                present = {member.agent_id: _identity(member) for member in self._cell.fleet}
                fresh = [
                    self._cell.fleet.get(agent_id) for agent_id, seen in present.items() if known.get(agent_id) != seen
                ]
                gone = [agent_id for agent_id in known if agent_id not in present]
                if fresh or gone or is_first:
                    yield pb.WatchFleetResponse(
                        changed=[self._message(member) for member in fresh if member is not None],
                        removed_agent_ids=gone,
                    )
                known, is_first = present, False
                await changed.wait()
                changed.clear()
        finally:
            unwatch()

    async def DrainAgent(self, request: pb.DrainAgentRequest, context: Context) -> AsyncIterator[pb.DrainAgentResponse]:
        """Orders the drain, then tells what remains until the agent is empty or gone. Leaving does not undo it."""
        grace = seconds_of(request.grace_period) if request.HasField("grace_period") else DEFAULT_GRACE_SECONDS
        if grace < 0:
            raise invalid("grace_period", f"grace_period is {grace:g} s, must not be negative")
        member = self._cell.member(request.agent_id)
        self._cell.drain(member, Drain(grace))
        while True:
            present = self._cell.fleet.get(member.agent_id)
            is_gone = present is None or present.epoch != member.epoch
            is_empty = member.reported is AgentState.DRAINING and not member.load.num_requests
            if is_gone or is_empty:
                yield pb.DrainAgentResponse(drained=True)
                return
            if member.drain_refused_because:
                raise DragomanError(
                    error_pb2.ERROR_REASON_UNIMPLEMENTED,
                    f"agent {member.agent_id!r} refused to drain and serves on: {member.drain_refused_because}",
                    metadata={"param": "agent_id"},
                )
            if not member.draining:
                raise DragomanError(
                    error_pb2.ERROR_REASON_CANCELLED, f"the drain of agent {member.agent_id!r} was taken back"
                )
            yield pb.DrainAgentResponse(streams=self._remaining(member))
            await asyncio.sleep(_PROGRESS_SECONDS)

    async def UndrainAgent(self, request: pb.UndrainAgentRequest, context: Context) -> pb.UndrainAgentResponse:
        """Returns once the agent has said that it takes requests again. One that does not drain is asked in vain."""
        member = self._cell.member(request.agent_id)
        member.undrain_refused_because = ""
        self._cell.undrain(member)
        was_told = False
        for _ in range(round(_UNDRAIN_SECONDS / _UNDRAIN_POLL_SECONDS)):
            if member.undrain_refused_because:
                raise DragomanError(
                    error_pb2.ERROR_REASON_AGENT_DRAINING,
                    f"agent {member.agent_id!r} drains on: {member.undrain_refused_because}; start it again instead",
                    metadata={"param": "agent_id"},
                )
            was_told = not member.draining and member.reported is not AgentState.DRAINING
            if was_told or self._cell.fleet.get(member.agent_id) is not member:
                break
            await asyncio.sleep(_UNDRAIN_POLL_SECONDS)
        if not was_told:
            raise DragomanError(
                error_pb2.ERROR_REASON_AGENT_LOST,
                f"agent {member.agent_id!r} left, or did not answer within {_UNDRAIN_SECONDS:g} s: look at 'dragoman ps'",
                metadata={"param": "agent_id"},
            )
        return pb.UndrainAgentResponse()

    async def ListControllers(self, request: pb.ListControllersRequest, context: Context) -> pb.ListControllersResponse:
        """The controllers of the cell, by id."""
        return pb.ListControllersResponse(
            controllers=controller_messages(self._cell.controllers), frozen=self._shared.is_frozen
        )

    async def ExplainPlacement(
        self, request: pb.ExplainPlacementRequest, context: Context
    ) -> pb.ExplainPlacementResponse:
        """How a recent request was placed."""
        record = self._cell.placements.find(request.request_id)
        if record is None:
            raise DragomanError(
                error_pb2.ERROR_REASON_INVALID_REQUEST,
                f"no placement of request {request.request_id!r} is remembered: only the latest are, ask sooner",
                metadata={"param": "request_id"},
            )
        weighed = weigh(record)
        most_cached = max((one.score.cached_tokens for one in weighed), default=0)
        candidates = [
            pb.PlacementCandidate(
                agent_id=one.agent_id,
                queue_seconds=one.score.queue_seconds,
                prefill_seconds=one.score.prefill_seconds,
                decode_seconds=one.score.decode_seconds,
                cached_tokens=one.score.cached_tokens,
                excluded_because=one.excluded_because,
                fetch_seconds=self._fetch_seconds(one.agent_id, record.model, most_cached - one.score.cached_tokens),
            )
            for one in weighed
        ]
        response = pb.ExplainPlacementResponse(
            request_id=record.request_id,
            candidates=candidates,
            chosen_agent_id=record.chosen_agent_id,
            reason=reason(record),
            queue_time=duration_of(record.queue_seconds),
            model=record.model,
            prompt_tokens=record.shape.prompt_tokens,
            output_tokens=record.shape.output_tokens,
        )
        fill_quote(response.quote, record.quote)
        return response

    def _fetch_seconds(self, agent_id: str, model: str, num_tokens: int) -> float | None:
        """What the agent would take to fetch so many tokens of a prefix, by what it measured of late."""
        member = self._cell.fleet.get(agent_id)
        spec = next((one for one in member.spec.models if one.name == model), None) if member is not None else None
        if member is None or spec is None or spec.kv is None or num_tokens <= 0:
            return None
        rate = member.load.kv_fetch_bytes_per_second
        if rate <= 0:
            return None
        return member.load.kv_fetch_base_seconds + num_tokens * spec.kv.bytes_per_token / rate

    def _message(self, member: Member) -> pb.FleetMember:
        now = self._cell.clock()
        return pb.FleetMember(
            agent=agent_pb2.Agent.FromString(member.spec.description),
            epoch=member.epoch,
            state=int(member.state),  # type: ignore[arg-type]
            load=load_message(member, now),
            heartbeat_age=duration_of(now - member.heard_at),
            granted_requests=self._cell.ledger.num_open(member.agent_id, member.epoch),
        )

    def _remaining(self, member: Member) -> list[pb.RemainingStream]:
        return [
            pb.RemainingStream(
                request_id=grant.key[1] or grant.jti.hex(),
                predicted_remaining=duration_of(self._cell.remaining_seconds(grant)),
            )
            for grant in self._cell.ledger.open_grants(member.agent_id, member.epoch)
        ]


def _identity(member: Member) -> tuple[int, AgentState, bytes]:
    return member.epoch, member.state, member.spec.description
