from dragoman.v1 import admission_service_pb2 as _admission_service_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SignedTicket(_message.Message):
    __slots__ = ("claims", "mac")
    CLAIMS_FIELD_NUMBER: _ClassVar[int]
    MAC_FIELD_NUMBER: _ClassVar[int]
    claims: bytes
    mac: bytes
    def __init__(self, claims: _Optional[bytes] = ..., mac: _Optional[bytes] = ...) -> None: ...

class TicketClaims(_message.Message):
    __slots__ = ("version", "key_id", "jti", "agent_id", "epoch", "tenant", "model_digest", "prompt_digest", "max_prompt_tokens", "max_output_tokens", "priority", "deadline_budget_ms", "resume", "not_after_ms", "max_choices")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    JTI_FIELD_NUMBER: _ClassVar[int]
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PROMPT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    MAX_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_BUDGET_MS_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    NOT_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_CHOICES_FIELD_NUMBER: _ClassVar[int]
    version: int
    key_id: int
    jti: bytes
    agent_id: str
    epoch: int
    tenant: str
    model_digest: bytes
    prompt_digest: bytes
    max_prompt_tokens: int
    max_output_tokens: int
    priority: _admission_service_pb2.Priority
    deadline_budget_ms: int
    resume: ResumeClaim
    not_after_ms: int
    max_choices: int
    def __init__(self, version: _Optional[int] = ..., key_id: _Optional[int] = ..., jti: _Optional[bytes] = ..., agent_id: _Optional[str] = ..., epoch: _Optional[int] = ..., tenant: _Optional[str] = ..., model_digest: _Optional[bytes] = ..., prompt_digest: _Optional[bytes] = ..., max_prompt_tokens: _Optional[int] = ..., max_output_tokens: _Optional[int] = ..., priority: _Optional[_Union[_admission_service_pb2.Priority, str]] = ..., deadline_budget_ms: _Optional[int] = ..., resume: _Optional[_Union[ResumeClaim, _Mapping]] = ..., not_after_ms: _Optional[int] = ..., max_choices: _Optional[int] = ...) -> None: ...

class ResumeClaim(_message.Message):
    __slots__ = ("origin_epoch", "attempt", "from_cursor")
    ORIGIN_EPOCH_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    FROM_CURSOR_FIELD_NUMBER: _ClassVar[int]
    origin_epoch: int
    attempt: int
    from_cursor: int
    def __init__(self, origin_epoch: _Optional[int] = ..., attempt: _Optional[int] = ..., from_cursor: _Optional[int] = ...) -> None: ...
