import datetime

from dragoman.v1 import agent_pb2 as _agent_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TraceKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRACE_KIND_UNSPECIFIED: _ClassVar[TraceKind]
    TRACE_KIND_TIMELINE: _ClassVar[TraceKind]
    TRACE_KIND_MEMORY: _ClassVar[TraceKind]
TRACE_KIND_UNSPECIFIED: TraceKind
TRACE_KIND_TIMELINE: TraceKind
TRACE_KIND_MEMORY: TraceKind

class StreamMetricsRequest(_message.Message):
    __slots__ = ("interval", "name_prefixes")
    INTERVAL_FIELD_NUMBER: _ClassVar[int]
    NAME_PREFIXES_FIELD_NUMBER: _ClassVar[int]
    interval: _duration_pb2.Duration
    name_prefixes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, interval: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., name_prefixes: _Optional[_Iterable[str]] = ...) -> None: ...

class StreamMetricsResponse(_message.Message):
    __slots__ = ("sample_time", "samples")
    SAMPLE_TIME_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    sample_time: _timestamp_pb2.Timestamp
    samples: _containers.RepeatedCompositeFieldContainer[MetricSample]
    def __init__(self, sample_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., samples: _Optional[_Iterable[_Union[MetricSample, _Mapping]]] = ...) -> None: ...

class MetricSample(_message.Message):
    __slots__ = ("name", "labels", "gauge", "counter", "histogram")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    GAUGE_FIELD_NUMBER: _ClassVar[int]
    COUNTER_FIELD_NUMBER: _ClassVar[int]
    HISTOGRAM_FIELD_NUMBER: _ClassVar[int]
    name: str
    labels: _containers.ScalarMap[str, str]
    gauge: float
    counter: float
    histogram: Histogram
    def __init__(self, name: _Optional[str] = ..., labels: _Optional[_Mapping[str, str]] = ..., gauge: _Optional[float] = ..., counter: _Optional[float] = ..., histogram: _Optional[_Union[Histogram, _Mapping]] = ...) -> None: ...

class Histogram(_message.Message):
    __slots__ = ("upper_bounds", "bucket_counts", "sum")
    UPPER_BOUNDS_FIELD_NUMBER: _ClassVar[int]
    BUCKET_COUNTS_FIELD_NUMBER: _ClassVar[int]
    SUM_FIELD_NUMBER: _ClassVar[int]
    upper_bounds: _containers.RepeatedScalarFieldContainer[float]
    bucket_counts: _containers.RepeatedScalarFieldContainer[int]
    sum: float
    def __init__(self, upper_bounds: _Optional[_Iterable[float]] = ..., bucket_counts: _Optional[_Iterable[int]] = ..., sum: _Optional[float] = ...) -> None: ...

class WatchLoadRequest(_message.Message):
    __slots__ = ("interval",)
    INTERVAL_FIELD_NUMBER: _ClassVar[int]
    interval: _duration_pb2.Duration
    def __init__(self, interval: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class WatchLoadResponse(_message.Message):
    __slots__ = ("agents",)
    AGENTS_FIELD_NUMBER: _ClassVar[int]
    agents: _containers.RepeatedCompositeFieldContainer[AgentLoadSample]
    def __init__(self, agents: _Optional[_Iterable[_Union[AgentLoadSample, _Mapping]]] = ...) -> None: ...

class AgentLoadSample(_message.Message):
    __slots__ = ("agent_id", "state", "load")
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    agent_id: str
    state: _agent_pb2.AgentState
    load: _agent_pb2.AgentLoad
    def __init__(self, agent_id: _Optional[str] = ..., state: _Optional[_Union[_agent_pb2.AgentState, str]] = ..., load: _Optional[_Union[_agent_pb2.AgentLoad, _Mapping]] = ...) -> None: ...

class CaptureTraceRequest(_message.Message):
    __slots__ = ("duration", "kind")
    DURATION_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    duration: _duration_pb2.Duration
    kind: TraceKind
    def __init__(self, duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., kind: _Optional[_Union[TraceKind, str]] = ...) -> None: ...

class CaptureTraceResponse(_message.Message):
    __slots__ = ("chunk",)
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    chunk: bytes
    def __init__(self, chunk: _Optional[bytes] = ...) -> None: ...
