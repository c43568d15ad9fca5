"""The OpenAPI document, made from the request models and from the shapes that the routes answer with."""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic.json_schema import models_json_schema

from dragoman_gateway import VERSION
from dragoman_gateway.schema import ChatBody, CompletionBody, DetokenizeBody, EmbeddingBody, TemplateBody, TokenizeBody

_HELLO = [{"role": "user", "content": "Hello"}]
_POSTS: dict[str, tuple[str, type, dict[str, Any], str, bool]] = {
    "/v1/chat/completions": (
        "Continue a chat",
        ChatBody,
        {"messages": _HELLO, "max_tokens": 32},
        "ChatCompletion",
        True,
    ),
    "/v1/completions": ("Continue a text", CompletionBody, {"prompt": "Once", "max_tokens": 32}, "Completion", True),
    "/v1/embeddings": ("Texts to vectors", EmbeddingBody, {"input": ["Once", "Twice"]}, "EmbeddingList", False),
    "/tokenize": ("Text or chat to token ids", TokenizeBody, {"prompt": "Hello"}, "Tokens", False),
    "/detokenize": ("Token ids to text", DetokenizeBody, {"tokens": [72, 105]}, "Prompt", False),
    "/apply-template": (
        "A chat as the model's template lays it out",
        TemplateBody,
        {"messages": _HELLO},
        "Prompt",
        False,
    ),
}
_GETS = {
    "/v1/models": ("Models that are served", "ModelList"),
    "/v1/models/{id}": ("One model", "Model"),
    "/v1/server/info": ("Version, limits, agents", "Object"),
    "/health": ("200 while an agent takes requests", "Health"),
    "/ready": ("As /health", "Health"),
    "/version": ("Version of the gateway", "Object"),
    "/metrics": ("Metrics for Prometheus", None),
    "/openapi.json": ("This document", "Object"),
    "/docs": ("This document, for people", None),
}
_OPEN = ("/health", "/ready", "/version", "/metrics", "/openapi.json", "/docs")


def _object(required: dict[str, Any], optional: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"type": "object", "required": list(required), "properties": {**required, **(optional or {})}}


_INTEGER, _STRING = {"type": "integer"}, {"type": "string"}
_NULLABLE_STRING = {"type": ["string", "null"]}
_NULLABLE_OBJECT = {"type": ["object", "null"]}


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _list_of(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


_FINISH = {"type": ["string", "null"], "enum": ["stop", "length", None]}
_CHOICE = {"index": _INTEGER, "logprobs": _NULLABLE_OBJECT, "finish_reason": _FINISH}
_COMMON = {"id": _STRING, "object": _STRING, "created": _INTEGER, "model": _STRING}
_ANSWERS: dict[str, Any] = {
    "Error": _object(
        {"error": _object({"message": _STRING, "type": _STRING, "param": _NULLABLE_STRING, "code": _NULLABLE_STRING})}
    ),
    "Usage": _object({"prompt_tokens": _INTEGER, "completion_tokens": _INTEGER, "total_tokens": _INTEGER}),
    "ChatCompletion": _object(
        {
            **_COMMON,
            "choices": _list_of(
                _object({**_CHOICE, "message": _object({"role": _STRING, "content": _NULLABLE_STRING})})
            ),
            "usage": _ref("Usage"),
        }
    ),
    "Completion": _object(
        {**_COMMON, "choices": _list_of(_object({**_CHOICE, "text": _STRING})), "usage": _ref("Usage")}
    ),
    "EmbeddingList": _object(
        {
            "object": _STRING,
            "data": _list_of(
                _object({"object": _STRING, "index": _INTEGER, "embedding": {"type": ["array", "string"]}})
            ),
            "model": _STRING,
            "usage": _object({"prompt_tokens": _INTEGER, "total_tokens": _INTEGER}),
        }
    ),
    "Model": _object({"id": _STRING, "object": _STRING, "created": _INTEGER, "owned_by": _STRING}),
    "ModelList": _object({"object": _STRING, "data": _list_of(_ref("Model"))}),
    "Health": _object({"status": _STRING, "phase": _STRING}),
    "Tokens": _object({"tokens": _list_of(_INTEGER), "count": _INTEGER, "max_model_len": _INTEGER}),
    "Prompt": _object({"prompt": _STRING}),
    "Object": {"type": "object"},
}
_ERROR_STATUSES = {
    "400": "The request is wrong",
    "401": "The API key is missing or wrong",
    "404": "The model or the route is unknown",
    "405": "The route does not take this method",
    "408": "The body did not arrive in time",
    "413": "The body is too large",
    "429": "The queue is full; see retry-after",
    "500": "A fault of the server",
    "503": "Nothing can serve this now; see retry-after",
    "504": "The deadline passed",
}


@cache
def openapi() -> dict[str, Any]:
    """The document, OpenAPI 3.1."""
    bodies = [(entry[1], "validation") for entry in _POSTS.values()]
    _, schemas = models_json_schema(bodies, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    paths: dict[str, Any] = {}
    for path, (summary, answer) in _GETS.items():
        paths[path] = {"get": _operation(path, summary, answer, streams=False)}
    for path, (summary, body, example, answer, streams) in _POSTS.items():
        operation = _operation(path, summary, answer, streams=streams)
        content = {"application/json": {"schema": _ref(body.__name__), "example": example}}
        operation["requestBody"] = {"required": True, "content": content}
        paths[path] = {"post": operation}
    paths["/v1/models/{id}"]["get"]["parameters"] = [
        {"name": "id", "in": "path", "required": True, "schema": _STRING, "description": "May hold slashes."}
    ]
    return {
        "openapi": "3.1.0",
        "info": {"title": "Dragoman", "version": VERSION, "license": {"name": "Apache-2.0"}},
        "paths": paths,
        "components": {
            "schemas": {**schemas.get("$defs", {}), **_ANSWERS},
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"bearer": []}, {}],
    }


def _operation(path: str, summary: str, answer: str | None, *, streams: bool) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if answer is not None:
        content["application/json"] = {"schema": _ref(answer)}
    else:
        content["text/html" if path == "/docs" else "text/plain"] = {"schema": _STRING}
    if streams:
        # OpenAPI 3.1 has no schema for events.
        content["text/event-stream"] = {"example": "data: {}\n\ndata: [DONE]\n\n"}
    error = {"application/json": {"schema": _ref("Error")}}
    responses = {"200": {"description": "The answer", "content": content}}
    for status, description in _ERROR_STATUSES.items():
        responses[status] = {"description": description, "content": error}
    if path in ("/health", "/ready"):
        responses["503"] = {"description": "Nothing is served now", "content": content}
    operation: dict[str, Any] = {"summary": summary, "responses": responses}
    if path in _OPEN:
        operation["security"] = []
    return operation
