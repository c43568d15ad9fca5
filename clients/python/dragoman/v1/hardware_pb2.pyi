import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Provenance(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PROVENANCE_UNSPECIFIED: _ClassVar[Provenance]
    PROVENANCE_MEASURED: _ClassVar[Provenance]
    PROVENANCE_REPORTED: _ClassVar[Provenance]
    PROVENANCE_SPEC: _ClassVar[Provenance]
    PROVENANCE_DERIVED: _ClassVar[Provenance]
PROVENANCE_UNSPECIFIED: Provenance
PROVENANCE_MEASURED: Provenance
PROVENANCE_REPORTED: Provenance
PROVENANCE_SPEC: Provenance
PROVENANCE_DERIVED: Provenance

class Device(_message.Message):
    __slots__ = ("index", "name", "kind", "architecture", "memory_bytes", "uuid")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    UUID_FIELD_NUMBER: _ClassVar[int]
    index: int
    name: str
    kind: str
    architecture: str
    memory_bytes: int
    uuid: str
    def __init__(self, index: _Optional[int] = ..., name: _Optional[str] = ..., kind: _Optional[str] = ..., architecture: _Optional[str] = ..., memory_bytes: _Optional[int] = ..., uuid: _Optional[str] = ...) -> None: ...

class DeviceCandidate(_message.Message):
    __slots__ = ("device", "chosen", "reason")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    device: Device
    chosen: bool
    reason: str
    def __init__(self, device: _Optional[_Union[Device, _Mapping]] = ..., chosen: _Optional[bool] = ..., reason: _Optional[str] = ...) -> None: ...

class ProfileValue(_message.Message):
    __slots__ = ("name", "number", "text", "flag", "numbers", "unit", "provenance", "spread", "note")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    FLAG_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    PROVENANCE_FIELD_NUMBER: _ClassVar[int]
    SPREAD_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    name: str
    number: float
    text: str
    flag: bool
    numbers: NumberList
    unit: str
    provenance: Provenance
    spread: float
    note: str
    def __init__(self, name: _Optional[str] = ..., number: _Optional[float] = ..., text: _Optional[str] = ..., flag: _Optional[bool] = ..., numbers: _Optional[_Union[NumberList, _Mapping]] = ..., unit: _Optional[str] = ..., provenance: _Optional[_Union[Provenance, str]] = ..., spread: _Optional[float] = ..., note: _Optional[str] = ...) -> None: ...

class NumberList(_message.Message):
    __slots__ = ("values", "labels")
    VALUES_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[float]
    labels: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, values: _Optional[_Iterable[float]] = ..., labels: _Optional[_Iterable[str]] = ...) -> None: ...

class HardwareProfile(_message.Message):
    __slots__ = ("schema_version", "name", "device", "fingerprint", "values", "create_time")
    SCHEMA_VERSION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    schema_version: int
    name: str
    device: Device
    fingerprint: str
    values: _containers.RepeatedCompositeFieldContainer[ProfileValue]
    create_time: _timestamp_pb2.Timestamp
    def __init__(self, schema_version: _Optional[int] = ..., name: _Optional[str] = ..., device: _Optional[_Union[Device, _Mapping]] = ..., fingerprint: _Optional[str] = ..., values: _Optional[_Iterable[_Union[ProfileValue, _Mapping]]] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class PlanField(_message.Message):
    __slots__ = ("name", "number", "text", "flag", "numbers", "unit", "decision_id")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    FLAG_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    DECISION_ID_FIELD_NUMBER: _ClassVar[int]
    name: str
    number: float
    text: str
    flag: bool
    numbers: NumberList
    unit: str
    decision_id: str
    def __init__(self, name: _Optional[str] = ..., number: _Optional[float] = ..., text: _Optional[str] = ..., flag: _Optional[bool] = ..., numbers: _Optional[_Union[NumberList, _Mapping]] = ..., unit: _Optional[str] = ..., decision_id: _Optional[str] = ...) -> None: ...

class MemoryLine(_message.Message):
    __slots__ = ("name", "size_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    size_bytes: int
    def __init__(self, name: _Optional[str] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class Plan(_message.Message):
    __slots__ = ("digest", "model", "fields", "memory", "step_model")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    STEP_MODEL_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    model: str
    fields: _containers.RepeatedCompositeFieldContainer[PlanField]
    memory: _containers.RepeatedCompositeFieldContainer[MemoryLine]
    step_model: StepModel
    def __init__(self, digest: _Optional[bytes] = ..., model: _Optional[str] = ..., fields: _Optional[_Iterable[_Union[PlanField, _Mapping]]] = ..., memory: _Optional[_Iterable[_Union[MemoryLine, _Mapping]]] = ..., step_model: _Optional[_Union[StepModel, _Mapping]] = ...) -> None: ...

class StepModel(_message.Message):
    __slots__ = ("batch_sizes", "context_tokens", "decode_seconds", "prefill_tokens_per_second", "prefill_base_seconds")
    BATCH_SIZES_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    PREFILL_BASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    batch_sizes: _containers.RepeatedScalarFieldContainer[int]
    context_tokens: _containers.RepeatedScalarFieldContainer[int]
    decode_seconds: _containers.RepeatedScalarFieldContainer[float]
    prefill_tokens_per_second: float
    prefill_base_seconds: float
    def __init__(self, batch_sizes: _Optional[_Iterable[int]] = ..., context_tokens: _Optional[_Iterable[int]] = ..., decode_seconds: _Optional[_Iterable[float]] = ..., prefill_tokens_per_second: _Optional[float] = ..., prefill_base_seconds: _Optional[float] = ...) -> None: ...

class Decision(_message.Message):
    __slots__ = ("decision_id", "subject", "inputs", "candidates", "chosen", "reason", "predicted", "measured", "unit", "decide_time")
    DECISION_ID_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_FIELD_NUMBER: _ClassVar[int]
    MEASURED_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    DECIDE_TIME_FIELD_NUMBER: _ClassVar[int]
    decision_id: str
    subject: str
    inputs: _containers.RepeatedCompositeFieldContainer[DecisionInput]
    candidates: _containers.RepeatedCompositeFieldContainer[DecisionCandidate]
    chosen: str
    reason: str
    predicted: float
    measured: float
    unit: str
    decide_time: _timestamp_pb2.Timestamp
    def __init__(self, decision_id: _Optional[str] = ..., subject: _Optional[str] = ..., inputs: _Optional[_Iterable[_Union[DecisionInput, _Mapping]]] = ..., candidates: _Optional[_Iterable[_Union[DecisionCandidate, _Mapping]]] = ..., chosen: _Optional[str] = ..., reason: _Optional[str] = ..., predicted: _Optional[float] = ..., measured: _Optional[float] = ..., unit: _Optional[str] = ..., decide_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class DecisionInput(_message.Message):
    __slots__ = ("name", "value", "provenance")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    PROVENANCE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: str
    provenance: Provenance
    def __init__(self, name: _Optional[str] = ..., value: _Optional[str] = ..., provenance: _Optional[_Union[Provenance, str]] = ...) -> None: ...

class DecisionCandidate(_message.Message):
    __slots__ = ("name", "predicted", "rejected_because")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_FIELD_NUMBER: _ClassVar[int]
    REJECTED_BECAUSE_FIELD_NUMBER: _ClassVar[int]
    name: str
    predicted: float
    rejected_because: str
    def __init__(self, name: _Optional[str] = ..., predicted: _Optional[float] = ..., rejected_because: _Optional[str] = ...) -> None: ...

class LiveLimits(_message.Message):
    __slots__ = ("temperature_celsius", "power_watts", "power_limit_watts", "clock_hertz", "link_generation", "link_width", "foreign_memory_bytes", "free_memory_bytes", "age", "event")
    TEMPERATURE_CELSIUS_FIELD_NUMBER: _ClassVar[int]
    POWER_WATTS_FIELD_NUMBER: _ClassVar[int]
    POWER_LIMIT_WATTS_FIELD_NUMBER: _ClassVar[int]
    CLOCK_HERTZ_FIELD_NUMBER: _ClassVar[int]
    LINK_GENERATION_FIELD_NUMBER: _ClassVar[int]
    LINK_WIDTH_FIELD_NUMBER: _ClassVar[int]
    FOREIGN_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    AGE_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    temperature_celsius: float
    power_watts: float
    power_limit_watts: float
    clock_hertz: float
    link_generation: int
    link_width: int
    foreign_memory_bytes: int
    free_memory_bytes: int
    age: _duration_pb2.Duration
    event: str
    def __init__(self, temperature_celsius: _Optional[float] = ..., power_watts: _Optional[float] = ..., power_limit_watts: _Optional[float] = ..., clock_hertz: _Optional[float] = ..., link_generation: _Optional[int] = ..., link_width: _Optional[int] = ..., foreign_memory_bytes: _Optional[int] = ..., free_memory_bytes: _Optional[int] = ..., age: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., event: _Optional[str] = ...) -> None: ...
