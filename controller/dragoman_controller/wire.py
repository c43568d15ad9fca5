"""Pieces of protobuf's wire format, to put a message together from parts that were serialized before.

https://protobuf.dev/programming-guides/encoding: a field is a varint of its number and wire type, then its value.
"""

from __future__ import annotations

from google.protobuf.message import Message

_VARINT, _LENGTH_DELIMITED = 0, 2
_NUM_REMEMBERED = 4096


def _encode(value: int) -> bytes:
    if 1 << 28 <= value < 1 << 35:
        # Five groups of seven bits, all but the last marked: what most times in milliseconds take.
        spread = value & 0x7F | value << 1 & 0x7F00 | value << 2 & 0x7F0000 | value << 3 & 0x7F000000
        return (spread | 0x80808080 | value << 4 & 0x7F00000000).to_bytes(5, "little")
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


SMALL_VARINTS = tuple(_encode(value) for value in range(_NUM_REMEMBERED))
"""Those of the numbers below 4096, to be looked up where it is known that they are."""


def varint(value: int) -> bytes:
    """A number that is not negative."""
    return SMALL_VARINTS[value] if value < _NUM_REMEMBERED else _encode(value)


def length_delimited(message: type[Message], field: str) -> bytes:
    """What stands before the size of a field of bytes, text or a message."""
    return _encode(message.DESCRIPTOR.fields_by_name[field].number << 3 | _LENGTH_DELIMITED)


def varint_field(message: type[Message], field: str) -> bytes:
    """What stands before the value of an integer field."""
    return _encode(message.DESCRIPTOR.fields_by_name[field].number << 3 | _VARINT)


def field(prefix: bytes, value: bytes) -> bytes:
    """A field of bytes, text or a message; `prefix`: what stands before its size."""
    return b"".join((prefix, varint(len(value)), value))
