"""A policy as a message, and as the text under which it is kept."""

from __future__ import annotations

from collections import Counter

from google.protobuf import json_format

from dragoman.durations import duration_of, seconds_of
from dragoman.errors import DragomanError
from dragoman.v1 import error_pb2
from dragoman.v1 import policy_service_pb2 as pb
from dragoman_controller.policy import ClassTarget, Policy, TenantPolicy, check


def write_policy(policy: Policy) -> bytes:
    """JSON of its message, which a person can read in the store."""
    return json_format.MessageToJson(policy_message(policy)).encode()


def parse_policy(text: bytes) -> Policy:
    """The policy of such a text. Raises ValueError saying what is wrong with it."""
    try:
        policy = policy_of(json_format.Parse(text, pb.Policy()))
        check(policy)
    except (json_format.ParseError, UnicodeDecodeError) as error:
        raise ValueError(f"it is no policy: {error}") from None
    except DragomanError as error:
        raise ValueError(error.message) from None
    return policy


def policy_of(message: pb.Policy) -> Policy:
    """The policy of a message. Raises INVALID_REQUEST for a tenant without a name or listed twice."""
    names = [tenant.tenant for tenant in message.tenants]
    for name, count in Counter(names).items():
        if not name or count > 1:
            raise DragomanError(
                error_pb2.ERROR_REASON_INVALID_REQUEST,
                f"policy: tenant {name!r} is empty or listed twice; list each once by name",
                metadata={"param": "policy.tenants"},
            )
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


def policy_message(policy: Policy) -> pb.Policy:
    """The message of a policy."""
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
