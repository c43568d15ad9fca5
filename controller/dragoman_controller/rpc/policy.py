"""PolicyService."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from dragoman.durations import duration_of, seconds_of
from dragoman.serving import Context
from dragoman.v1 import policy_service_pb2 as pb
from dragoman.v1 import policy_service_pb2_grpc as pb_grpc
from dragoman_controller.cell import Cell
from dragoman_controller.policy import ClassTarget, Policy, TenantPolicy
from dragoman_controller.rpc.convert import invalid


class PolicyServicer(pb_grpc.PolicyServiceServicer):
    """Answers operators."""

    def __init__(self, cell: Cell) -> None:
        self._cell = cell

    async def GetPolicy(self, request: pb.GetPolicyRequest, context: Context) -> pb.GetPolicyResponse:
        """The policy in force."""
        return pb.GetPolicyResponse(policy=_message(self._cell.policy.current))

    async def UpdatePolicy(self, request: pb.UpdatePolicyRequest, context: Context) -> pb.UpdatePolicyResponse:
        """Replaces the policy, if the revision still matches."""
        return pb.UpdatePolicyResponse(policy=_message(self._cell.policy.update(_policy(request.policy))))

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
                    yield pb.WatchPolicyResponse(policy=_message(policy))
                    sent = policy.revision
                await changed.wait()
                changed.clear()
        finally:
            unwatch()


def _policy(message: pb.Policy) -> Policy:
    names = [tenant.tenant for tenant in message.tenants]
    for name in names:
        if not name or names.count(name) > 1:
            raise invalid("policy.tenants", f"policy: tenant {name!r} is empty or listed twice; list each once by name")
    return Policy(
        revision=message.revision,
        max_queued_requests=message.max_queued_requests,
        max_queue_wait_seconds=seconds_of(message.max_queue_wait),
        default_tenant=_tenant(message.default_tenant),
        tenants={tenant.tenant: _tenant(tenant) for tenant in message.tenants},
        targets={
            target.priority_class: ClassTarget(
                seconds_of(target.time_to_first_token), seconds_of(target.time_per_output_token)
            )
            for target in message.targets
        },
    )


def _tenant(message: pb.TenantPolicy) -> TenantPolicy:
    return TenantPolicy(message.max_queued_requests, message.max_running_requests, message.share or 1)


def _message(policy: Policy) -> pb.Policy:
    return pb.Policy(
        revision=policy.revision,
        max_queued_requests=policy.max_queued_requests,
        max_queue_wait=duration_of(policy.max_queue_wait_seconds),
        default_tenant=_tenant_message("", policy.default_tenant),
        tenants=[_tenant_message(name, tenant) for name, tenant in policy.tenants.items()],
        targets=[
            pb.ClassTarget(
                priority_class=name,
                time_to_first_token=duration_of(target.time_to_first_token_seconds),
                time_per_output_token=duration_of(target.time_per_output_token_seconds),
            )
            for name, target in policy.targets.items()
        ],
    )


def _tenant_message(name: str, tenant: TenantPolicy) -> pb.TenantPolicy:
    return pb.TenantPolicy(
        tenant=name,
        max_queued_requests=tenant.max_queued_requests,
        max_running_requests=tenant.max_running_requests,
        share=tenant.share,
    )
