"""HTTP plumbing of the routes: bodies with limits, JSON replies, and noticing that the client has gone."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Coroutine, Iterator, Mapping
from typing import Any, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive

from dragoman_gateway.errors import ApiError, envelope, invalid, retry_headers

T = TypeVar("T")
CLIENT_CLOSED_REQUEST = 499
_MAX_EXPLAINED_BYTES = 1 << 20  # a body that is no JSON is read once more to explain why, if it is this small


class ClientGone(Exception):
    """The client closed its connection; nobody will read an answer."""


def json_reply(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON response. Raises when `value` holds something JSON cannot say, such as NaN text that is not a string."""
    return Response(orjson.dumps(value), status, headers=dict(headers or {}), media_type="application/json")


def error_reply(error: ApiError, headers: Mapping[str, str] | None = None) -> Response:
    """The error envelope with its status and retry headers."""
    return Response(
        envelope(error),
        error.status,
        headers={**retry_headers(error), **(headers or {})},
        media_type="application/json",
    )


async def read_body(request: Request, max_bytes: int, timeout_seconds: float) -> bytes:
    """The body. Raises ApiError 413 over `max_bytes`, 408 when it has not all come in time; ClientGone."""
    too_large = ApiError(
        413,
        f"the request body is over the limit of {max_bytes} bytes; send less in one request",
        code="request_too_large",
    )
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise too_large
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout_seconds):
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                chunk = message.get("body", b"")
                size += len(chunk)
                if size > max_bytes:
                    raise too_large
                chunks.append(chunk)
                if not message.get("more_body", False):
                    return chunks[0] if len(chunks) == 1 else b"".join(chunks)
    except TimeoutError:
        raise ApiError(
            408,
            f"the request body did not arrive within {timeout_seconds:g} s ({size} bytes came); send it faster",
            type="timeout",
            code="timeout",
            retryable=True,
        ) from None


def parse_json_object(body: bytes) -> dict[str, Any]:
    """The body as a JSON object, read strictly: no NaN, no lone surrogates, no trailing text. Raises ApiError 400."""
    if not body:
        raise invalid("the request body is empty; send a JSON object", code="invalid_json")
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        path = _path_of_no_number(body)
        if path:
            raise invalid(f"{path}: the number must be finite; JSON has no NaN and no infinity", path) from None
        raise invalid(f"the request body is not valid JSON: {error}; correct it", code="invalid_json") from None
    if not isinstance(value, dict):
        kind = {list: "a list", str: "a string", bool: "true or false", type(None): "null"}.get(type(value), "a number")
        raise invalid(f"the request body must be a JSON object, not {kind}", code="invalid_json")
    return value


def _path_of_no_number(body: bytes) -> str | None:
    """Path of the first NaN or infinity (1e400 is one) of a body that is a JSON object but for those, else None."""
    if len(body) > _MAX_EXPLAINED_BYTES:
        return None
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    open_parts = [_parts(value)]
    names: list[str] = []  # of the parts that are open, and of the one looked at
    while open_parts:
        del names[len(open_parts) - 1 :]
        part = next(open_parts[-1], None)
        if part is None:
            open_parts.pop()
            continue
        name, item = part
        names.append(name)
        if isinstance(item, float) and not math.isfinite(item):
            return "".join(names).removeprefix(".")[:256]
        if isinstance(item, (dict, list)):
            open_parts.append(_parts(item))
    return None


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """The values in a list or an object, each with its step of the path."""
    if isinstance(value, dict):
        return ((f".{key[:64]}", item) for key, item in value.items())
    return ((f"[{index}]", item) for index, item in enumerate(value if isinstance(value, list) else ()))


async def client_gone(receive: Receive) -> None:
    """Returns when the client has closed its connection. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes first. Raises ClientGone then."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(client_gone(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
