"""The ASGI application: routes, and around them request ids, CORS, keys, and the envelope for every failure."""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from dragoman.errors import DragomanError
from dragoman_gateway import info_routes, text_routes
from dragoman_gateway.backend import Backend
from dragoman_gateway.chat import chat_completions
from dragoman_gateway.completions import completions
from dragoman_gateway.embeddings import embeddings
from dragoman_gateway.errors import ApiError, from_dragoman
from dragoman_gateway.http import CLIENT_CLOSED_REQUEST, ClientGone, error_reply, parse_json_object, read_body
from dragoman_gateway.requests import outcome_of
from dragoman_gateway.streaming import SEND_KEY, internal_error
from dragoman_gateway.tenants import ApiKeys, tenant_of

logger = logging.getLogger(__name__)

MAX_REQUEST_ID_CHARS = 128
_REQUEST_ID = re.compile(r"[\x21-\x7e]+")
_SLASHES = re.compile(r"/{2,}")
_KEYLESS_PATHS = frozenset({"/", "/health", "/ready", "/version", "/metrics", "/openapi.json", "/docs"})
_ALLOWED_METHODS = b"GET, HEAD, POST, OPTIONS"
_KNOWN_REQUEST_HEADERS = (
    "authorization, content-type, x-api-key, x-dragoman-tenant, x-request-id, idempotency-key, openai-organization, openai-project, "
    "x-stainless-lang, x-stainless-package-version, x-stainless-os, x-stainless-arch, x-stainless-runtime, "
    "x-stainless-runtime-version, x-stainless-retry-count, x-stainless-timeout, x-stainless-async, "
    "x-stainless-read-timeout, x-stainless-raw-response, x-stainless-helper-method"
)
_EXPOSED_HEADERS = (
    b"x-request-id, retry-after, x-should-retry, x-ignored-params, x-dragoman-agent, x-dragoman-request-id, "
    b"x-dragoman-quote-ttft-ms, x-dragoman-quote-tpot-ms, x-dragoman-quote-finish-ms"
)
# Their requests are counted from the first byte on, also those that end before there is a job.
GENERATION_ROUTES = {"/v1/chat/completions": "chat", "/v1/completions": "completions", "/v1/embeddings": "embeddings"}

Handler = Callable[[Request, Backend, dict[str, Any]], Awaitable[Response]]
Reader = Callable[[Request, Backend], Awaitable[Response]]


class GatewayApp:
    """The outermost layer: what holds for every response, also for those that no route made."""

    def __init__(self, backend: Backend, api_keys: ApiKeys) -> None:
        self._backend = backend
        self._api_keys = api_keys
        self._routes = build_routes(backend)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)
        request_id = _request_id(headers.get("x-request-id"))
        scope.setdefault("state", {})["request_id"] = request_id
        scope[SEND_KEY] = send
        scope["path"] = _SLASHES.sub("/", scope["path"]).rstrip("/") or "/"
        started = False

        async def send_with_headers(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                self._backend.metrics.responses.labels(str(message["status"])).inc()
                message["headers"] = [*message["headers"], *_common_headers(request_id)]
            await send(message)

        try:
            if scope["method"] == "OPTIONS":
                await _preflight(headers)(scope, receive, send_with_headers)
            elif refusal := self._refusal(scope, headers):
                await refusal(scope, receive, send_with_headers)
            else:
                await self._routes(scope, receive, send_with_headers)
        except Exception:
            logger.exception("request %s failed", request_id)
            if not started:
                await error_reply(internal_error())(scope, receive, send_with_headers)
            else:
                raise

    def _refusal(self, scope: Scope, headers: Headers) -> Response | None:
        """Why the request may not go on; None where it may, and its tenant is known then."""
        scope["state"]["tenant"] = ""
        if scope["path"] in _KEYLESS_PATHS:
            return None
        tenant = self._api_keys.find(headers) if self._api_keys else ""
        if tenant is None:
            message = "the API key is missing or wrong; send it as a bearer token or in x-api-key"
            return error_reply(ApiError(401, message, code="invalid_api_key"), {"www-authenticate": "Bearer"})
        try:
            scope["state"]["tenant"] = tenant_of(tenant, headers)
        except ApiError as error:
            return error_reply(error)
        return None


def build_routes(backend: Backend) -> Starlette:
    """The routes. A path has one route, so that a wrong method is told which are right."""

    def post(handler: Handler, *, generates: bool = False) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            return await _guarded(request, lambda: _handle_post(request, backend, handler, generates=generates))

        return endpoint

    def get(reader: Reader) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            return await _guarded(request, lambda: reader(request, backend))

        return endpoint

    routes = [
        Route("/v1/chat/completions", post(chat_completions, generates=True), methods=["POST"]),
        Route("/v1/completions", post(completions, generates=True), methods=["POST"]),
        Route("/v1/embeddings", post(embeddings, generates=True), methods=["POST"]),
        Route("/v1/models", get(info_routes.models), methods=["GET"]),
        Route("/v1/models/{id:path}", get(info_routes.model), methods=["GET"]),
        Route("/v1/server/info", get(info_routes.server_info), methods=["GET"]),
        Route("/tokenize", post(text_routes.tokenize), methods=["POST"]),
        Route("/detokenize", post(text_routes.detokenize), methods=["POST"]),
        Route("/apply-template", post(text_routes.apply_template), methods=["POST"]),
        Route("/health", get(info_routes.health), methods=["GET"]),
        Route("/ready", get(info_routes.health), methods=["GET"]),
        Route("/version", get(info_routes.version), methods=["GET"]),
        Route("/metrics", get(info_routes.metrics), methods=["GET"]),
        Route("/openapi.json", get(info_routes.openapi_document), methods=["GET"]),
        Route("/docs", get(info_routes.docs), methods=["GET"]),
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _http_exception})
    app.router.redirect_slashes = False
    return app


async def _handle_post(request: Request, backend: Backend, handler: Handler, *, generates: bool) -> Response:
    try:
        return await _answer_post(request, backend, handler, generates=generates)
    except (ClientGone, ApiError, DragomanError) as error:
        route = GENERATION_ROUTES.get(request.scope["path"])
        if route is not None and not getattr(request.state, "has_job", False):
            outcome = "cancelled" if isinstance(error, ClientGone) else outcome_of(error)
            backend.metrics.requests.labels(route, outcome).inc()
        raise


async def _answer_post(request: Request, backend: Backend, handler: Handler, *, generates: bool) -> Response:
    settings = backend.settings
    body = await read_body(request, settings.max_body, settings.body_timeout)
    if generates and backend.is_draining:
        raise ApiError(
            503,
            "the gateway is shutting down; try again",
            type="server_error",
            code="shutting_down",
            retryable=True,
            retry_after=2.0,
        )
    return await handler(request, backend, parse_json_object(body))


async def _guarded(request: Request, work: Callable[[], Awaitable[Response]]) -> Response:
    """The response of `work`, or the envelope of what it raised."""
    try:
        return await work()
    except ClientGone:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    except ApiError as error:
        # The rest of a body that came too slowly would be read as the next request.
        return error_reply(error, {"connection": "close"} if error.status == 408 else None)
    except DragomanError as error:
        return error_reply(from_dragoman(error))
    except Exception:
        logger.exception("request %s failed", request.state.request_id)
        return error_reply(internal_error())


async def _http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    if error.status_code == 405:
        allowed = headers.get("Allow", "")
        message = f"{request.method} is not allowed on {request.url.path}; use {allowed}"
        return error_reply(ApiError(405, message, code="method_not_allowed"), headers)
    path = request.url.path if len(request.url.path) <= 200 else request.url.path[:197] + "..."
    message = f"there is no route {request.method} {path}; GET /docs lists the routes"
    return error_reply(ApiError(error.status_code, message, code="route_not_found"), headers)


def _request_id(given: str | None) -> str:
    shown = (given or "")[:MAX_REQUEST_ID_CHARS]
    return shown if _REQUEST_ID.fullmatch(shown) else f"req_{uuid.uuid4().hex}"


def _common_headers(request_id: str) -> list[tuple[bytes, bytes]]:
    return [
        (b"x-request-id", request_id.encode()),
        (b"access-control-allow-origin", b"*"),
        (b"access-control-expose-headers", _EXPOSED_HEADERS),
    ]


def _preflight(headers: Headers) -> Response:
    asked = headers.get("access-control-request-headers", "")
    allowed = asked if asked and len(asked) <= 4096 else _KNOWN_REQUEST_HEADERS
    return Response(
        status_code=204,
        headers={
            "access-control-allow-methods": _ALLOWED_METHODS.decode(),
            "access-control-allow-headers": allowed,
            "access-control-max-age": "86400",
        },
    )
