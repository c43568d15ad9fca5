"""AgentRegistryService."""

from __future__ import annotations

from collections.abc import AsyncIterator

from dragoman.durations import duration_of
from dragoman.errors import DragomanError
from dragoman.serving import Context
from dragoman.v1 import agent_registry_service_pb2 as pb
from dragoman.v1 import agent_registry_service_pb2_grpc as pb_grpc
from dragoman.v1 import error_pb2
from dragoman_controller.cell import HEARTBEAT_INTERVAL_SECONDS, Cell, Controller
from dragoman_controller.fleet import Member
from dragoman_controller.rpc.convert import (
    agent_spec,
    agent_state,
    command_message,
    command_result,
    controller_messages,
    load_of,
    monotonic_ms,
    outcome_of,
)


class AgentRegistryServicer(pb_grpc.AgentRegistryServiceServicer):
    """Answers agents."""

    def __init__(self, cell: Cell, controller_id: str) -> None:
        self._cell = cell
        self._controller_id = controller_id

    async def RegisterAgent(self, request: pb.RegisterAgentRequest, context: Context) -> pb.RegisterAgentResponse:
        """Makes an agent a member and hands out its keys."""
        spec = agent_spec(request.agent)
        check_identity(context, spec.agent_id)
        member = self._cell.register(spec, request.epoch, monotonic_ms(request.agent_monotonic_ms))
        newest, *older = self._cell.minter.agent_keys(member.agent_id, member.epoch)
        return pb.RegisterAgentResponse(
            lease_id=member.lease_id,
            heartbeat_interval=duration_of(HEARTBEAT_INTERVAL_SECONDS),
            key_id=newest[0],
            ticket_key=newest[1],
            previous_keys=[pb.TicketKey(key_id=key_id, key=key) for key_id, key in older],
            controller_id=self._controller_id,
        )

    async def Heartbeat(
        self, request_iterator: AsyncIterator[pb.HeartbeatRequest], context: Context
    ) -> AsyncIterator[pb.HeartbeatResponse]:
        """Takes beats and answers each with what the agent should do."""
        member: Member | None = None
        stream = 0
        sent: set[str] = set()
        told: tuple[Controller, ...] = ()
        try:
            async for request in request_iterator:
                beating = self._cell.fleet.member_of(request.lease_id, request.epoch)
                if beating is not member:
                    check_identity(context, beating.agent_id)
                    member, stream, sent = beating, self._cell.connect(beating), set()
                self._cell.beat(
                    member,
                    agent_state(request.state),
                    load_of(request.load),
                    monotonic_ms(request.agent_monotonic_ms),
                    [outcome_of(outcome) for outcome in request.outcomes],
                    [command_result(result) for result in request.command_results],
                )
                commands = self._cell.outbox(member).unsent(sent)
                yield pb.HeartbeatResponse(
                    commands=[command_message(command_id, command) for command_id, command in commands],
                    policy_revision=self._cell.policy.current.revision,
                    controllers=controller_messages(self._cell.controllers) if told != self._cell.controllers else (),
                )
                told = self._cell.controllers
        finally:
            if member is not None:
                self._cell.disconnect(member, stream)

    async def PublishKvEvents(
        self, request_iterator: AsyncIterator[pb.PublishKvEventsRequest], context: Context
    ) -> AsyncIterator[pb.PublishKvEventsResponse]:
        """Keeps the prefix index; answers only when a snapshot is wanted."""
        begun: Member | None = None
        async for request in request_iterator:
            member = self._cell.fleet.member_of(request.lease_id, request.epoch)
            if member is not begun:
                check_identity(context, member.agent_id)
                self._cell.index.start_stream(member.agent_id, member.epoch)
                begun = member
            applied = self._cell.apply_kv_events(
                member, request.sequence, request.stored_block_hashes, request.removed_block_hashes, request.snapshot,
                stored_below=request.lower_stored_block_hashes, removed_below=request.lower_removed_block_hashes,
            )  # fmt: skip
            if applied.snapshot_wanted:
                yield pb.PublishKvEventsResponse(
                    snapshot_wanted=True, acknowledged_sequence=applied.acknowledged_sequence
                )

    async def DeregisterAgent(self, request: pb.DeregisterAgentRequest, context: Context) -> pb.DeregisterAgentResponse:
        """Ends a membership."""
        self._cell.deregister(request.lease_id, [outcome_of(outcome) for outcome in request.outcomes])
        return pb.DeregisterAgentResponse()


def check_identity(context: Context, agent_id: str) -> None:
    """Under mutual TLS an agent may speak only as what its certificate says, with whatever lease. Raises PERMISSION_DENIED."""
    identity = context.auth_context()
    names = identity.get("x509_subject_alternative_name", ())
    if identity.get("transport_security_type") == [b"ssl"] and agent_id.encode() not in names:
        shown = ", ".join(name.decode(errors="replace") for name in names) or "no name"
        raise DragomanError(
            error_pb2.ERROR_REASON_PERMISSION_DENIED,
            f"the certificate is for {shown}, not for agent {agent_id!r}: give the agent a certificate with its id "
            "as subject alternative name",
        )
