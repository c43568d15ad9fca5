import datetime

from dragoman.v1 import hardware_pb2 as _hardware_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AgentState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    AGENT_STATE_UNSPECIFIED: _ClassVar[AgentState]
    AGENT_STATE_STARTING: _ClassVar[AgentState]
    AGENT_STATE_SERVING: _ClassVar[AgentState]
    AGENT_STATE_DRAINING: _ClassVar[AgentState]
    AGENT_STATE_SUSPECT: _ClassVar[AgentState]
    AGENT_STATE_DEAD: _ClassVar[AgentState]
AGENT_STATE_UNSPECIFIED: AgentState
AGENT_STATE_STARTING: AgentState
AGENT_STATE_SERVING: AgentState
AGENT_STATE_DRAINING: AgentState
AGENT_STATE_SUSPECT: AgentState
AGENT_STATE_DEAD: AgentState

class Agent(_message.Message):
    __slots__ = ("agent_id", "data_address", "devices", "models", "start_time", "version", "metrics_address")
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    DATA_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    START_TIME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    agent_id: str
    data_address: str
    devices: _containers.RepeatedCompositeFieldContainer[_hardware_pb2.DeviceCandidate]
    models: _containers.RepeatedCompositeFieldContainer[ServedModel]
    start_time: _timestamp_pb2.Timestamp
    version: str
    metrics_address: str
    def __init__(self, agent_id: _Optional[str] = ..., data_address: _Optional[str] = ..., devices: _Optional[_Iterable[_Union[_hardware_pb2.DeviceCandidate, _Mapping]]] = ..., models: _Optional[_Iterable[_Union[ServedModel, _Mapping]]] = ..., start_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., version: _Optional[str] = ..., metrics_address: _Optional[str] = ...) -> None: ...

class ServedModel(_message.Message):
    __slots__ = ("model", "model_digest", "max_context_tokens", "kv_block_tokens", "kv_block_count", "max_running_requests", "max_waiting_requests", "step_model", "plan_digest", "embeds", "vocabulary_size", "kv_type", "kv_layout", "kv_bytes_per_token")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MAX_WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    STEP_MODEL_FIELD_NUMBER: _ClassVar[int]
    PLAN_DIGEST_FIELD_NUMBER: _ClassVar[int]
    EMBEDS_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_SIZE_FIELD_NUMBER: _ClassVar[int]
    KV_TYPE_FIELD_NUMBER: _ClassVar[int]
    KV_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    model: str
    model_digest: bytes
    max_context_tokens: int
    kv_block_tokens: int
    kv_block_count: int
    max_running_requests: int
    max_waiting_requests: int
    step_model: _hardware_pb2.StepModel
    plan_digest: bytes
    embeds: bool
    vocabulary_size: int
    kv_type: str
    kv_layout: str
    kv_bytes_per_token: int
    def __init__(self, model: _Optional[str] = ..., model_digest: _Optional[bytes] = ..., max_context_tokens: _Optional[int] = ..., kv_block_tokens: _Optional[int] = ..., kv_block_count: _Optional[int] = ..., max_running_requests: _Optional[int] = ..., max_waiting_requests: _Optional[int] = ..., step_model: _Optional[_Union[_hardware_pb2.StepModel, _Mapping]] = ..., plan_digest: _Optional[bytes] = ..., embeds: _Optional[bool] = ..., vocabulary_size: _Optional[int] = ..., kv_type: _Optional[str] = ..., kv_layout: _Optional[str] = ..., kv_bytes_per_token: _Optional[int] = ...) -> None: ...

class AgentLoad(_message.Message):
    __slots__ = ("waiting_requests", "running_requests", "free_kv_blocks", "pending_prefill_tokens", "running_context_tokens", "age", "step_age", "step_count", "step_seconds", "kv_fetch_bytes_per_second", "kv_fetch_base_seconds", "kv_tier_bytes_per_second")
    WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    FREE_KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PENDING_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    AGE_FIELD_NUMBER: _ClassVar[int]
    STEP_AGE_FIELD_NUMBER: _ClassVar[int]
    STEP_COUNT_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    KV_FETCH_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    KV_FETCH_BASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    KV_TIER_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    waiting_requests: int
    running_requests: int
    free_kv_blocks: int
    pending_prefill_tokens: int
    running_context_tokens: int
    age: _duration_pb2.Duration
    step_age: _duration_pb2.Duration
    step_count: int
    step_seconds: float
    kv_fetch_bytes_per_second: float
    kv_fetch_base_seconds: float
    kv_tier_bytes_per_second: float
    def __init__(self, waiting_requests: _Optional[int] = ..., running_requests: _Optional[int] = ..., free_kv_blocks: _Optional[int] = ..., pending_prefill_tokens: _Optional[int] = ..., running_context_tokens: _Optional[int] = ..., age: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., step_age: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., step_count: _Optional[int] = ..., step_seconds: _Optional[float] = ..., kv_fetch_bytes_per_second: _Optional[float] = ..., kv_fetch_base_seconds: _Optional[float] = ..., kv_tier_bytes_per_second: _Optional[float] = ...) -> None: ...

class Controller(_message.Message):
    __slots__ = ("controller_id", "address")
    CONTROLLER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    controller_id: str
    address: str
    def __init__(self, controller_id: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...
