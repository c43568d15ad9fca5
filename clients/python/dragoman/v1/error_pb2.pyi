import datetime

from google.protobuf import descriptor_pb2 as _descriptor_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ErrorReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ERROR_REASON_UNSPECIFIED: _ClassVar[ErrorReason]
    ERROR_REASON_QUEUE_FULL: _ClassVar[ErrorReason]
    ERROR_REASON_INVALID_REQUEST: _ClassVar[ErrorReason]
    ERROR_REASON_UNSUPPORTED_PARAMETER: _ClassVar[ErrorReason]
    ERROR_REASON_CONTEXT_EXCEEDED: _ClassVar[ErrorReason]
    ERROR_REASON_REQUEST_TOO_LARGE: _ClassVar[ErrorReason]
    ERROR_REASON_MODEL_NOT_SERVED: _ClassVar[ErrorReason]
    ERROR_REASON_NO_AGENT: _ClassVar[ErrorReason]
    ERROR_REASON_MODEL_LOADING: _ClassVar[ErrorReason]
    ERROR_REASON_AGENT_DRAINING: _ClassVar[ErrorReason]
    ERROR_REASON_AGENT_LOST: _ClassVar[ErrorReason]
    ERROR_REASON_DEVICE_FAULT: _ClassVar[ErrorReason]
    ERROR_REASON_DEVICE_MEMORY: _ClassVar[ErrorReason]
    ERROR_REASON_NON_FINITE_LOGITS: _ClassVar[ErrorReason]
    ERROR_REASON_DEADLINE_EXCEEDED: _ClassVar[ErrorReason]
    ERROR_REASON_CANCELLED: _ClassVar[ErrorReason]
    ERROR_REASON_CREDIT_TIMEOUT: _ClassVar[ErrorReason]
    ERROR_REASON_TICKET_REQUIRED: _ClassVar[ErrorReason]
    ERROR_REASON_TICKET_INVALID: _ClassVar[ErrorReason]
    ERROR_REASON_TICKET_EXPIRED: _ClassVar[ErrorReason]
    ERROR_REASON_TICKET_REPLAYED: _ClassVar[ErrorReason]
    ERROR_REASON_TICKET_WRONG_AGENT: _ClassVar[ErrorReason]
    ERROR_REASON_TICKET_MISMATCH: _ClassVar[ErrorReason]
    ERROR_REASON_DUPLICATE_REQUEST: _ClassVar[ErrorReason]
    ERROR_REASON_RESUME_REFUSED: _ClassVar[ErrorReason]
    ERROR_REASON_PROMPT_QUARANTINED: _ClassVar[ErrorReason]
    ERROR_REASON_DUPLICATE_AGENT: _ClassVar[ErrorReason]
    ERROR_REASON_LEASE_EXPIRED: _ClassVar[ErrorReason]
    ERROR_REASON_EPOCH_STALE: _ClassVar[ErrorReason]
    ERROR_REASON_POLICY_CONFLICT: _ClassVar[ErrorReason]
    ERROR_REASON_KV_LAYOUT_MISMATCH: _ClassVar[ErrorReason]
    ERROR_REASON_INVALID_API_KEY: _ClassVar[ErrorReason]
    ERROR_REASON_PERMISSION_DENIED: _ClassVar[ErrorReason]
    ERROR_REASON_UNIMPLEMENTED: _ClassVar[ErrorReason]
    ERROR_REASON_INTERNAL: _ClassVar[ErrorReason]
    ERROR_REASON_STATE_UNAVAILABLE: _ClassVar[ErrorReason]
ERROR_REASON_UNSPECIFIED: ErrorReason
ERROR_REASON_QUEUE_FULL: ErrorReason
ERROR_REASON_INVALID_REQUEST: ErrorReason
ERROR_REASON_UNSUPPORTED_PARAMETER: ErrorReason
ERROR_REASON_CONTEXT_EXCEEDED: ErrorReason
ERROR_REASON_REQUEST_TOO_LARGE: ErrorReason
ERROR_REASON_MODEL_NOT_SERVED: ErrorReason
ERROR_REASON_NO_AGENT: ErrorReason
ERROR_REASON_MODEL_LOADING: ErrorReason
ERROR_REASON_AGENT_DRAINING: ErrorReason
ERROR_REASON_AGENT_LOST: ErrorReason
ERROR_REASON_DEVICE_FAULT: ErrorReason
ERROR_REASON_DEVICE_MEMORY: ErrorReason
ERROR_REASON_NON_FINITE_LOGITS: ErrorReason
ERROR_REASON_DEADLINE_EXCEEDED: ErrorReason
ERROR_REASON_CANCELLED: ErrorReason
ERROR_REASON_CREDIT_TIMEOUT: ErrorReason
ERROR_REASON_TICKET_REQUIRED: ErrorReason
ERROR_REASON_TICKET_INVALID: ErrorReason
ERROR_REASON_TICKET_EXPIRED: ErrorReason
ERROR_REASON_TICKET_REPLAYED: ErrorReason
ERROR_REASON_TICKET_WRONG_AGENT: ErrorReason
ERROR_REASON_TICKET_MISMATCH: ErrorReason
ERROR_REASON_DUPLICATE_REQUEST: ErrorReason
ERROR_REASON_RESUME_REFUSED: ErrorReason
ERROR_REASON_PROMPT_QUARANTINED: ErrorReason
ERROR_REASON_DUPLICATE_AGENT: ErrorReason
ERROR_REASON_LEASE_EXPIRED: ErrorReason
ERROR_REASON_EPOCH_STALE: ErrorReason
ERROR_REASON_POLICY_CONFLICT: ErrorReason
ERROR_REASON_KV_LAYOUT_MISMATCH: ErrorReason
ERROR_REASON_INVALID_API_KEY: ErrorReason
ERROR_REASON_PERMISSION_DENIED: ErrorReason
ERROR_REASON_UNIMPLEMENTED: ErrorReason
ERROR_REASON_INTERNAL: ErrorReason
ERROR_REASON_STATE_UNAVAILABLE: ErrorReason
TRAITS_FIELD_NUMBER: _ClassVar[int]
traits: _descriptor.FieldDescriptor

class ErrorTraits(_message.Message):
    __slots__ = ("grpc_code", "http_status", "retryable", "openai_type", "openai_code", "remedy")
    GRPC_CODE_FIELD_NUMBER: _ClassVar[int]
    HTTP_STATUS_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    OPENAI_TYPE_FIELD_NUMBER: _ClassVar[int]
    OPENAI_CODE_FIELD_NUMBER: _ClassVar[int]
    REMEDY_FIELD_NUMBER: _ClassVar[int]
    grpc_code: int
    http_status: int
    retryable: bool
    openai_type: str
    openai_code: str
    remedy: str
    def __init__(self, grpc_code: _Optional[int] = ..., http_status: _Optional[int] = ..., retryable: _Optional[bool] = ..., openai_type: _Optional[str] = ..., openai_code: _Optional[str] = ..., remedy: _Optional[str] = ...) -> None: ...

class ErrorDetail(_message.Message):
    __slots__ = ("reason", "message", "retry_delay", "metadata")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_DELAY_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    reason: ErrorReason
    message: str
    retry_delay: _duration_pb2.Duration
    metadata: _containers.ScalarMap[str, str]
    def __init__(self, reason: _Optional[_Union[ErrorReason, str]] = ..., message: _Optional[str] = ..., retry_delay: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., metadata: _Optional[_Mapping[str, str]] = ...) -> None: ...
