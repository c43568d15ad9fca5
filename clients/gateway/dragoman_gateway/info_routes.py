"""GET routes: what is served, whether it is, and by whom."""

from __future__ import annotations

from typing import Any

import grpc
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from dragoman.v1 import agent_pb2
from dragoman_gateway import VERSION
from dragoman_gateway.backend import Backend
from dragoman_gateway.docs import DOCS_PAGE
from dragoman_gateway.http import json_reply
from dragoman_gateway.metrics import CONTENT_TYPE
from dragoman_gateway.openapi import openapi

_RETRY_SECONDS = "2"


async def models(request: Request, backend: Backend) -> Response:
    """GET /v1/models."""
    served = reversed(list(backend.fleet.served()))
    entries = {model.model: _model_entry(backend, member, model) for member, model in served}
    return json_reply({"object": "list", "data": [entries[name] for name in sorted(entries)]})


async def model(request: Request, backend: Backend) -> Response:
    """GET /v1/models/{id}; the id may hold slashes."""
    wanted = request.path_params["id"]
    for member, served in backend.fleet.served():
        if served.model == wanted:
            return json_reply(_model_entry(backend, member, served))
    raise backend.models.not_served(wanted)


async def health(request: Request, backend: Backend) -> Response:
    """GET /health and /ready: 200 while an agent takes requests, else 503 with the reason."""
    phase = "shutting_down" if backend.is_draining else backend.fleet.phase
    is_ready = phase == "serving"
    body = {
        "status": "ok" if is_ready else "unavailable",
        "phase": phase,
        "models": backend.fleet.model_names(),
        "agents": [
            {"agent_id": member.agent.agent_id, "state": state_name(member.state)}
            for member in sorted(backend.fleet.members.values(), key=lambda member: member.agent.agent_id)
        ],
    }
    return json_reply(body, 200 if is_ready else 503, {} if is_ready else {"retry-after": _RETRY_SECONDS})


async def version(request: Request, backend: Backend) -> Response:
    """GET /version."""
    return json_reply({"version": VERSION})


async def metrics(request: Request, backend: Backend) -> Response:
    """GET /metrics."""
    serving = sum(m.state == agent_pb2.AGENT_STATE_SERVING for m in backend.fleet.members.values())
    backend.metrics.agents.set(serving)
    return Response(backend.metrics.exposition(), headers={"content-type": CONTENT_TYPE})


async def server_info(request: Request, backend: Backend) -> Response:
    """GET /v1/server/info: version, limits, and each agent with its devices, models and load."""
    settings = backend.settings
    try:
        members = await backend.fleet.current()
    except grpc.aio.AioRpcError:
        members = list(backend.fleet.members.values())  # as last heard; "connected" says so
    return json_reply(
        {
            "version": VERSION,
            "phase": backend.fleet.phase,
            "controller": {"address": backend.controllers.current, "connected": backend.fleet.is_connected},
            "limits": {
                "max_body_bytes": settings.max_body,
                "max_prompts": settings.max_prompts,
                "body_timeout_seconds": settings.body_timeout,
                "ping_seconds": settings.ping_interval,
            },
            "agents": [_agent_entry(member) for member in members],
        }
    )


async def openapi_document(request: Request, backend: Backend) -> Response:
    """GET /openapi.json."""
    return json_reply(openapi())


async def docs(request: Request, backend: Backend) -> Response:
    """GET /docs: a page that needs no other server."""
    return HTMLResponse(DOCS_PAGE)


def state_name(state: int) -> str:
    """Such as "serving"."""
    values = agent_pb2.AgentState.DESCRIPTOR.values_by_number
    return values[state].name.removeprefix("AGENT_STATE_").lower() if state in values else f"unknown_{state}"


def _model_entry(backend: Backend, member: Any, model: agent_pb2.ServedModel) -> dict[str, Any]:
    text = backend.models.known(model)
    return {
        "id": model.model,
        "object": "model",
        "created": member.agent.start_time.seconds,
        "owned_by": "dragoman",
        "max_model_len": model.max_context_tokens,
        "context_window": model.max_context_tokens,
        "digest": model.model_digest.hex(),
        "capabilities": {"completion": True, "chat": text is None or text.template.is_given, "embeddings": True},
    }


def _agent_entry(member: Any) -> dict[str, Any]:
    load = member.load
    devices = [candidate for candidate in member.agent.devices if candidate.chosen]
    return {
        "agent_id": member.agent.agent_id,
        "state": state_name(member.state),
        "version": member.agent.version,
        "devices": [{"name": chosen.device.name, "reason": chosen.reason} for chosen in devices],
        "models": [
            {
                "id": model.model,
                "max_context_tokens": model.max_context_tokens,
                "kv_block_tokens": model.kv_block_tokens,
                "kv_block_count": model.kv_block_count,
                "max_running_requests": model.max_running_requests,
                "max_waiting_requests": model.max_waiting_requests,
                "vocabulary_size": model.vocabulary_size,
            }
            for model in member.agent.models
        ],
        "running_requests": load.running_requests,
        "waiting_requests": load.waiting_requests,
        "free_kv_blocks": load.free_kv_blocks,
    }
