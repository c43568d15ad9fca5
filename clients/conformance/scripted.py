"""A controller and agents that play what a case has written, to do on the wire what real ones cannot be made to do."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import struct
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, cast

import grpc

from dragoman.channel import server_options
from dragoman.durations import seconds_of
from dragoman.errors import DragomanError, error_metadata
from dragoman.v1 import admission_service_pb2 as admission_pb
from dragoman.v1 import error_pb2
from dragoman.v1 import generation_service_pb2 as pb

Raw = AsyncIterator[bytes]
_HANG_SECONDS = 60.0
_PADDING = "x" * 200  # of a flooded token, so that few of them fill a window
# Fields that no version has: number 4000 as a varint, and 4001 as a text of 4 bytes.
_UNKNOWN_FIELDS = b"\x80\xfa\x01\x2a\x8a\xfa\x01\x04new!"
_UNKNOWN_EVENT = b"\xfa\x7d\x02\x08\x01"  # GenerateResponse with field 2015, a message


@dataclass
class ScriptedStage:
    """Owner of the servers of one case, and of what they saw."""

    arguments: dict[str, Any]
    tls: Any = None  # certificates, see tls.py
    addresses: list[str] = field(default_factory=list)
    controllers: list[str] = field(default_factory=list)
    asks: list[dict[str, Any]] = field(default_factory=list)
    generates: list[dict[str, Any]] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    num_cancelled: int = 0
    num_flooded: int = 0
    _servers: list[grpc.aio.Server] = field(default_factory=list)
    _scripts: list[list[list[Any]]] = field(default_factory=list)
    _grants: list[Any] = field(default_factory=list)

    async def start(self) -> None:
        """Serves on free ports."""
        self._scripts = [list(scripts) for scripts in self.arguments["agents"]]
        self._grants = list(self.arguments.get("grants", []))
        for index in range(len(self._scripts)):
            generate: Any = grpc.unary_stream_rpc_method_handler(
                self._generate_of(index), request_deserializer=pb.GenerateRequest.FromString
            )
            cancel = grpc.unary_unary_rpc_method_handler(
                self._cancel, pb.CancelGenerationRequest.FromString, pb.CancelGenerationResponse.SerializeToString
            )
            handlers = {"Generate": generate, "CancelGeneration": cancel}
            self.addresses.append(await self._serve("dragoman.v1.GenerationService", handlers, f"agent-{index}"))
        release = grpc.unary_unary_rpc_method_handler(
            self._release,
            admission_pb.ReleaseTicketRequest.FromString,
            admission_pb.ReleaseTicketResponse.SerializeToString,
        )
        for index in range(self.arguments.get("num_controllers", 1)):
            acquire = grpc.unary_unary_rpc_method_handler(
                functools.partial(self._acquire, index),
                admission_pb.AcquireTicketRequest.FromString,
                admission_pb.AcquireTicketResponse.SerializeToString,
            )
            handlers = {"AcquireTicket": acquire, "ReleaseTicket": release}
            self.controllers.append(await self._serve("dragoman.v1.AdmissionService", handlers, "controller"))

    async def stop(self) -> None:
        """Stops every server now."""
        await asyncio.gather(*(server.stop(0) for server in self._servers))

    def document(self) -> dict[str, Any]:
        """What the servers saw, for `expect_stage`."""
        return {
            "asks": self.asks,
            "generates": self.generates,
            "released": sorted(self.released),
            "num_cancelled": self.num_cancelled,
            "num_flooded": self.num_flooded,
        }

    async def _serve(self, service: str, handlers: dict[str, Any], who: str) -> str:
        server = grpc.aio.server(options=server_options())
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        if self.tls is None:
            port = server.add_insecure_port("127.0.0.1:0")
        else:
            name = self.arguments.get("certificate_names", {}).get(who, who)
            port = server.add_secure_port("127.0.0.1:0", self.tls.server_credentials(name))
        await server.start()
        self._servers.append(server)
        return f"127.0.0.1:{port}"

    def _ticket(self, index: int) -> admission_pb.Ticket:
        return admission_pb.Ticket(
            token=f"agent-{index}/{len(self.asks)}".encode(),
            data_address=self.addresses[index],
            agent_id=f"agent-{index}",
            epoch=100 + index,
        )

    async def _acquire(self, index: int, request: Any, context: Any) -> admission_pb.AcquireTicketResponse:
        now, number = time.monotonic(), len(self.asks)
        before = self.asks[-1]["time"] if self.asks else now
        self.asks.append({"controller": index, **_ask_document(request, now, before)})
        step: Any = self._grants.pop(0) if self._grants else min(number, len(self.addresses) - 1)
        if isinstance(step, dict) and "refuse" in step:
            await _refuse(context, step)
        if isinstance(step, dict) and "wait" in step:
            await asyncio.sleep(step["wait"])
            step = 0
        first, second = step if isinstance(step, list) else (step, None)
        return admission_pb.AcquireTicketResponse(
            ticket=self._ticket(first), fallback_ticket=None if second is None else self._ticket(second)
        )

    async def _release(self, request: Any, _context: Any) -> admission_pb.ReleaseTicketResponse:
        self.released.append(request.token.decode())
        return admission_pb.ReleaseTicketResponse()

    async def _cancel(self, _request: Any, _context: Any) -> pb.CancelGenerationResponse:
        return pb.CancelGenerationResponse()

    def _generate_of(self, index: int) -> Callable[[pb.GenerateRequest, Any], Raw]:
        async def generate(request: pb.GenerateRequest, context: Any) -> Raw:
            self.generates.append(_generate_document(index, request))
            scripts = self._scripts[index]
            script = scripts.pop(0) if len(scripts) > 1 else scripts[0]
            has_ended = False
            try:
                async for raw in self._play(script, 100 + index, request, context):
                    has_ended = pb.GenerateResponse.FromString(raw).WhichOneof("event") in ("finished", "failed")
                    yield raw
            except (asyncio.CancelledError, GeneratorExit):
                self.num_cancelled += not has_ended  # a client may leave once it has the last event
                raise

        return generate

    async def _play(self, script: list[Any], epoch: int, request: pb.GenerateRequest, context: Any) -> Raw:
        """Each step of a script; the README of this folder lists them."""
        cursors: dict[int, int] = {}
        tail = b""
        for step in script:
            name, argument = _step(step)
            options = step if isinstance(step, dict) else {}
            if name == "unknown_fields":
                tail = _UNKNOWN_FIELDS
            elif name == "started":
                yield _started(epoch, options, request).SerializeToString() + tail
            elif name == "tokens":
                yield _delta(argument, options, cursors).SerializeToString() + tail
            elif name == "finished":
                yield _finished(argument or 0).SerializeToString() + tail
            elif name == "failed":
                yield _failed(argument, options).SerializeToString() + tail
            elif name == "unknown_event":
                yield _UNKNOWN_EVENT
            elif name == "go_on":
                for response in _go_on(argument or 6, request, epoch):
                    yield response.SerializeToString() + tail
            elif name == "flood":
                for cursor in range(argument):
                    last = cursor == argument - 1
                    yield _delta(
                        [7], {"text": _PADDING, "finish": "length" if last else None}, cursors
                    ).SerializeToString()
                    self.num_flooded = cursor + 1
            elif name == "wait":
                await asyncio.sleep(argument)
            elif name == "hang":
                await asyncio.sleep(_HANG_SECONDS)
            elif name == "lose":
                await context.abort(grpc.StatusCode.UNAVAILABLE, "connection reset")
            elif name == "status":
                await context.abort(grpc.StatusCode[argument], options.get("message", "no detail"))
            elif name == "refuse":
                await _refuse(context, options)
            else:
                raise ValueError(f"a script has no step {name!r}")


def _step(step: Any) -> tuple[str, Any]:
    """Name and argument: a step is a name, or a mapping that begins with it."""
    if isinstance(step, str):
        return step, None
    name, argument = next(iter(step.items()))
    return str(name), argument


def _ask_document(request: admission_pb.AcquireTicketRequest, now: float, before: float) -> dict[str, Any]:
    resume = request.resume
    return {
        "time": now,
        "gap_seconds": now - before,
        "request_id": request.request_id,
        "model": request.model,
        "tenant": request.tenant,
        "prompt_bytes": request.prompt_bytes,
        "prompt_tokens": request.prompt_tokens if request.HasField("prompt_tokens") else None,
        "prompt_digest": request.prompt_digest.hex(),
        "max_output_tokens": request.max_output_tokens,
        "num_choices": request.num_choices,
        "priority": admission_pb.Priority.Name(request.priority),
        "deadline_seconds": seconds_of(request.deadline) if request.HasField("deadline") else None,
        "resume": {
            "attempt": resume.attempt,
            "origin_epoch": resume.origin_epoch,
            "origin_agent_id": resume.origin_agent_id,
            "from_cursor": resume.from_cursor,
        }
        if request.HasField("resume")
        else None,
    }


def _generate_document(index: int, request: pb.GenerateRequest) -> dict[str, Any]:
    is_text = request.WhichOneof("prompt") == "text"
    ids = request.token_ids.ids
    prompt = request.text.encode() if is_text else struct.pack(f"<{len(ids)}I", *ids)
    return {
        "agent": index,
        "request_id": request.request_id,
        "ticket": request.ticket_token.decode(),
        "prompt_digest": hashlib.sha256(prompt).hexdigest(),
        "deadline_seconds": seconds_of(request.deadline) if request.HasField("deadline") else None,
        "resume": {
            "attempt": request.resume.attempt,
            "origin_epoch": request.resume.origin_epoch,
            "seed": request.resume.seed,
            "token_ids": [list(choice.token_ids.ids) for choice in request.resume.choices],
            "ended": [choice.HasField("finish") for choice in request.resume.choices],
        }
        if request.HasField("resume")
        else None,
    }


def _started(epoch: int, options: dict[str, Any], request: pb.GenerateRequest) -> pb.GenerateResponse:
    given = options.get("started") or {}
    started = pb.GenerationStarted(
        epoch=epoch + given.get("epoch_offset", 0),
        seed=request.resume.seed or given.get("seed", 7),
        prompt_tokens=given.get("prompt_tokens", 3),
    )
    padding = given.get("padding_bytes", 0)
    if padding:  # a message near the size limit: prompt log-probabilities are what grows in life
        started.prompt_logprobs.add(token_id=1, logprob=-1.0, token_bytes=b"x" * padding)
    return pb.GenerateResponse(started=started)


def _delta(token_ids: list[int], options: dict[str, Any], cursors: dict[int, int]) -> pb.GenerateResponse:
    """Each token's text is its id and a space, unless the step gives another."""
    choice = options.get("choice", 0)
    cursor = options.get("at", cursors.get(choice, 0))
    cursors[choice] = cursor + len(token_ids)
    text = options.get("text", "".join(f"{token_id} " for token_id in token_ids))
    delta = pb.GenerationDelta(token_ids=token_ids, text=text, cursor=cursor, choice_index=choice)
    reason = options.get("finish")
    if reason:  # a number stands for a reason of a newer version
        number = reason if isinstance(reason, int) else pb.FinishReason.Value(f"FINISH_REASON_{reason.upper()}")
        delta.finish.CopyFrom(pb.ChoiceFinish(reason=cast("pb.FinishReason", number)))
    if "stop_string" in options:
        delta.finish.stop_string = options["stop_string"]
    return pb.GenerateResponse(delta=delta)


def _finished(output_tokens: int) -> pb.GenerateResponse:
    usage = pb.Usage(prompt_tokens=3, cached_tokens=2, output_tokens=output_tokens)
    return pb.GenerateResponse(finished=pb.GenerationFinished(usage=usage))


def _failed(reason: str | int, options: dict[str, Any]) -> pb.GenerateResponse:
    detail = error_pb2.ErrorDetail(reason=_reason(reason), message=options.get("message", "it went wrong"))
    return pb.GenerateResponse(failed=pb.GenerationFailed(error=detail))


def _go_on(num_tokens: int, request: pb.GenerateRequest, epoch: int) -> list[pb.GenerateResponse]:
    """An agent that takes over honestly: choice c has the tokens 10c+1, 10c+2, ..."""
    responses = [_started(epoch, {}, request)]
    done = {progress.choice_index: len(progress.token_ids.ids) for progress in request.resume.choices}
    ended = {progress.choice_index for progress in request.resume.choices if progress.HasField("finish")}
    for cursor in range(num_tokens):
        for choice in range(max(1, request.sampling.num_choices)):
            if choice in ended or cursor < done.get(choice, 0):
                continue
            finish = "length" if cursor == num_tokens - 1 else None
            responses.append(_delta([10 * choice + cursor + 1], {"choice": choice, "at": cursor, "finish": finish}, {}))
    return [*responses, _finished(num_tokens)]


def _reason(name: str | int) -> Any:
    return name if isinstance(name, int) else error_pb2.ErrorReason.Value(f"ERROR_REASON_{name.upper()}")


async def _refuse(context: Any, step: dict[str, Any]) -> None:
    reason = step["refuse"]
    error = DragomanError(
        _reason(reason),
        step.get("message", "refused"),
        retry_delay=step.get("retry_delay"),
        metadata=step.get("metadata"),
    )
    await context.abort(error.grpc_code, error.message, error_metadata(error))
