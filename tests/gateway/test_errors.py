"""The envelope and the headers that tell a client whether to retry, for every reason of the catalogue."""

from __future__ import annotations

import json

import pytest

from dragoman.errors import DragomanError, traits
from dragoman.v1 import error_pb2
from dragoman_gateway.errors import ApiError, envelope, from_dragoman, invalid, retry_headers

REASONS = [value.number for value in error_pb2.ErrorReason.DESCRIPTOR.values if value.number]


@pytest.mark.parametrize("reason", REASONS)
def test_every_reason_has_four_keys_and_a_status(reason: error_pb2.ErrorReason) -> None:
    error = from_dragoman(DragomanError(reason, "why", retry_delay=500.0, metadata={"param": "x.y"}))
    body = json.loads(envelope(error))["error"]
    assert body.keys() == {"message", "type", "param", "code"}
    assert "why" in body["message"]
    assert 400 <= error.status <= 504
    headers = retry_headers(error)
    if error.status in (429, 503):
        assert 1 <= int(headers["retry-after"]) <= 60
    if error.status >= 500:
        assert headers["x-should-retry"] in ("true", "false")


@pytest.mark.parametrize("reason", [r for r in REASONS if "TICKET" in error_pb2.ErrorReason.Name(r)])
def test_a_ticket_fault_is_never_blamed_on_the_client(reason: error_pb2.ErrorReason) -> None:
    assert traits(reason).http_status < 500
    assert from_dragoman(DragomanError(reason, "why")).status == 503


@pytest.mark.parametrize(("delay", "shown"), [(None, 1), (0.0, 1), (1.2, 2), (59.5, 60), (3600.0, 60)])
def test_retry_after_stays_where_clients_obey_it(delay: float | None, shown: int) -> None:
    error = ApiError(503, "x", retryable=True, retry_after=delay)
    assert retry_headers(error)["retry-after"] == str(shown)


def test_a_client_mistake_has_no_retry_header() -> None:
    assert retry_headers(invalid("x", "y")) == {}


def test_a_message_that_quotes_a_whole_body_is_shortened() -> None:
    data = envelope(invalid("x" * 10_000_000, "y" * 10_000_000))
    assert len(data) < 5000 and json.loads(data)["error"]["message"].endswith("x...")


def test_a_message_that_is_no_unicode_is_still_sent() -> None:
    assert json.loads(envelope(invalid("bad \udc8d")))["error"]["message"] == "bad ?"
