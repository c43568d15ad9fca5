import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Policy(_message.Message):
    __slots__ = ("revision", "max_queued_requests", "max_queue_wait", "tenants", "default_tenant", "targets")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUE_WAIT_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_TENANT_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    revision: int
    max_queued_requests: int
    max_queue_wait: _duration_pb2.Duration
    tenants: _containers.RepeatedCompositeFieldContainer[TenantPolicy]
    default_tenant: TenantPolicy
    targets: _containers.RepeatedCompositeFieldContainer[ClassTarget]
    def __init__(self, revision: _Optional[int] = ..., max_queued_requests: _Optional[int] = ..., max_queue_wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., tenants: _Optional[_Iterable[_Union[TenantPolicy, _Mapping]]] = ..., default_tenant: _Optional[_Union[TenantPolicy, _Mapping]] = ..., targets: _Optional[_Iterable[_Union[ClassTarget, _Mapping]]] = ...) -> None: ...

class TenantPolicy(_message.Message):
    __slots__ = ("tenant", "max_queued_requests", "max_running_requests", "share")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    max_queued_requests: int
    max_running_requests: int
    share: int
    def __init__(self, tenant: _Optional[str] = ..., max_queued_requests: _Optional[int] = ..., max_running_requests: _Optional[int] = ..., share: _Optional[int] = ...) -> None: ...

class ClassTarget(_message.Message):
    __slots__ = ("priority_class", "time_to_first_token", "time_per_output_token")
    PRIORITY_CLASS_FIELD_NUMBER: _ClassVar[int]
    TIME_TO_FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TIME_PER_OUTPUT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    priority_class: str
    time_to_first_token: _duration_pb2.Duration
    time_per_output_token: _duration_pb2.Duration
    def __init__(self, priority_class: _Optional[str] = ..., time_to_first_token: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., time_per_output_token: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class GetPolicyRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetPolicyResponse(_message.Message):
    __slots__ = ("policy",)
    POLICY_FIELD_NUMBER: _ClassVar[int]
    policy: Policy
    def __init__(self, policy: _Optional[_Union[Policy, _Mapping]] = ...) -> None: ...

class UpdatePolicyRequest(_message.Message):
    __slots__ = ("policy",)
    POLICY_FIELD_NUMBER: _ClassVar[int]
    policy: Policy
    def __init__(self, policy: _Optional[_Union[Policy, _Mapping]] = ...) -> None: ...

class UpdatePolicyResponse(_message.Message):
    __slots__ = ("policy",)
    POLICY_FIELD_NUMBER: _ClassVar[int]
    policy: Policy
    def __init__(self, policy: _Optional[_Union[Policy, _Mapping]] = ...) -> None: ...

class WatchPolicyRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchPolicyResponse(_message.Message):
    __slots__ = ("policy",)
    POLICY_FIELD_NUMBER: _ClassVar[int]
    policy: Policy
    def __init__(self, policy: _Optional[_Union[Policy, _Mapping]] = ...) -> None: ...
