"""Answers put together from parts say what the protobuf library says when it fills in every field."""

from __future__ import annotations

import pytest
from google.protobuf.duration_pb2 import Duration
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.durations import duration_of
from dragoman.errors import DragomanError
from dragoman.v1 import admission_service_pb2 as pb
from dragoman.v1 import error_pb2
from dragoman_controller.admission import Answer, Queued
from dragoman_controller.granted import Destination, Granted, Ticket
from dragoman_controller.intervals import Quantiles
from dragoman_controller.native.library import load
from dragoman_controller.quote import Quote
from dragoman_controller.rpc.answers import AnswerWriter
from dragoman_controller.tickets import Bearer, CellKey, Claims, RequestPart, TicketMinter

LIBRARY = load()
WRITERS = [
    pytest.param(AnswerWriter(), id="python"),
    pytest.param(
        AnswerWriter(LIBRARY),
        id="native",
        marks=pytest.mark.skipif(LIBRARY is None, reason="no C++ compiler is on PATH"),
    ),
]
MINTER = TicketMinter((CellKey(1, bytes(32)),))

seconds = st.one_of(
    st.sampled_from((0.0, 1e-10, 0.9999999999, 1.0, 127.0, 2.0**31, 1e9, 1e30)),
    st.floats(0, 1e12),
    st.floats(0, 2),
)
ratio = st.floats(0, 64)
quantiles = st.builds(Quantiles, ratio, ratio, ratio)


@st.composite
def tickets(draw: st.DrawFn) -> Ticket:
    agent_id = draw(st.text(st.characters(codec="utf-8"), min_size=1, max_size=40))
    epoch = draw(st.integers(1, (1 << 64) - 1))
    resume = draw(st.sampled_from((None, (5, 1, 17))))
    claims = Claims(b"p" * 32, draw(st.integers(0, 1 << 20)), draw(st.integers(0, 1 << 20)), 1, 2, 0, resume)
    part = RequestPart(lambda: claims)
    minted = MINTER.mint(Bearer(agent_id, epoch, b"d" * 32), part, draw(st.sampled_from(("", "team"))), 1 << 33)
    return Ticket(
        minted,
        Destination(agent_id, epoch, draw(st.text(max_size=200))),
        draw(st.sampled_from((10.0, 0.0, 3.25))),
        draw(st.sampled_from((0, 1, 4096, 1 << 31))),
    )


grants = st.builds(
    Granted,
    tickets(),
    st.none() | tickets(),
    st.builds(Quote, seconds, seconds, seconds, st.tuples(quantiles, quantiles, quantiles)),
    st.just(0.0),
)
answers = st.one_of(
    grants,
    grants,
    st.builds(Queued, st.integers(0, 1 << 20), st.floats(0, 1e6)),
    st.just(DragomanError(error_pb2.ERROR_REASON_QUEUE_FULL, "full", retry_delay=1.5)),
)


def duration(value: float) -> Duration:
    """Cut to a billion seconds, and to what is below the next nanosecond."""
    whole = int(min(value, 1e9))
    return Duration(seconds=whole, nanos=int(min(value - whole, 0.999_999_999) * 1e9))


def ticket_message(ticket: Ticket) -> pb.Ticket:
    return pb.Ticket(
        token=ticket.token,
        data_address=ticket.destination.data_address,
        usable_for=duration_of(ticket.usable_seconds),
        expected_cached_tokens=ticket.expected_cached_tokens,
        agent_id=ticket.agent_id,
        epoch=ticket.epoch,
    )


def granted_message(granted: Granted) -> pb.AcquireTicketResponse:
    message = pb.AcquireTicketResponse(ticket=ticket_message(granted.ticket))
    if granted.fallback is not None:
        message.fallback_ticket.CopyFrom(ticket_message(granted.fallback))
    quote = granted.quote
    for part, estimate in (
        (message.quote.time_to_first_token, quote.time_to_first_token),
        (message.quote.time_per_output_token, quote.time_per_output_token),
        (message.quote.finish, quote.finish),
    ):
        part.expected.CopyFrom(duration(estimate.expected))
        part.p10.CopyFrom(duration(estimate.p10))
        part.p90.CopyFrom(duration(estimate.p90))
    return message


@pytest.mark.parametrize("writer", WRITERS)
@given(granted=grants)
@settings(max_examples=150, deadline=None)
def test_a_granted_answer_has_every_field(writer: AnswerWriter, granted: Granted) -> None:
    assert writer.granted(granted) == granted_message(granted)
    # What is kept of the destination is right the second time too.
    assert writer.granted(granted) == granted_message(granted)


@pytest.mark.parametrize("writer", WRITERS)
@given(batch=st.lists(st.tuples(st.text(max_size=128), answers), max_size=6))
@settings(max_examples=60, deadline=None)
def test_a_batch_has_every_answer_in_order(writer: AnswerWriter, batch: list[tuple[str, Answer]]) -> None:
    expected = pb.AdmitResponse()
    for request_id, answer in batch:
        one = expected.admissions.add(request_id=request_id)
        if isinstance(answer, Granted):
            one.granted.CopyFrom(granted_message(answer))
        elif isinstance(answer, Queued):
            one.queued.position = answer.position
            one.queued.predicted_wait.CopyFrom(duration_of(answer.predicted_wait_seconds))
        else:
            one.refused.CopyFrom(answer.to_detail())
    assert writer.batch(batch) == expected
