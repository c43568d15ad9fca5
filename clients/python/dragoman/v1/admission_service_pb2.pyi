import datetime

from dragoman.v1 import error_pb2 as _error_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Priority(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PRIORITY_UNSPECIFIED: _ClassVar[Priority]
    PRIORITY_INTERACTIVE: _ClassVar[Priority]
    PRIORITY_STANDARD: _ClassVar[Priority]
    PRIORITY_BATCH: _ClassVar[Priority]
PRIORITY_UNSPECIFIED: Priority
PRIORITY_INTERACTIVE: Priority
PRIORITY_STANDARD: Priority
PRIORITY_BATCH: Priority

class AcquireTicketRequest(_message.Message):
    __slots__ = ("request_id", "model", "prompt_tokens", "max_output_tokens", "block_hashes", "priority", "max_queue_wait", "prompt_bytes", "prompt_digest", "tenant", "num_choices", "deadline", "resume", "num_inputs")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUE_WAIT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_BYTES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NUM_CHOICES_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    NUM_INPUTS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    prompt_tokens: int
    max_output_tokens: int
    block_hashes: _containers.RepeatedScalarFieldContainer[int]
    priority: Priority
    max_queue_wait: _duration_pb2.Duration
    prompt_bytes: int
    prompt_digest: bytes
    tenant: str
    num_choices: int
    deadline: _duration_pb2.Duration
    resume: ResumeRequest
    num_inputs: int
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., max_output_tokens: _Optional[int] = ..., block_hashes: _Optional[_Iterable[int]] = ..., priority: _Optional[_Union[Priority, str]] = ..., max_queue_wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., prompt_bytes: _Optional[int] = ..., prompt_digest: _Optional[bytes] = ..., tenant: _Optional[str] = ..., num_choices: _Optional[int] = ..., deadline: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., resume: _Optional[_Union[ResumeRequest, _Mapping]] = ..., num_inputs: _Optional[int] = ...) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ("origin_epoch", "origin_agent_id", "attempt", "from_cursor")
    ORIGIN_EPOCH_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    FROM_CURSOR_FIELD_NUMBER: _ClassVar[int]
    origin_epoch: int
    origin_agent_id: str
    attempt: int
    from_cursor: int
    def __init__(self, origin_epoch: _Optional[int] = ..., origin_agent_id: _Optional[str] = ..., attempt: _Optional[int] = ..., from_cursor: _Optional[int] = ...) -> None: ...

class AcquireTicketResponse(_message.Message):
    __slots__ = ("ticket", "fallback_ticket", "quote")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    FALLBACK_TICKET_FIELD_NUMBER: _ClassVar[int]
    QUOTE_FIELD_NUMBER: _ClassVar[int]
    ticket: Ticket
    fallback_ticket: Ticket
    quote: LatencyQuote
    def __init__(self, ticket: _Optional[_Union[Ticket, _Mapping]] = ..., fallback_ticket: _Optional[_Union[Ticket, _Mapping]] = ..., quote: _Optional[_Union[LatencyQuote, _Mapping]] = ...) -> None: ...

class AdmitRequest(_message.Message):
    __slots__ = ("requests", "abandoned_request_ids")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    ABANDONED_REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[AcquireTicketRequest]
    abandoned_request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, requests: _Optional[_Iterable[_Union[AcquireTicketRequest, _Mapping]]] = ..., abandoned_request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class AdmitResponse(_message.Message):
    __slots__ = ("admissions",)
    ADMISSIONS_FIELD_NUMBER: _ClassVar[int]
    admissions: _containers.RepeatedCompositeFieldContainer[Admission]
    def __init__(self, admissions: _Optional[_Iterable[_Union[Admission, _Mapping]]] = ...) -> None: ...

class Admission(_message.Message):
    __slots__ = ("request_id", "granted", "refused", "queued")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    granted: AcquireTicketResponse
    refused: _error_pb2.ErrorDetail
    queued: QueuePosition
    def __init__(self, request_id: _Optional[str] = ..., granted: _Optional[_Union[AcquireTicketResponse, _Mapping]] = ..., refused: _Optional[_Union[_error_pb2.ErrorDetail, _Mapping]] = ..., queued: _Optional[_Union[QueuePosition, _Mapping]] = ...) -> None: ...

class QueuePosition(_message.Message):
    __slots__ = ("position", "predicted_wait")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_WAIT_FIELD_NUMBER: _ClassVar[int]
    position: int
    predicted_wait: _duration_pb2.Duration
    def __init__(self, position: _Optional[int] = ..., predicted_wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class Ticket(_message.Message):
    __slots__ = ("token", "data_address", "usable_for", "expected_cached_tokens", "agent_id", "epoch")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    DATA_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    USABLE_FOR_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    token: bytes
    data_address: str
    usable_for: _duration_pb2.Duration
    expected_cached_tokens: int
    agent_id: str
    epoch: int
    def __init__(self, token: _Optional[bytes] = ..., data_address: _Optional[str] = ..., usable_for: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., expected_cached_tokens: _Optional[int] = ..., agent_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class LatencyQuote(_message.Message):
    __slots__ = ("time_to_first_token", "time_per_output_token", "finish")
    TIME_TO_FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TIME_PER_OUTPUT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    time_to_first_token: LatencyEstimate
    time_per_output_token: LatencyEstimate
    finish: LatencyEstimate
    def __init__(self, time_to_first_token: _Optional[_Union[LatencyEstimate, _Mapping]] = ..., time_per_output_token: _Optional[_Union[LatencyEstimate, _Mapping]] = ..., finish: _Optional[_Union[LatencyEstimate, _Mapping]] = ...) -> None: ...

class LatencyEstimate(_message.Message):
    __slots__ = ("expected", "p10", "p90")
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    P10_FIELD_NUMBER: _ClassVar[int]
    P90_FIELD_NUMBER: _ClassVar[int]
    expected: _duration_pb2.Duration
    p10: _duration_pb2.Duration
    p90: _duration_pb2.Duration
    def __init__(self, expected: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., p10: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., p90: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class ReleaseTicketRequest(_message.Message):
    __slots__ = ("token",)
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    token: bytes
    def __init__(self, token: _Optional[bytes] = ...) -> None: ...

class ReleaseTicketResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class QuoteRequest(_message.Message):
    __slots__ = ("request",)
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request: AcquireTicketRequest
    def __init__(self, request: _Optional[_Union[AcquireTicketRequest, _Mapping]] = ...) -> None: ...

class QuoteResponse(_message.Message):
    __slots__ = ("quote", "agent_id")
    QUOTE_FIELD_NUMBER: _ClassVar[int]
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    quote: LatencyQuote
    agent_id: str
    def __init__(self, quote: _Optional[_Union[LatencyQuote, _Mapping]] = ..., agent_id: _Optional[str] = ...) -> None: ...
