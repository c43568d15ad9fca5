"""POST /v1/embeddings: texts or token ids to unit vectors, on whichever agent has a place."""

from __future__ import annotations

import asyncio
import base64
import logging
import random
import re
import sys
import time
import uuid
from array import array
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from dragoman.errors import DragomanError
from dragoman.limits import MAX_EMBED_TOKENS, MAX_NUM_INPUTS
from dragoman.prefix_hash import prompt_digest_of_ids, prompt_digest_of_inputs, prompt_digest_of_text
from dragoman.retry import RetryPolicy, may_pass
from dragoman.ticket import ask_agent
from dragoman.v1 import (
    admission_service_pb2,
    embedding_service_pb2,
    embedding_service_pb2_grpc,
    error_pb2,
    tokens_pb2,
)
from dragoman_gateway.backend import Backend
from dragoman_gateway.errors import invalid
from dragoman_gateway.generation import MAX_STARTS, STALE_TICKET
from dragoman_gateway.http import ClientGone, json_reply, unless_gone
from dragoman_gateway.models import ModelText
from dragoman_gateway.prompts import inputs_of
from dragoman_gateway.requests import outcome_of, set_queue_wait
from dragoman_gateway.sampling import check_ids, priority_of
from dragoman_gateway.schema import EmbeddingBody, ignored_header, parse_body

logger = logging.getLogger(__name__)

_INPUT = re.compile(r"inputs\[(\d+)\](\.text|\.token_ids\.ids)?")
_RETRIES = RetryPolicy(max_attempts=MAX_STARTS, base_seconds=0.05, max_delay_seconds=1.0)
_LOST = (error_pb2.ERROR_REASON_AGENT_LOST, error_pb2.ERROR_REASON_DEVICE_FAULT)

T = TypeVar("T")


async def embeddings(request: Request, backend: Backend, value: dict[str, Any]) -> Response:
    """Answers an embeddings request: one vector an input, in order."""
    body, ignored = parse_body(EmbeddingBody, value, strict=backend.settings.strict_params)
    model = await backend.models.text(backend.models.resolve(body.model))
    inputs = inputs_of(body.input, MAX_NUM_INPUTS, "input")
    is_one = isinstance(body.input, str) or inputs[0] is body.input
    acquire, embed = await unless_gone(
        request.receive, backend.models.in_thread(lambda: _messages(body, inputs, model, is_one=is_one))
    )
    acquire.tenant = request.state.tenant
    acquire.priority = priority_of(body)
    set_queue_wait(acquire, backend.settings.max_queue_wait)
    if ignored:
        backend.metrics.ignored.inc()
    job = _Job(backend, request.state.request_id, acquire, embed, is_one=is_one)
    request.state.has_job = True
    try:
        answer = await unless_gone(request.receive, job.run())
        data = await backend.models.in_thread(lambda: _data(answer, as_base64=body.encoding_format == "base64"))
    except BaseException as error:
        is_cancelled = isinstance(error, ClientGone) or not isinstance(error, Exception)
        job.end("cancelled" if is_cancelled else outcome_of(error), 0, error)
        raise
    job.end("ok", answer.prompt_tokens)
    usage = {"prompt_tokens": answer.prompt_tokens, "total_tokens": answer.prompt_tokens}
    shown = {"object": "list", "data": data, "model": body.model or model.name, "usage": usage}
    headers = {"x-dragoman-agent": job.agent_id, "x-dragoman-request-id": embed.request_id}
    return json_reply(shown, headers={**ignored_header(ignored), **headers})


def _messages(
    body: EmbeddingBody, inputs: list[Any], model: ModelText, *, is_one: bool
) -> tuple[admission_service_pb2.AcquireTicketRequest, embedding_service_pb2.EmbedRequest]:
    """What the controller and the agent are sent. Texts travel as they are: what goes before them the agent knows."""
    embed = embedding_service_pb2.EmbedRequest(
        model=model.name, dimensions=body.dimensions, prompt_name=body.prompt_name, instruction=body.instruction
    )
    digests, num_bytes = [], 0
    for index, item in enumerate(inputs):
        path = "input" if is_one else f"input[{index}]"
        if not item:
            raise invalid(f"{path} is empty; there is nothing to embed", path)
        if isinstance(item, str):
            embed.inputs.add(text=item)
            digests.append(prompt_digest_of_text(item))
            num_bytes += len(item.encode())
        else:
            check_ids(item, path, model.vocabulary_size)
            embed.inputs.add(token_ids=tokens_pb2.TokenIds(ids=item))
            digests.append(prompt_digest_of_ids(item))
            num_bytes += 4 * len(item)
    acquire = admission_service_pb2.AcquireTicketRequest(
        model=model.name,
        max_output_tokens=1,
        prompt_bytes=num_bytes,
        prompt_digest=prompt_digest_of_inputs(digests),
        num_inputs=len(inputs),
    )
    if all(isinstance(item, list) for item in inputs):
        num_tokens = sum(map(len, inputs))
        if num_tokens > MAX_EMBED_TOKENS:
            raise invalid(
                f"input has {num_tokens} tokens together, at most {MAX_EMBED_TOKENS} go in one request; send several",
                "input",
            )
        acquire.prompt_tokens = num_tokens
    return acquire, embed


def _data(answer: embedding_service_pb2.EmbedResponse, *, as_base64: bool) -> list[dict[str, Any]]:
    """`data` of the reply; base64 is of little-endian float32."""
    return [
        {"object": "embedding", "index": index, "embedding": _base64(item.values) if as_base64 else list(item.values)}
        for index, item in enumerate(answer.embeddings)
    ]


def _base64(values: Any) -> str:
    packed = array("f", values)
    if sys.byteorder == "big":
        packed.byteswap()
    return base64.b64encode(packed).decode()


class _Job:
    """One request under way: a ticket, the call, and another try where an agent was lost or had no place."""

    def __init__(
        self,
        backend: Backend,
        public_id: str,
        acquire: admission_service_pb2.AcquireTicketRequest,
        embed: embedding_service_pb2.EmbedRequest,
        *,
        is_one: bool,
    ) -> None:
        self.agent_id = ""
        self._backend, self._public_id = backend, public_id
        self._acquire, self._embed, self._is_one = acquire, embed, is_one
        self._begun = time.monotonic()
        self._aborted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        backend.job_began(self)

    def abort(self, error: Exception) -> None:
        """Make `run` raise `error` now."""
        if not self._aborted.done():
            self._aborted.set_exception(error)
            self._aborted.exception()  # retrieved here, since often nobody waits for it

    async def run(self) -> embedding_service_pb2.EmbedResponse:
        """The vectors. Raises DragomanError when no agent gives them: nothing is lost by asking another one."""
        failures = 0
        while True:
            answer = await self._unless_aborted(self._attempt())
            if not isinstance(answer, DragomanError):
                return answer
            failures += 1
            if failures >= _RETRIES.max_attempts:
                raise answer
            await self._unless_aborted(asyncio.sleep(_RETRIES.delay(failures, None, random.Random())))

    def end(self, outcome: str, num_tokens: int, error: BaseException | None = None) -> None:
        """Count and log."""
        metrics = self._backend.metrics
        self._backend.job_ended(self)
        metrics.requests.labels("embeddings", outcome).inc()
        metrics.prompt_tokens.inc(num_tokens)
        logger.info(
            "embeddings %s model=%s outcome=%s inputs=%d prompt=%d total=%.3fs agent=%s request=%s%s",
            self._public_id,
            self._embed.model,
            outcome,
            len(self._embed.inputs),
            num_tokens,
            time.monotonic() - self._begun,
            self.agent_id or "-",
            self._embed.request_id or "-",
            f" error={error!r}" if error is not None and outcome != "cancelled" else "",
        )

    async def _attempt(self) -> embedding_service_pb2.EmbedResponse | DragomanError:
        """The answer by one ticket or its fallback, or why neither gave it; raises what is final."""
        self._acquire.request_id = self._embed.request_id = str(uuid.uuid4())
        try:
            granted = await self._backend.admissions.acquire(self._acquire)
        except DragomanError as refusal:
            raise self._renamed(refusal) from None
        tickets = [granted.ticket, *([granted.fallback_ticket] if granted.HasField("fallback_ticket") else [])]
        failure: DragomanError | None = None
        for ticket in tickets:
            self.agent_id = ticket.agent_id
            self._embed.ticket_token = ticket.token
            channel = self._backend.channels.get(ticket.data_address, ticket.agent_id)
            stub = embedding_service_pb2_grpc.EmbeddingServiceStub(channel)
            try:
                answer: embedding_service_pb2.EmbedResponse = await self._call(stub, ticket.data_address)
            except DragomanError as error:
                failure = error
                if not (may_pass(error, resuming=False) or error.reason in STALE_TICKET or error.reason in _LOST):
                    raise self._renamed(error) from None
            else:
                return answer
        self._backend.admissions.abandon(self._acquire.request_id)
        assert failure is not None
        return self._renamed(failure)

    async def _call(
        self, stub: embedding_service_pb2_grpc.EmbeddingServiceStub, address: str
    ) -> embedding_service_pb2.EmbedResponse:
        call: Any = None

        def begin() -> Any:
            nonlocal call
            call = stub.Embed(self._embed)
            return call

        try:
            return await ask_agent(address, begin)
        except asyncio.CancelledError:
            if call is not None and call.cancelled() and not _is_being_cancelled():
                # The channel was closed beneath the call: the controller says that the agent is gone.
                raise DragomanError(error_pb2.ERROR_REASON_AGENT_LOST, f"agent {self.agent_id} was lost") from None
            raise

    async def _unless_aborted(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait((task, self._aborted), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            self._aborted.result()
            raise AssertionError("neither done nor aborted")
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    def _renamed(self, error: DragomanError) -> DragomanError:
        """The error under the names of the request's own fields."""
        param = error.metadata.get("param", "")
        ours = _INPUT.sub(r"input" if self._is_one else r"input[\1]", param, count=1)
        if ours == "inputs":
            ours = "input"
        if ours != param:
            error.metadata["param"] = ours
            error.message = f"{ours}{error.message[len(param) :]}" if error.message.startswith(param) else error.message
        return error


def _is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
