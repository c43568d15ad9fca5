"""Pieces of the wire format: what they make is read by the protobuf library."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dragoman.v1 import ticket_pb2
from dragoman_controller.wire import field, length_delimited, varint, varint_field

edges = [edge + step for bits in range(7, 64, 7) for edge in (1 << bits,) for step in (-1, 0, 1)]


@given(st.sampled_from(edges) | st.integers(0, (1 << 63) - 1))
def test_numbers_and_bytes_are_read_as_they_were_written(number: int) -> None:
    claims = ticket_pb2.TicketClaims(not_after_ms=number)
    assert (
        varint_field(ticket_pb2.TicketClaims, "not_after_ms") + varint(number) == claims.SerializeToString()
        or not number
    )
    assert (
        ticket_pb2.TicketClaims.FromString(varint_field(ticket_pb2.TicketClaims, "not_after_ms") + varint(number))
        == claims
    )
    signed = ticket_pb2.SignedTicket(claims=bytes(number % 10_000))
    assert (
        field(length_delimited(ticket_pb2.SignedTicket, "claims"), signed.claims) == signed.SerializeToString()
        or not signed.claims
    )
