"""How a bad field of a request is refused."""

from __future__ import annotations

from typing import NoReturn

from dragoman.errors import DragomanError
from dragoman.v1 import error_pb2


def invalid(param: str, message: str) -> NoReturn:
    """Refuse a field. `param` is its path in the request."""
    raise DragomanError(error_pb2.ERROR_REASON_INVALID_REQUEST, f"{param}: {message}", metadata={"param": param})
