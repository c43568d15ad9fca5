"""The error envelope: every failure as an HTTP status, four keys, and headers that tell a client whether to retry."""

from __future__ import annotations

import math
from dataclasses import dataclass

import orjson

from dragoman.errors import DragomanError, in_short, traits
from dragoman.v1 import error_pb2

MAX_TEXT_BYTES = 2000  # of a message or a param: either may quote what a caller sent
MIN_RETRY_AFTER_SECONDS = 1
MAX_RETRY_AFTER_SECONDS = 60  # clients give up at once when told more than 120 s
# The gateway's own dealings with the agents; a client that saw "401" or "409" would look for the fault on its side.
_INTERNAL_REASONS = frozenset(
    {
        error_pb2.ERROR_REASON_TICKET_REQUIRED,
        error_pb2.ERROR_REASON_TICKET_INVALID,
        error_pb2.ERROR_REASON_TICKET_EXPIRED,
        error_pb2.ERROR_REASON_TICKET_REPLAYED,
        error_pb2.ERROR_REASON_TICKET_WRONG_AGENT,
        error_pb2.ERROR_REASON_TICKET_MISMATCH,
        error_pb2.ERROR_REASON_DUPLICATE_REQUEST,
        error_pb2.ERROR_REASON_RESUME_REFUSED,
        error_pb2.ERROR_REASON_EPOCH_STALE,
        error_pb2.ERROR_REASON_LEASE_EXPIRED,
    }
)


@dataclass(slots=True)
class ApiError(Exception):
    """A failure as the HTTP client sees it. `retryable` None leaves the decision to the status."""

    status: int
    message: str
    type: str = "invalid_request_error"
    code: str | None = None
    param: str | None = None
    retryable: bool | None = None
    retry_after: float | None = None

    def __str__(self) -> str:
        return self.message


def invalid(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """A 400 for a bad value; `param` is the path of the field."""
    return ApiError(400, message, code=code, param=param)


def unsupported(param: str, why: str) -> ApiError:
    """A 400 for a well-formed field that asks for what this server does not do."""
    return ApiError(400, f"{param}: {why}", code="unsupported_parameter", param=param)


def from_dragoman(error: DragomanError) -> ApiError:
    """The HTTP form of a failure of the catalogue."""
    if error.reason in _INTERNAL_REASONS:
        entry = traits(error_pb2.ERROR_REASON_INTERNAL)
        message = f"the gateway and the agent could not agree on this request ({error.message}); try again"
        return ApiError(503, message, entry.openai_type, error.reason_name, retryable=True, retry_after=1.0)
    entry = traits(error.reason)
    return ApiError(
        status=entry.http_status,
        message=error.message or entry.remedy,
        type=entry.openai_type,
        code=entry.openai_code,
        param=error.metadata.get("param"),
        retryable=entry.retryable,
        retry_after=error.retry_delay,
    )


def envelope(error: ApiError) -> bytes:
    """The JSON body: `error` with message, type, param and code, always all four."""
    param = None if error.param is None else _printable(error.param)
    return orjson.dumps(
        {"error": {"message": _printable(error.message), "type": error.type, "param": param, "code": error.code}}
    )


def retry_headers(error: ApiError) -> dict[str, str]:
    """`retry-after` on 429 and 503, and `x-should-retry` wherever a client would otherwise guess by the status."""
    headers: dict[str, str] = {}
    if error.status in (429, 503):
        wanted = error.retry_after if error.retry_after is not None else 1.0
        headers["retry-after"] = str(min(max(math.ceil(wanted), MIN_RETRY_AFTER_SECONDS), MAX_RETRY_AFTER_SECONDS))
    if error.retryable is not None and (error.status in (408, 409, 429) or error.status >= 500):
        headers["x-should-retry"] = "true" if error.retryable else "false"
    return headers


def _printable(text: str) -> str:
    return in_short(text, MAX_TEXT_BYTES)
