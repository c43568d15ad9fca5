"""The asyncio client: generation with resume, embeddings, tokenizing, and what controller and agents tell of themselves."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Unpack

import grpc

from dragoman.address import address_problem
from dragoman.controllers import Controllers
from dragoman.directory import Directory
from dragoman.durations import duration_of
from dragoman.errors import DragomanError
from dragoman.prefix_hash import prompt_digest_of_ids, prompt_digest_of_inputs, prompt_digest_of_text
from dragoman.request import (
    GenerateOptions,
    Message,
    Prompt,
    build_acquire,
    build_generate,
    build_messages,
    given_options,
    invalid,
    is_conversation,
    read_ids,
    read_seconds,
    read_text,
)
from dragoman.results import Embeddings, GenerationResult, Quote, quote_of
from dragoman.retry import RetryBudget, RetryPolicy, Step, step_after
from dragoman.stream import Context, GenerationStream, Prepared
from dragoman.ticket import CALL_SECONDS, Channels, ControllerAdmission, OpenAgent, ask_agent, ask_controller
from dragoman.tls import environment_credentials
from dragoman.v1 import (
    admission_service_pb2,
    admission_service_pb2_grpc,
    embedding_service_pb2,
    embedding_service_pb2_grpc,
    error_pb2,
    fleet_service_pb2,
    fleet_service_pb2_grpc,
    generation_service_pb2,
    generation_service_pb2_grpc,
    hardware_service_pb2,
    hardware_service_pb2_grpc,
    telemetry_service_pb2,
    tokenizer_service_pb2,
    tokenizer_service_pb2_grpc,
)

DEFAULT_CONTROLLER = "127.0.0.1:50050"
CONTROLLER_VARIABLE = "DRAGOMAN_CONTROLLER"


class AsyncClient:
    """Talks to a controller, or with `agent=` to one agent that was started with --open.

    Addresses are host:port; without any, the controller is $DRAGOMAN_CONTROLLER, else 127.0.0.1:50050. Several controllers
    of one cell are listed with commas: another is asked when one is away. `tenant` is charged for the requests. Without
    `credentials` those of $DRAGOMAN_TLS_CERTIFICATE, _KEY and _CA are used, see `dragoman.tls`; without these too
    connections are not encrypted: for loopback only. Close it with `aclose` or use `async with`. Errors are DragomanError.
    """

    def __init__(
        self,
        controller: str | None = None,
        *,
        agent: str | None = None,
        tenant: str = "",
        credentials: grpc.ChannelCredentials | None = None,
        retry: RetryPolicy | None = None,
    ) -> None:
        for name, value in (("controller", controller), ("agent", agent)):
            if value is not None and not value.strip():
                raise invalid(name, "the address is empty; give host:port, or leave it out for the default")
        if agent is not None and (problem := address_problem(agent)):
            raise invalid("agent", f"the address {agent!r} {problem}")
        policy = retry or RetryPolicy()
        addresses = controller or os.environ.get(CONTROLLER_VARIABLE) or DEFAULT_CONTROLLER
        try:
            self._controllers = None if agent is not None else Controllers(addresses)
        except ValueError as error:
            raise invalid("controller", str(error)) from None
        self._tenant = tenant
        self._channels = Channels(credentials or environment_credentials())
        self._directory = Directory(self._channels, self._controllers, agent)
        admission = (
            ControllerAdmission(self._channels, self._controllers)
            if self._controllers is not None
            else OpenAgent(agent or "")
        )
        self._context = Context(self._channels, admission, policy, RetryBudget(policy.budget))

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Closes all connections; streams under way are cancelled."""
        await self._context.admission.aclose()
        await self._channels.close()

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> GenerationStream:
        """Generates after a text, token ids, or a conversation; returns a stream that sends nothing until it is read."""
        given = given_options(options)
        if is_conversation(prompt):
            return self.chat(prompt, **options)  # type: ignore[arg-type]

        async def prepare() -> Prepared:
            return self._prepared(prompt, given, await self._model(given))  # type: ignore[arg-type]

        return GenerationStream(self._context, prepare, given.get("deadline"))

    def chat(self, messages: Sequence[Message], **options: Unpack[GenerateOptions]) -> GenerationStream:
        """Answers a conversation of {"role": ..., "content": ...}, rendered with the model's own template."""
        given = given_options(options)
        conversation = build_messages(messages)

        async def prepare() -> Prepared:
            model = await self._model(given)
            address = await self._directory.agent_of(model)
            stub = tokenizer_service_pb2_grpc.TokenizerServiceStub(self._channels.get(*address))
            request = tokenizer_service_pb2.ApplyTemplateRequest(model=model, messages=conversation)
            rendered = await ask_agent(address[0], lambda: stub.ApplyTemplate(request, timeout=CALL_SECONDS))
            return self._prepared(list(rendered.token_ids.ids), given, model)

        return GenerationStream(self._context, prepare, given.get("deadline"))

    async def complete(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> GenerationResult:
        """As `generate`, the whole result at once."""
        return await self.generate(prompt, **options).result()

    async def embed(
        self,
        texts: str | Sequence[str | Sequence[int]],
        *,
        model: str | None = None,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        instruction: str | None = None,
        deadline: float | None = None,
    ) -> Embeddings:
        """One vector a text (or list of token ids), in order; `dimensions` cuts them and normalises again.

        Before each text goes the model's own prompt of that name, such as "query", or `instruction`, the task of the queries
        that the texts are, in the form that the model was trained with.
        """
        if isinstance(texts, bytes | bytearray | Mapping) or not isinstance(texts, Iterable):
            raise invalid("texts", f"must be a text or a list of texts, not {texts!r:.80}")
        inputs = [texts] if isinstance(texts, str) else list(texts)
        if not inputs:
            raise invalid("texts", "is empty; give at least one text")
        until = None if deadline is None else time.monotonic() + read_seconds("deadline", deadline)
        request = embedding_service_pb2.EmbedRequest(
            request_id=str(uuid.uuid4()),
            model=await self._directory.resolve(model),
            dimensions=dimensions,
            prompt_name=prompt_name,
            instruction=instruction,
        )
        answer = await self._embed(request, self._embed_inputs(request, inputs), until)
        return Embeddings(tuple(tuple(vector.values) for vector in answer.embeddings), answer.prompt_tokens)

    async def tokenize(
        self,
        text: str,
        *,
        model: str | None = None,
        add_special_tokens: bool | None = None,
        parse_special_tokens: bool | None = None,
    ) -> list[int]:
        """The token ids of a text. The two switches default to the agent's: yes."""
        request = tokenizer_service_pb2.TokenizeRequest(
            model=await self._directory.resolve(model),
            text=read_text("text", text),
            add_special_tokens=add_special_tokens,
            parse_special_tokens=parse_special_tokens,
        )
        address = await self._directory.agent_of(request.model)
        stub = tokenizer_service_pb2_grpc.TokenizerServiceStub(self._channels.get(*address))
        answer = await ask_agent(address[0], lambda: stub.Tokenize(request, timeout=CALL_SECONDS))
        return list(answer.token_ids.ids)

    async def detokenize(
        self, token_ids: Sequence[int], *, model: str | None = None, skip_special_tokens: bool | None = None
    ) -> str:
        """The text of token ids; bytes that form no character appear as U+FFFD."""
        request = tokenizer_service_pb2.DetokenizeRequest(
            model=await self._directory.resolve(model),
            token_ids=read_ids("token_ids", token_ids),
            skip_special_tokens=skip_special_tokens,
        )
        address = await self._directory.agent_of(request.model)
        stub = tokenizer_service_pb2_grpc.TokenizerServiceStub(self._channels.get(*address))
        answer = await ask_agent(address[0], lambda: stub.Detokenize(request, timeout=CALL_SECONDS))
        return str(answer.text)

    async def cancel(self, request_id: str) -> None:
        """Cancels a request that was started anywhere. One that is unknown or has ended is no error.

        A stream of one's own is cancelled more directly by leaving its loop or by `aclose`.
        """
        request = generation_service_pb2.CancelGenerationRequest(request_id=read_text("request_id", request_id))
        for address in await self._directory.addresses():
            stub = generation_service_pb2_grpc.GenerationServiceStub(self._channels.get(*address))
            try:
                await ask_agent(address[0], partial(stub.CancelGeneration, request, timeout=CALL_SECONDS))
            except DragomanError as error:
                if error.reason != error_pb2.ERROR_REASON_NO_AGENT:  # a dead agent runs nothing
                    raise

    async def quote(self, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]) -> Quote:
        """What the request would cost now, and where it would go. Grants nothing."""
        controllers = self._needs_controller("a quote")
        given = given_options(options)
        prepared = self._prepared(prompt, given, await self._model(given))
        request = admission_service_pb2.QuoteRequest(request=prepared.acquire)

        def ask(address: str) -> Any:
            stub = admission_service_pb2_grpc.AdmissionServiceStub(self._channels.get(address))
            return stub.Quote(request, timeout=CALL_SECONDS)

        answer = await ask_controller(controllers, ask)
        return quote_of(answer.quote, answer.agent_id)

    async def models(self) -> list[str]:
        """Names of the served models."""
        return await self._directory.models()

    async def agents(self) -> list[fleet_service_pb2.FleetMember]:
        """Every agent with its state and load, as the controller sees it (dragoman.v1 messages)."""
        self._needs_controller("the list of agents")
        return await self._directory.members()

    async def drain(
        self, agent_id: str, *, grace_seconds: float = 180.0
    ) -> AsyncGenerator[fleet_service_pb2.DrainAgentResponse, None]:
        """Orders an agent to finish its requests and leave; reports what remains until it is empty (dragoman.v1 messages).

        What still runs after `grace_seconds` is handed over: its clients resume it elsewhere. Leaving the loop does not undo
        the drain; draining again may shorten it.
        """
        controllers = self._needs_controller("a drain")
        request = fleet_service_pb2.DrainAgentRequest(agent_id=agent_id, grace_period=duration_of(grace_seconds))
        calls: list[Any] = []

        def begin(address: str) -> Any:
            calls.append(fleet_service_pb2_grpc.FleetServiceStub(self._channels.get(address)).DrainAgent(request))
            return calls[-1].read()

        try:
            report = await ask_controller(controllers, begin)
            while report is not grpc.aio.EOF:
                yield report
                report = await ask_controller(Controllers(controllers.current), lambda _: calls[-1].read())
        finally:
            for call in calls:
                call.cancel()

    async def undrain(self, agent_id: str) -> None:
        """Takes back a drain that has not come to its end."""
        request = fleet_service_pb2.UndrainAgentRequest(agent_id=agent_id)

        def ask(address: str) -> Any:
            stub = fleet_service_pb2_grpc.FleetServiceStub(self._channels.get(address))
            return stub.UndrainAgent(request, timeout=CALL_SECONDS)

        await ask_controller(self._needs_controller("the end of a drain"), ask)

    async def hardware(self, agent_id: str | None = None) -> hardware_service_pb2.GetHardwareResponse:
        """Measured profile of an agent's device, and every device that was looked at with the reason."""
        address = await self._directory.agent_by_id(agent_id)
        stub = hardware_service_pb2_grpc.HardwareServiceStub(self._channels.get(*address))
        request = hardware_service_pb2.GetHardwareRequest()
        answer: hardware_service_pb2.GetHardwareResponse = await ask_agent(
            address[0], lambda: stub.GetHardware(request, timeout=CALL_SECONDS)
        )
        return answer

    async def load(self) -> list[telemetry_service_pb2.AgentLoadSample]:
        """Load of each agent now: running and waiting requests, free KV blocks, step time."""
        return await self._directory.load()

    def _prepared(self, prompt: str | Sequence[int], given: dict[str, Any], model: str) -> Prepared:
        generate = build_generate(prompt, given, model)
        acquire = build_acquire(generate, given, self._tenant, self._directory.digest_of(model))
        return Prepared(generate, acquire)

    async def _model(self, given: dict[str, Any]) -> str:
        return await self._directory.resolve(given.get("model"))

    def _needs_controller(self, what: str) -> Controllers:
        if self._controllers is None:
            raise invalid("controller", f"{what} comes from a controller, and this client has an agent only")
        return self._controllers

    async def _embed(
        self, request: embedding_service_pb2.EmbedRequest, acquire: Any, until: float | None
    ) -> embedding_service_pb2.EmbedResponse:
        """The answer of some agent: nothing is lost by asking another one where the first was lost or had no place."""
        context, failures = self._context, 0
        while True:
            acquire.request_id = request.request_id = str(uuid.uuid4())
            grant = await context.admission.acquire(acquire, _left(until))
            for ticket in grant.tickets:
                request.ticket_token = ticket.token
                channel = self._channels.get(ticket.data_address, ticket.agent_id)
                stub = embedding_service_pb2_grpc.EmbeddingServiceStub(channel)
                call = partial(stub.Embed, request, timeout=_left(until) or 600.0)
                try:
                    answer: embedding_service_pb2.EmbedResponse = await ask_agent(ticket.data_address, call)
                except DragomanError as error:
                    failure = error
                    context.admission.release(ticket)
                    if step_after(error, accepted=False) is Step.GIVE_UP:
                        raise
                else:
                    context.budget.succeeded()
                    return answer
            failures += 1
            if failures >= context.policy.max_attempts or not context.budget.spend():
                raise failure
            await asyncio.sleep(context.policy.delay(failures, failure, context.rng))

    def _embed_inputs(
        self, request: embedding_service_pb2.EmbedRequest, inputs: Sequence[str | Sequence[int]]
    ) -> admission_service_pb2.AcquireTicketRequest:
        digests, num_bytes = [], 0
        for index, item in enumerate(inputs):
            if isinstance(item, str):
                request.inputs.add(text=read_text(f"texts[{index}]", item))
                digests.append(prompt_digest_of_text(item))
                num_bytes += len(item.encode())
            else:
                request.inputs.add(token_ids=read_ids(f"texts[{index}]", item))
                digests.append(prompt_digest_of_ids(item))
                num_bytes += 4 * len(item)
        return admission_service_pb2.AcquireTicketRequest(
            request_id=request.request_id,
            model=request.model,
            max_output_tokens=1,
            prompt_bytes=max(num_bytes, 1),
            prompt_digest=prompt_digest_of_inputs(digests),
            num_inputs=len(inputs),
            tenant=self._tenant,
        )


def _left(until: float | None) -> float | None:
    if until is None:
        return None
    left = until - time.monotonic()
    if left <= 0:
        raise DragomanError(error_pb2.ERROR_REASON_DEADLINE_EXCEEDED, "the deadline of the request passed")
    return left
