import datetime

from dragoman.v1 import agent_pb2 as _agent_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HintOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    HINT_OUTCOME_UNSPECIFIED: _ClassVar[HintOutcome]
    HINT_OUTCOME_USED: _ClassVar[HintOutcome]
    HINT_OUTCOME_LATE: _ClassVar[HintOutcome]
    HINT_OUTCOME_CLIPPED: _ClassVar[HintOutcome]
    HINT_OUTCOME_REFUSED: _ClassVar[HintOutcome]
    HINT_OUTCOME_UNUSED: _ClassVar[HintOutcome]
HINT_OUTCOME_UNSPECIFIED: HintOutcome
HINT_OUTCOME_USED: HintOutcome
HINT_OUTCOME_LATE: HintOutcome
HINT_OUTCOME_CLIPPED: HintOutcome
HINT_OUTCOME_REFUSED: HintOutcome
HINT_OUTCOME_UNUSED: HintOutcome

class RegisterAgentRequest(_message.Message):
    __slots__ = ("agent", "epoch", "agent_monotonic_ms")
    AGENT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    AGENT_MONOTONIC_MS_FIELD_NUMBER: _ClassVar[int]
    agent: _agent_pb2.Agent
    epoch: int
    agent_monotonic_ms: int
    def __init__(self, agent: _Optional[_Union[_agent_pb2.Agent, _Mapping]] = ..., epoch: _Optional[int] = ..., agent_monotonic_ms: _Optional[int] = ...) -> None: ...

class RegisterAgentResponse(_message.Message):
    __slots__ = ("lease_id", "heartbeat_interval", "key_id", "ticket_key", "previous_keys", "controller_id")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    TICKET_KEY_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_KEYS_FIELD_NUMBER: _ClassVar[int]
    CONTROLLER_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    heartbeat_interval: _duration_pb2.Duration
    key_id: int
    ticket_key: bytes
    previous_keys: _containers.RepeatedCompositeFieldContainer[TicketKey]
    controller_id: str
    def __init__(self, lease_id: _Optional[str] = ..., heartbeat_interval: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., key_id: _Optional[int] = ..., ticket_key: _Optional[bytes] = ..., previous_keys: _Optional[_Iterable[_Union[TicketKey, _Mapping]]] = ..., controller_id: _Optional[str] = ...) -> None: ...

class TicketKey(_message.Message):
    __slots__ = ("key_id", "key")
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    key_id: int
    key: bytes
    def __init__(self, key_id: _Optional[int] = ..., key: _Optional[bytes] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("lease_id", "epoch", "state", "load", "command_results", "agent_monotonic_ms", "outcomes")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    COMMAND_RESULTS_FIELD_NUMBER: _ClassVar[int]
    AGENT_MONOTONIC_MS_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    epoch: int
    state: _agent_pb2.AgentState
    load: _agent_pb2.AgentLoad
    command_results: _containers.RepeatedCompositeFieldContainer[CommandResult]
    agent_monotonic_ms: int
    outcomes: _containers.RepeatedCompositeFieldContainer[RequestOutcome]
    def __init__(self, lease_id: _Optional[str] = ..., epoch: _Optional[int] = ..., state: _Optional[_Union[_agent_pb2.AgentState, str]] = ..., load: _Optional[_Union[_agent_pb2.AgentLoad, _Mapping]] = ..., command_results: _Optional[_Iterable[_Union[CommandResult, _Mapping]]] = ..., agent_monotonic_ms: _Optional[int] = ..., outcomes: _Optional[_Iterable[_Union[RequestOutcome, _Mapping]]] = ...) -> None: ...

class RequestOutcome(_message.Message):
    __slots__ = ("jti", "time_to_first_token", "total_time", "output_tokens", "cached_tokens", "prompt_tokens", "incomplete", "engine_lost", "prompt_digest")
    JTI_FIELD_NUMBER: _ClassVar[int]
    TIME_TO_FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOTAL_TIME_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    INCOMPLETE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_LOST_FIELD_NUMBER: _ClassVar[int]
    PROMPT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    jti: bytes
    time_to_first_token: _duration_pb2.Duration
    total_time: _duration_pb2.Duration
    output_tokens: int
    cached_tokens: int
    prompt_tokens: int
    incomplete: bool
    engine_lost: bool
    prompt_digest: bytes
    def __init__(self, jti: _Optional[bytes] = ..., time_to_first_token: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., total_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., output_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., incomplete: _Optional[bool] = ..., engine_lost: _Optional[bool] = ..., prompt_digest: _Optional[bytes] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ("commands", "policy_revision", "controllers")
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    POLICY_REVISION_FIELD_NUMBER: _ClassVar[int]
    CONTROLLERS_FIELD_NUMBER: _ClassVar[int]
    commands: _containers.RepeatedCompositeFieldContainer[Command]
    policy_revision: int
    controllers: _containers.RepeatedCompositeFieldContainer[_agent_pb2.Controller]
    def __init__(self, commands: _Optional[_Iterable[_Union[Command, _Mapping]]] = ..., policy_revision: _Optional[int] = ..., controllers: _Optional[_Iterable[_Union[_agent_pb2.Controller, _Mapping]]] = ...) -> None: ...

class Command(_message.Message):
    __slots__ = ("command_id", "prefetch_prefix", "drain", "revoke_request", "rotate_keys", "undrain")
    COMMAND_ID_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_PREFIX_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    REVOKE_REQUEST_FIELD_NUMBER: _ClassVar[int]
    ROTATE_KEYS_FIELD_NUMBER: _ClassVar[int]
    UNDRAIN_FIELD_NUMBER: _ClassVar[int]
    command_id: str
    prefetch_prefix: PrefetchPrefix
    drain: Drain
    revoke_request: RevokeRequest
    rotate_keys: RotateKeys
    undrain: Undrain
    def __init__(self, command_id: _Optional[str] = ..., prefetch_prefix: _Optional[_Union[PrefetchPrefix, _Mapping]] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ..., revoke_request: _Optional[_Union[RevokeRequest, _Mapping]] = ..., rotate_keys: _Optional[_Union[RotateKeys, _Mapping]] = ..., undrain: _Optional[_Union[Undrain, _Mapping]] = ...) -> None: ...

class PrefetchPrefix(_message.Message):
    __slots__ = ("model", "block_hashes", "source_address", "source_ticket", "source_agent_id", "time_limit")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    SOURCE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_TICKET_FIELD_NUMBER: _ClassVar[int]
    SOURCE_AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    TIME_LIMIT_FIELD_NUMBER: _ClassVar[int]
    model: str
    block_hashes: _containers.RepeatedScalarFieldContainer[int]
    source_address: str
    source_ticket: bytes
    source_agent_id: str
    time_limit: _duration_pb2.Duration
    def __init__(self, model: _Optional[str] = ..., block_hashes: _Optional[_Iterable[int]] = ..., source_address: _Optional[str] = ..., source_ticket: _Optional[bytes] = ..., source_agent_id: _Optional[str] = ..., time_limit: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class Drain(_message.Message):
    __slots__ = ("grace_period",)
    GRACE_PERIOD_FIELD_NUMBER: _ClassVar[int]
    grace_period: _duration_pb2.Duration
    def __init__(self, grace_period: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class Undrain(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RevokeRequest(_message.Message):
    __slots__ = ("jti",)
    JTI_FIELD_NUMBER: _ClassVar[int]
    jti: bytes
    def __init__(self, jti: _Optional[bytes] = ...) -> None: ...

class RotateKeys(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedCompositeFieldContainer[TicketKey]
    def __init__(self, keys: _Optional[_Iterable[_Union[TicketKey, _Mapping]]] = ...) -> None: ...

class CommandResult(_message.Message):
    __slots__ = ("command_id", "code", "message", "hint_outcome")
    COMMAND_ID_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    HINT_OUTCOME_FIELD_NUMBER: _ClassVar[int]
    command_id: str
    code: int
    message: str
    hint_outcome: HintOutcome
    def __init__(self, command_id: _Optional[str] = ..., code: _Optional[int] = ..., message: _Optional[str] = ..., hint_outcome: _Optional[_Union[HintOutcome, str]] = ...) -> None: ...

class PublishKvEventsRequest(_message.Message):
    __slots__ = ("lease_id", "epoch", "sequence", "stored_block_hashes", "removed_block_hashes", "snapshot", "lower_stored_block_hashes", "lower_removed_block_hashes")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    STORED_BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    REMOVED_BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    LOWER_STORED_BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    LOWER_REMOVED_BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    epoch: int
    sequence: int
    stored_block_hashes: _containers.RepeatedScalarFieldContainer[int]
    removed_block_hashes: _containers.RepeatedScalarFieldContainer[int]
    snapshot: bool
    lower_stored_block_hashes: _containers.RepeatedScalarFieldContainer[int]
    lower_removed_block_hashes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, lease_id: _Optional[str] = ..., epoch: _Optional[int] = ..., sequence: _Optional[int] = ..., stored_block_hashes: _Optional[_Iterable[int]] = ..., removed_block_hashes: _Optional[_Iterable[int]] = ..., snapshot: _Optional[bool] = ..., lower_stored_block_hashes: _Optional[_Iterable[int]] = ..., lower_removed_block_hashes: _Optional[_Iterable[int]] = ...) -> None: ...

class PublishKvEventsResponse(_message.Message):
    __slots__ = ("snapshot_wanted", "acknowledged_sequence")
    SNAPSHOT_WANTED_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    snapshot_wanted: bool
    acknowledged_sequence: int
    def __init__(self, snapshot_wanted: _Optional[bool] = ..., acknowledged_sequence: _Optional[int] = ...) -> None: ...

class DeregisterAgentRequest(_message.Message):
    __slots__ = ("lease_id", "outcomes")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    outcomes: _containers.RepeatedCompositeFieldContainer[RequestOutcome]
    def __init__(self, lease_id: _Optional[str] = ..., outcomes: _Optional[_Iterable[_Union[RequestOutcome, _Mapping]]] = ...) -> None: ...

class DeregisterAgentResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
