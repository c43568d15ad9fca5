"""Pieces of protobuf's wire format, to put a message together from parts that were serialized before.

https://protobuf.dev/programming-guides/encoding: a field is a varint of its number and wire type, then its value.
"""

from __future__ import annotations

from google.protobuf.message import Message

_VARINT, _LENGTH_DELIMITED = 0, 2
_NUM_REMEMBERED = 4096


def _encode(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


_REMEMBERED = [_encode(value) for value in range(_NUM_REMEMBERED)]


def varint(value: int) -> bytes:
    """A number that is not negative."""
    return _REMEMBERED[value] if value < _NUM_REMEMBERED else _encode(value)


def length_delimited(message: type[Message], field: str) -> bytes:
    """What stands before the size of a field of bytes, text or a message."""
    return _encode(message.DESCRIPTOR.fields_by_name[field].number << 3 | _LENGTH_DELIMITED)


def varint_field(message: type[Message], field: str) -> bytes:
    """What stands before the value of an integer field."""
    return _encode(message.DESCRIPTOR.fields_by_name[field].number << 3 | _VARINT)


def field(prefix: bytes, value: bytes) -> bytes:
    """A field of bytes, text or a message; `prefix`: what stands before its size."""
    return b"".join((prefix, varint(len(value)), value))
