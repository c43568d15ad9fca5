"""PolicyService."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from dragoman.serving import Context
from dragoman.v1 import policy_service_pb2 as pb
from dragoman.v1 import policy_service_pb2_grpc as pb_grpc
from dragoman_controller.cell import Cell
from dragoman_controller.policy_codec import policy_message, policy_of
from dragoman_controller.shared import Shared


class PolicyServicer(pb_grpc.PolicyServiceServicer):
    """Answers operators."""

    def __init__(self, cell: Cell, shared: Shared) -> None:
        self._cell = cell
        self._shared = shared

    async def GetPolicy(self, request: pb.GetPolicyRequest, context: Context) -> pb.GetPolicyResponse:
        """The policy in force."""
        return pb.GetPolicyResponse(policy=policy_message(self._cell.policy.current))

    async def UpdatePolicy(self, request: pb.UpdatePolicyRequest, context: Context) -> pb.UpdatePolicyResponse:
        """Replaces the policy, if the revision still matches, for every controller of the cell."""
        updated = await self._shared.update_policy(policy_of(request.policy))
        return pb.UpdatePolicyResponse(policy=policy_message(updated))

    async def WatchPolicy(
        self, request: pb.WatchPolicyRequest, context: Context
    ) -> AsyncIterator[pb.WatchPolicyResponse]:
        """The policy in force, then every later one; of several in one instant only the last."""
        changed = asyncio.Event()
        unwatch = self._cell.watch(changed.set)
        sent = -1
        try:
            while True:
                policy = self._cell.policy.current
                if policy.revision != sent:
                    yield pb.WatchPolicyResponse(policy=policy_message(policy))
                    sent = policy.revision
                await changed.wait()
                changed.clear()
        finally:
            unwatch()
