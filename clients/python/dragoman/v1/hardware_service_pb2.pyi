import datetime

from dragoman.v1 import hardware_pb2 as _hardware_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetHardwareRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetHardwareResponse(_message.Message):
    __slots__ = ("profile", "candidates")
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    profile: _hardware_pb2.HardwareProfile
    candidates: _containers.RepeatedCompositeFieldContainer[_hardware_pb2.DeviceCandidate]
    def __init__(self, profile: _Optional[_Union[_hardware_pb2.HardwareProfile, _Mapping]] = ..., candidates: _Optional[_Iterable[_Union[_hardware_pb2.DeviceCandidate, _Mapping]]] = ...) -> None: ...

class WatchHardwareRequest(_message.Message):
    __slots__ = ("interval",)
    INTERVAL_FIELD_NUMBER: _ClassVar[int]
    interval: _duration_pb2.Duration
    def __init__(self, interval: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class WatchHardwareResponse(_message.Message):
    __slots__ = ("limits",)
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    limits: _hardware_pb2.LiveLimits
    def __init__(self, limits: _Optional[_Union[_hardware_pb2.LiveLimits, _Mapping]] = ...) -> None: ...

class GetPlanRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetPlanResponse(_message.Message):
    __slots__ = ("plan", "decisions")
    PLAN_FIELD_NUMBER: _ClassVar[int]
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    plan: _hardware_pb2.Plan
    decisions: _containers.RepeatedCompositeFieldContainer[_hardware_pb2.Decision]
    def __init__(self, plan: _Optional[_Union[_hardware_pb2.Plan, _Mapping]] = ..., decisions: _Optional[_Iterable[_Union[_hardware_pb2.Decision, _Mapping]]] = ...) -> None: ...

class WatchDecisionsRequest(_message.Message):
    __slots__ = ("subject",)
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    subject: str
    def __init__(self, subject: _Optional[str] = ...) -> None: ...

class WatchDecisionsResponse(_message.Message):
    __slots__ = ("decision",)
    DECISION_FIELD_NUMBER: _ClassVar[int]
    decision: _hardware_pb2.Decision
    def __init__(self, decision: _Optional[_Union[_hardware_pb2.Decision, _Mapping]] = ...) -> None: ...
