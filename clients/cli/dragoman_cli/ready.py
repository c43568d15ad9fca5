"""Is it really serving? One token through the gateway, and the box that says what is served and how to use it."""

from __future__ import annotations

import asyncio
import http.client
import json
import shlex
import time
from dataclasses import asdict, dataclass
from typing import Any

from dragoman_cli.failure import Failure

_PROOF_SECONDS = 30.0
_PROMPT = "Once upon a time"
_SIZES = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True, slots=True)
class Summary:
    """What is served; `--json-summary` prints exactly these."""

    model: str
    num_parameters: int
    weight_bytes: int
    road: str
    road_reason: str
    kv_dtype: str
    device: str
    device_kind: str
    device_reason: str
    rejected_devices: tuple[str, ...]
    profile: str
    profile_reason: str
    switches_off: str
    max_context_tokens: int
    num_kv_tokens: int
    max_num_seqs: int
    sampling_defaults: str
    chat_problem: str
    http_url: str
    controller: str
    agent: str
    metrics_urls: tuple[str, ...]
    first_token: str
    elapsed_seconds: float
    curl: str

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self), ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Proof:
    """What came through the gateway."""

    first_token: str
    chat_problem: str = ""  # why the model takes plain prompts only, as one without a chat template does


def _asked(message: str, with_chat: bool) -> tuple[str, dict[str, Any]]:
    """The path that answers, and what it is asked: `message` in a chat, else a plain prompt."""
    if with_chat:
        return "/v1/chat/completions", {"messages": [{"role": "user", "content": message}]}
    return "/v1/completions", {"prompt": _PROMPT}


def build_curl(http_url: str, model: str, *, with_key: bool = False, with_chat: bool = True) -> str:
    """A command to paste that streams an answer. A key is named by its variable, never shown."""
    path, asked = _asked("Hello! Who are you?", with_chat)
    body = {"model": model, **asked, "max_tokens": 64, "stream": True}
    key = ' -H "Authorization: Bearer $DRAGOMAN_API_KEY"' if with_key else ""
    data = shlex.quote(json.dumps(body))
    return f"curl -sN {http_url}{path} -H 'Content-Type: application/json'{key} -d {data}"


async def prove_token(host: str, port: int, model: str, api_key: str = "") -> Proof:
    """Asks the gateway for one token until it comes; one of a plain prompt where the model cannot lay out a chat.

    Raises Failure after 30 s or a final refusal.
    """
    deadline = time.monotonic() + _PROOF_SECONDS
    chat_problem = ""
    while True:
        status, body = await asyncio.to_thread(
            _ask, host, port, model, api_key, deadline - time.monotonic(), not chat_problem
        )
        if status == 200:
            usage = body.get("usage") or {}
            if usage.get("completion_tokens", 0) < 1:
                raise Failure("the gateway answered without a token", json.dumps(body)[:300])
            choice = body["choices"][0]
            return Proof(str(choice["text"] if chat_problem else choice["message"].get("content") or ""), chat_problem)
        error = body.get("error") or {}
        message = str(error.get("message") or json.dumps(body)[:300])
        if status == 400 and error.get("code") == "template_error" and not chat_problem:
            chat_problem = message
            continue
        # The gateway may not have heard of the agent yet; anything else will not change by waiting.
        if status not in (0, 404, 429, 503) or time.monotonic() > deadline:
            raise Failure(f"no token came through the gateway (HTTP {status})", message)
        await asyncio.sleep(0.1)


def _ask(host: str, port: int, model: str, api_key: str, timeout: float, with_chat: bool) -> tuple[int, dict[str, Any]]:
    path, asked = _asked("Hi", with_chat)
    body = {"model": model, **asked, "max_tokens": 1, "temperature": 0}
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    connection = http.client.HTTPConnection(host, port, timeout=max(timeout, 0.1))
    try:
        connection.request("POST", path, json.dumps(body), headers)
        response = connection.getresponse()
        answer = json.loads(response.read() or b"{}")
        return response.status, answer if isinstance(answer, dict) else {}
    except (OSError, http.client.HTTPException, ValueError) as error:
        return 0, {"error": {"message": str(error) or type(error).__name__}}
    finally:
        connection.close()


async def read_facts(agent: str, agent_id: str = "") -> dict[str, Any]:
    """Device, reasons and plan, as the agent itself tells them over gRPC; with TLS its certificate names its id.

    Raises DragomanError.
    """
    from dragoman.ticket import CALL_SECONDS, Channels, ask_agent
    from dragoman.tls import environment_credentials
    from dragoman.v1 import hardware_service_pb2 as pb
    from dragoman.v1 import hardware_service_pb2_grpc

    channels = Channels(environment_credentials())
    try:
        stub = hardware_service_pb2_grpc.HardwareServiceStub(channels.get(agent, agent_id))
        hardware = await ask_agent(agent, lambda: stub.GetHardware(pb.GetHardwareRequest(), timeout=CALL_SECONDS))
        planned = await ask_agent(agent, lambda: stub.GetPlan(pb.GetPlanRequest(), timeout=CALL_SECONDS))
    finally:
        await channels.close()
    plan: dict[str, Any] = {}
    for entry in planned.plan.fields:
        kind = entry.WhichOneof("value")
        plan[entry.name] = getattr(entry, kind) if kind else None
    decided = {choice.subject: choice for choice in planned.decisions}
    profile = decided.get("profile")
    chosen = [candidate for candidate in hardware.candidates if candidate.chosen]
    return {
        "model": planned.plan.model,
        "device": chosen[0].device.name if chosen else hardware.profile.device.name,
        "device_kind": chosen[0].device.kind if chosen else hardware.profile.device.kind,
        "device_reason": chosen[0].reason if chosen else "",
        "rejected_devices": tuple(
            f"{candidate.device.name} ({candidate.device.kind}): {candidate.reason}"
            for candidate in hardware.candidates
            if not candidate.chosen
        ),
        "profile": profile.chosen if profile else "",
        "profile_reason": profile.reason if profile else "",
        "switches_off": decided["switches"].chosen if "switches" in decided else "",
        "road": plan.get("road") or "",
        # How it computes may be a slow last resort; the reason says so.
        "road_reason": decided["road"].reason if "road" in decided else "",
        "kv_dtype": plan.get("kv_dtype") or "",
        "max_context_tokens": int(plan.get("max_context_tokens") or 0),
        # Block 0 is never handed out.
        "num_kv_tokens": int((plan.get("num_blocks") or 1) - 1) * int(plan.get("page_size") or 0),
        "max_num_seqs": int(plan.get("max_num_seqs") or 0),
        "weight_bytes": next((line.size_bytes for line in planned.plan.memory if line.name == "weights"), 0),
    }


def human_bytes(size: float) -> str:
    """Such as "93.8 MiB"."""
    for unit in _SIZES:
        if size < 1024 or unit == _SIZES[-1]:
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def human_count(number: int) -> str:
    """Such as "135M"."""
    for limit, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= limit:
            return f"{number / limit:.3g}{letter}"
    return str(number)
