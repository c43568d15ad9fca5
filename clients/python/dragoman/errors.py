"""The exceptions of Dragoman. Reasons, codes, HTTP statuses and retryability come from the one catalogue in error.proto.

DragomanError
└── one instance a failure, with .reason, .message, .retryable, .retry_delay, .http_status, .grpc_code, .metadata
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import grpc

from dragoman.durations import duration_of, seconds_of
from dragoman.v1 import error_pb2
from dragoman.v1.error_pb2 import ErrorReason

ERROR_METADATA_KEY = "dragoman-error-bin"
_PREFIX = "ERROR_REASON_"
_GRPC_CODES = {code.value[0]: code for code in grpc.StatusCode}


@dataclass(frozen=True, slots=True)
class Traits:
    """What a reason means to each protocol."""

    reason: ErrorReason
    grpc_code: grpc.StatusCode
    http_status: int
    retryable: bool
    openai_type: str
    openai_code: str | None
    remedy: str


@cache
def traits(reason: ErrorReason) -> Traits:
    """The catalogue's entry of a reason. A number this version does not know counts as INTERNAL."""
    values = error_pb2.ErrorReason.DESCRIPTOR.values_by_number
    descriptor = values.get(reason) or values[error_pb2.ERROR_REASON_INTERNAL]
    extensions: Any = descriptor.GetOptions().Extensions  # the stubs type an extension as a plain descriptor
    entry: error_pb2.ErrorTraits = extensions[error_pb2.traits]
    return Traits(
        reason=reason,
        grpc_code=_GRPC_CODES[entry.grpc_code],
        http_status=entry.http_status,
        retryable=entry.retryable,
        openai_type=entry.openai_type,
        openai_code=entry.openai_code or None,
        remedy=entry.remedy,
    )


def reason_name(reason: ErrorReason) -> str:
    """The reason without its prefix, in lower case: a label for metrics and logs."""
    values = error_pb2.ErrorReason.DESCRIPTOR.values_by_number
    return values[reason].name.removeprefix(_PREFIX).lower() if reason in values else f"unknown_{int(reason)}"


class DragomanError(Exception):
    """A failure with a reason of the catalogue. `message` says what happened, why, and what to do."""

    def __init__(
        self,
        reason: ErrorReason,
        message: str,
        *,
        retry_delay: float | None = None,
        metadata: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.retry_delay = retry_delay
        self.metadata = dict(metadata or {})

    @property
    def reason_name(self) -> str:
        """Such as "queue_full"."""
        return reason_name(self.reason)

    @property
    def retryable(self) -> bool:
        """Whether the same request may succeed later or elsewhere."""
        return traits(self.reason).retryable

    @property
    def grpc_code(self) -> grpc.StatusCode:
        """Canonical code of the reason."""
        return traits(self.reason).grpc_code

    @property
    def http_status(self) -> int:
        """HTTP status of the reason."""
        return traits(self.reason).http_status

    def to_detail(self) -> error_pb2.ErrorDetail:
        """The message for trailing metadata or for a failed event."""
        detail = error_pb2.ErrorDetail(reason=self.reason, message=self.message, metadata=self.metadata)
        if self.retry_delay is not None:
            detail.retry_delay.CopyFrom(duration_of(self.retry_delay))
        return detail

    @classmethod
    def from_detail(cls, detail: error_pb2.ErrorDetail) -> DragomanError:
        """The exception of a received detail."""
        delay = seconds_of(detail.retry_delay) if detail.HasField("retry_delay") else None
        return cls(detail.reason, detail.message, retry_delay=delay, metadata=dict(detail.metadata))

    def __repr__(self) -> str:
        return f"DragomanError({self.reason_name}: {self.message})"


def in_short(text: str, max_num_bytes: int = 1000) -> str:
    """`text` in at most so many bytes of UTF-8: a message may quote what a caller sent, and trailers hold some 8 KiB."""
    data = text.encode("utf-8", "replace")
    return data.decode() if len(data) <= max_num_bytes else data[: max_num_bytes - 3].decode("utf-8", "ignore") + "..."


def error_metadata(error: DragomanError) -> tuple[tuple[str, bytes], ...]:
    """Trailing metadata that carries the detail."""
    return ((ERROR_METADATA_KEY, error.to_detail().SerializeToString()),)


_FALLBACK_REASONS = {
    grpc.StatusCode.CANCELLED: error_pb2.ERROR_REASON_CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED: error_pb2.ERROR_REASON_DEADLINE_EXCEEDED,
    grpc.StatusCode.INVALID_ARGUMENT: error_pb2.ERROR_REASON_INVALID_REQUEST,
    grpc.StatusCode.UNIMPLEMENTED: error_pb2.ERROR_REASON_UNIMPLEMENTED,
    grpc.StatusCode.UNAVAILABLE: error_pb2.ERROR_REASON_AGENT_LOST,
    grpc.StatusCode.RESOURCE_EXHAUSTED: error_pb2.ERROR_REASON_REQUEST_TOO_LARGE,
    grpc.StatusCode.UNAUTHENTICATED: error_pb2.ERROR_REASON_INVALID_API_KEY,
    grpc.StatusCode.PERMISSION_DENIED: error_pb2.ERROR_REASON_PERMISSION_DENIED,
    grpc.StatusCode.NOT_FOUND: error_pb2.ERROR_REASON_MODEL_NOT_SERVED,
}


def from_rpc_error(error: grpc.RpcError) -> DragomanError:
    """The exception behind a failed call: the detail in its trailing metadata, else the nearest reason of its code."""
    trailing: Any = error.trailing_metadata() if hasattr(error, "trailing_metadata") else None
    for key, value in trailing or ():
        if key == ERROR_METADATA_KEY:
            detail = error_pb2.ErrorDetail()
            detail.ParseFromString(value if isinstance(value, bytes) else value.encode())
            return DragomanError.from_detail(detail)
    code = error.code() if hasattr(error, "code") else grpc.StatusCode.UNKNOWN
    text = (error.details() if hasattr(error, "details") else None) or str(code)
    if code is grpc.StatusCode.UNIMPLEMENTED:
        text = f"the server does not have this call ({text}): it is of another version, or not what it is taken for; check its address and version"
    return DragomanError(_FALLBACK_REASONS.get(code, error_pb2.ERROR_REASON_INTERNAL), text)
