"""Messages between the rpc process and the engine process on the wire: one msgpack frame a message, one frame a step.

A frame is a 4-byte little-endian length and a msgpack array [type code, fields...]. Both ends run the same code version;
the stream is a Unix socket in a private directory, so there is no other reader.
"""

from __future__ import annotations

import dataclasses
import struct
import threading
from operator import attrgetter
from typing import Any

import msgpack

from dragoman_agent.engine.messages import (
    BlocksExported,
    BlocksImported,
    BlocksUsed,
    BringBlocks,
    CachedBlock,
    Cancel,
    Credit,
    Delta,
    Embedded,
    ExportBlocks,
    Failed,
    Fatal,
    Finished,
    GrammarSpec,
    ImportBlocks,
    Load,
    LogprobEntry,
    Message,
    Opened,
    Progress,
    Ready,
    Sampling,
    Shutdown,
    Start,
    StartEmbed,
    Step,
    Stop,
    TierCounts,
    TierReport,
    Tune,
    Warmed,
)

MAX_FRAME_BYTES = 64 << 20
_LENGTH = struct.Struct("<I")

_TYPES: tuple[type[Any], ...] = (
    Start, StartEmbed, Cancel, Credit, Shutdown, Progress, Ready, Fatal, Step, Delta, Finished, Failed, Embedded,
    Sampling, Stop, Load, LogprobEntry, GrammarSpec, Opened, Tune, ExportBlocks, ImportBlocks, CachedBlock, BlocksExported, BlocksImported, BlocksUsed,
    BringBlocks, TierCounts, TierReport, Warmed,
)  # fmt: skip
_CODES = {cls: code for code, cls in enumerate(_TYPES)}
_FIELDS = {cls: attrgetter(*(f.name for f in dataclasses.fields(cls))) for cls in _TYPES if dataclasses.fields(cls)}
_NUM_FIELDS = {cls: len(dataclasses.fields(cls)) for cls in _TYPES}
_STEP_EVENTS, _STEP_LOAD = (1 + [f.name for f in dataclasses.fields(Step)].index(name) for name in ("events", "load"))
_EXT_DATACLASS = 1
_KEPT_BYTES = 4 << 20


class ProtocolError(Exception):
    """The peer sent something that is not a message."""


def _default(value: Any) -> msgpack.ExtType:
    return msgpack.ExtType(_EXT_DATACLASS, _pack(_flat(value)))


class _Packers(threading.local):
    """Packers by depth: one that is packing cannot be used for what it holds, and a new one takes a buffer of a megabyte."""

    def __init__(self) -> None:
        self.by_depth: list[msgpack.Packer] = []
        self.depth = 0


_PACKERS = _Packers()


def _pack(value: Any) -> bytes:
    packers, depth = _PACKERS.by_depth, _PACKERS.depth
    if depth == len(packers):
        packers.append(msgpack.Packer(default=_default))
    _PACKERS.depth = depth + 1
    try:
        packed: bytes = packers[depth].pack(value)
    finally:
        _PACKERS.depth = depth
    if not depth and len(packed) > _KEPT_BYTES:
        packers.clear()  # a buffer does not shrink
    return packed


def _flat(value: Any) -> tuple[Any, ...]:
    """Type code and fields. A type of one field or none needs care: `attrgetter` of one name gives no tuple."""
    cls = type(value)
    fields = _FIELDS.get(cls)
    if fields is None:
        return (_CODES[cls],)
    values = fields(value)
    return (_CODES[cls], *values) if _NUM_FIELDS[cls] > 1 else (_CODES[cls], values)


def _flat_step(step: Step) -> list[Any]:
    """As `_flat`, and so is what a step holds: an extension each would cost more than all else in a frame."""
    body = [*_flat(step)]
    body[_STEP_EVENTS] = [_flat(event) for event in step.events]
    body[_STEP_LOAD] = _flat(step.load)
    return body


def _ext_hook(code: int, data: bytes) -> Any:
    if code != _EXT_DATACLASS:
        raise ProtocolError(f"unknown extension type {code}")
    return _build(msgpack.unpackb(data, ext_hook=_ext_hook, strict_map_key=False))


def _build(body: list[Any]) -> Any:
    try:
        cls = _TYPES[body[0]]
        if cls is Step:
            body[_STEP_EVENTS] = [_build(event) for event in body[_STEP_EVENTS]]
            body[_STEP_LOAD] = _build(body[_STEP_LOAD])
        return cls(*body[1:])
    except (TypeError, IndexError) as error:
        raise ProtocolError(f"malformed message: {error}") from error


def encode(message: Message) -> bytes:
    """One frame, its length first."""
    body = _pack(_flat_step(message) if isinstance(message, Step) else _flat(message))
    if len(body) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {len(body)} bytes is over the limit of {MAX_FRAME_BYTES}")
    frame: bytes = _LENGTH.pack(len(body)) + body
    return frame


def decode(body: bytes | memoryview) -> Message:
    """The message of one frame without its length. Raises ProtocolError."""
    try:
        fields = msgpack.unpackb(body, ext_hook=_ext_hook, strict_map_key=False)
    except ProtocolError:
        raise
    except Exception as error:
        raise ProtocolError(f"not a msgpack frame: {error}") from error
    if not isinstance(fields, list):
        raise ProtocolError(f"not a message: {type(fields).__name__}")
    return _build(fields)  # type: ignore[no-any-return]


class FrameDecoder:
    """Splits a byte stream into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """The messages completed by `data`. Raises ProtocolError on a malformed frame."""
        self._buffer += data
        messages = []
        position = 0
        while len(self._buffer) - position >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, position)
            if length > MAX_FRAME_BYTES:
                raise ProtocolError(f"a frame of {length} bytes is over the limit of {MAX_FRAME_BYTES}")
            if len(self._buffer) - position - _LENGTH.size < length:
                break
            start = position + _LENGTH.size
            messages.append(decode(bytes(self._buffer[start : start + length])))
            position = start + length
        del self._buffer[:position]
        return messages
