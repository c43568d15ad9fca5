import datetime

from dragoman.v1 import admission_service_pb2 as _admission_service_pb2
from dragoman.v1 import agent_pb2 as _agent_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FleetMember(_message.Message):
    __slots__ = ("agent", "epoch", "state", "load", "heartbeat_age", "granted_requests")
    AGENT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_AGE_FIELD_NUMBER: _ClassVar[int]
    GRANTED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    agent: _agent_pb2.Agent
    epoch: int
    state: _agent_pb2.AgentState
    load: _agent_pb2.AgentLoad
    heartbeat_age: _duration_pb2.Duration
    granted_requests: int
    def __init__(self, agent: _Optional[_Union[_agent_pb2.Agent, _Mapping]] = ..., epoch: _Optional[int] = ..., state: _Optional[_Union[_agent_pb2.AgentState, str]] = ..., load: _Optional[_Union[_agent_pb2.AgentLoad, _Mapping]] = ..., heartbeat_age: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., granted_requests: _Optional[int] = ...) -> None: ...

class ListAgentsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListAgentsResponse(_message.Message):
    __slots__ = ("members",)
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    members: _containers.RepeatedCompositeFieldContainer[FleetMember]
    def __init__(self, members: _Optional[_Iterable[_Union[FleetMember, _Mapping]]] = ...) -> None: ...

class WatchFleetRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchFleetResponse(_message.Message):
    __slots__ = ("changed", "removed_agent_ids")
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_AGENT_IDS_FIELD_NUMBER: _ClassVar[int]
    changed: _containers.RepeatedCompositeFieldContainer[FleetMember]
    removed_agent_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, changed: _Optional[_Iterable[_Union[FleetMember, _Mapping]]] = ..., removed_agent_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class DrainAgentRequest(_message.Message):
    __slots__ = ("agent_id", "grace_period")
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    GRACE_PERIOD_FIELD_NUMBER: _ClassVar[int]
    agent_id: str
    grace_period: _duration_pb2.Duration
    def __init__(self, agent_id: _Optional[str] = ..., grace_period: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class DrainAgentResponse(_message.Message):
    __slots__ = ("streams", "drained")
    STREAMS_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    streams: _containers.RepeatedCompositeFieldContainer[RemainingStream]
    drained: bool
    def __init__(self, streams: _Optional[_Iterable[_Union[RemainingStream, _Mapping]]] = ..., drained: _Optional[bool] = ...) -> None: ...

class RemainingStream(_message.Message):
    __slots__ = ("request_id", "predicted_remaining")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_REMAINING_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    predicted_remaining: _duration_pb2.Duration
    def __init__(self, request_id: _Optional[str] = ..., predicted_remaining: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class UndrainAgentRequest(_message.Message):
    __slots__ = ("agent_id",)
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    agent_id: str
    def __init__(self, agent_id: _Optional[str] = ...) -> None: ...

class UndrainAgentResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListControllersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListControllersResponse(_message.Message):
    __slots__ = ("controllers", "frozen")
    CONTROLLERS_FIELD_NUMBER: _ClassVar[int]
    FROZEN_FIELD_NUMBER: _ClassVar[int]
    controllers: _containers.RepeatedCompositeFieldContainer[_agent_pb2.Controller]
    frozen: bool
    def __init__(self, controllers: _Optional[_Iterable[_Union[_agent_pb2.Controller, _Mapping]]] = ..., frozen: _Optional[bool] = ...) -> None: ...

class ExplainPlacementRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class ExplainPlacementResponse(_message.Message):
    __slots__ = ("request_id", "candidates", "chosen_agent_id", "reason", "queue_time", "quote", "model", "prompt_tokens", "output_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    QUEUE_TIME_FIELD_NUMBER: _ClassVar[int]
    QUOTE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    candidates: _containers.RepeatedCompositeFieldContainer[PlacementCandidate]
    chosen_agent_id: str
    reason: str
    queue_time: _duration_pb2.Duration
    quote: _admission_service_pb2.LatencyQuote
    model: str
    prompt_tokens: int
    output_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., candidates: _Optional[_Iterable[_Union[PlacementCandidate, _Mapping]]] = ..., chosen_agent_id: _Optional[str] = ..., reason: _Optional[str] = ..., queue_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., quote: _Optional[_Union[_admission_service_pb2.LatencyQuote, _Mapping]] = ..., model: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ...) -> None: ...

class PlacementCandidate(_message.Message):
    __slots__ = ("agent_id", "queue_seconds", "prefill_seconds", "decode_seconds", "cached_tokens", "excluded_because", "fetch_seconds")
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DECODE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXCLUDED_BECAUSE_FIELD_NUMBER: _ClassVar[int]
    FETCH_SECONDS_FIELD_NUMBER: _ClassVar[int]
    agent_id: str
    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float
    cached_tokens: int
    excluded_because: str
    fetch_seconds: float
    def __init__(self, agent_id: _Optional[str] = ..., queue_seconds: _Optional[float] = ..., prefill_seconds: _Optional[float] = ..., decode_seconds: _Optional[float] = ..., cached_tokens: _Optional[int] = ..., excluded_because: _Optional[str] = ..., fetch_seconds: _Optional[float] = ...) -> None: ...
