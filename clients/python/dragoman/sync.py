"""The blocking client: the asyncio client on an event loop in a thread of its own.

One implementation of admission, cursors and resume serves both; grpc's blocking stubs would need a second one. A call
costs two thread switches (about 0.1 ms), which a person or a script does not notice.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncGenerator, Coroutine, Iterator, Sequence
from types import TracebackType
from typing import Any, TypeVar, Unpack

import grpc

from dragoman.client import AsyncClient
from dragoman.request import GenerateOptions, Message, Prompt
from dragoman.results import Embeddings, GenerationResult, Quote, Token
from dragoman.retry import RetryPolicy
from dragoman.stream import GenerationStream
from dragoman.v1 import fleet_service_pb2, hardware_service_pb2, telemetry_service_pb2

T = TypeVar("T")


class _LoopThread:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="dragoman-client", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether work can be run."""
        return self._thread.is_alive() and not self._loop.is_closed()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine and returns its result. An interrupt cancels it."""
        if not self.alive:
            work.close()
            raise RuntimeError("the client is closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def finish(self, stream: GenerationStream) -> None:
        """Closes a stream. The collector may call this in any thread: in the loop's own it must not wait."""
        if not self.alive:
            return
        if threading.current_thread() is self._thread:
            self._closing = self._loop.create_task(stream.aclose())
        else:
            self.run(stream.aclose())

    def close(self) -> None:
        """Ends the thread. May be called more than once, and by the collector in any thread."""
        if not self.alive:
            return
        if threading.current_thread() is self._thread:
            self._loop.stop()
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Stream:
    """Iterates over `Token`, blocking. Leaving the loop, `close` or the end of `with` cancels what still runs."""

    def __init__(self, loop: _LoopThread, stream: GenerationStream) -> None:
        self._loop = loop
        self._stream = stream

    @property
    def request_id(self) -> str | None:
        """Id of the request; None until the first item was asked for."""
        return self._stream.request_id

    @property
    def agent_id(self) -> str | None:
        """The agent that runs it now; None before it is placed, "" for an open agent."""
        return self._stream.agent_id

    @property
    def agent_address(self) -> str | None:
        """Data address of that agent."""
        return self._stream.agent_address

    @property
    def num_resumes(self) -> int:
        """How often it was continued after a cut."""
        return self._stream.num_resumes

    @property
    def quote(self) -> Quote | None:
        """What the controller promised; None until it is placed and for an open agent."""
        return self._stream.quote

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[Token]:
        tokens = self._loop.run(_iterate(self._stream))
        try:
            while (token := self._loop.run(_next(tokens))) is not None:
                yield token
        finally:
            self.close()

    def result(self) -> GenerationResult:
        """Reads what is left and returns the whole. Raises DragomanError; CANCELLED when it was closed before."""
        return self._loop.run(self._stream.result())

    def text(self) -> str:
        """As `result`, only the text of the first choice."""
        return self._loop.run(self._stream.text())

    def close(self) -> None:
        """Cancels what still runs. May be called more than once."""
        self._loop.finish(self._stream)


class Client:
    """As AsyncClient, blocking; may be shared by threads. Close it with `close` or use `with`."""

    def __init__(
        self,
        controller: str | None = None,
        *,
        agent: str | None = None,
        tenant: str = "",
        credentials: grpc.ChannelCredentials | None = None,
        retry: RetryPolicy | None = None,
    ) -> None:
        self._loop = _LoopThread()
        self._finalizer = weakref.finalize(self, self._loop.close)
        self._client = self._loop.run(_make(controller, agent, tenant, credentials, retry))

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes all connections; streams under way are cancelled."""
        if self._loop.alive:
            self._loop.run(self._client.aclose())
        self._finalizer()

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Stream:
        """Generates after a text, token ids, or a conversation; returns a stream that sends nothing until it is read."""
        return Stream(self._loop, self._client.generate(prompt, **options))

    def chat(self, messages: Sequence[Message], **options: Unpack[GenerateOptions]) -> Stream:
        """Answers a conversation of {"role": ..., "content": ...}, rendered with the model's own template."""
        return Stream(self._loop, self._client.chat(messages, **options))

    def complete(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> GenerationResult:
        """As `generate`, the whole result at once."""
        return self._loop.run(self._client.complete(prompt, **options))

    def embed(
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
        call = self._client.embed(
            texts,
            model=model,
            dimensions=dimensions,
            prompt_name=prompt_name,
            instruction=instruction,
            deadline=deadline,
        )
        return self._loop.run(call)

    def tokenize(
        self,
        text: str,
        *,
        model: str | None = None,
        add_special_tokens: bool | None = None,
        parse_special_tokens: bool | None = None,
    ) -> list[int]:
        """The token ids of a text. The two switches default to the agent's: yes."""
        return self._loop.run(
            self._client.tokenize(
                text, model=model, add_special_tokens=add_special_tokens, parse_special_tokens=parse_special_tokens
            )
        )

    def detokenize(
        self, token_ids: Sequence[int], *, model: str | None = None, skip_special_tokens: bool | None = None
    ) -> str:
        """The text of token ids; bytes that form no character appear as U+FFFD."""
        return self._loop.run(self._client.detokenize(token_ids, model=model, skip_special_tokens=skip_special_tokens))

    def cancel(self, request_id: str) -> None:
        """Cancels a request that was started anywhere. One that is unknown or has ended is no error."""
        self._loop.run(self._client.cancel(request_id))

    def quote(self, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]) -> Quote:
        """What the request would cost now, and where it would go. Grants nothing."""
        return self._loop.run(self._client.quote(prompt, **options))

    def models(self) -> list[str]:
        """Names of the served models."""
        return self._loop.run(self._client.models())

    def agents(self) -> list[fleet_service_pb2.FleetMember]:
        """Every agent with its state and load, as the controller sees it (dragoman.v1 messages)."""
        return self._loop.run(self._client.agents())

    def drain(self, agent_id: str, *, grace_seconds: float = 180.0) -> Iterator[fleet_service_pb2.DrainAgentResponse]:
        """Orders an agent to finish its requests and leave; reports what remains until it is empty (dragoman.v1 messages)."""
        reports = self._client.drain(agent_id, grace_seconds=grace_seconds)
        try:
            while (report := self._loop.run(_next_report(reports))) is not None:
                yield report
        finally:
            self._loop.run(reports.aclose())

    def undrain(self, agent_id: str) -> None:
        """Takes back a drain that has not come to its end."""
        self._loop.run(self._client.undrain(agent_id))

    def hardware(self, agent_id: str | None = None) -> hardware_service_pb2.GetHardwareResponse:
        """Measured profile of an agent's device, and every device that was looked at with the reason."""
        return self._loop.run(self._client.hardware(agent_id))

    def load(self) -> list[telemetry_service_pb2.AgentLoadSample]:
        """Load of each agent now: running and waiting requests, free KV blocks, step time."""
        return self._loop.run(self._client.load())


async def _make(
    controller: str | None,
    agent: str | None,
    tenant: str,
    credentials: grpc.ChannelCredentials | None,
    retry: RetryPolicy | None,
) -> AsyncClient:
    return AsyncClient(controller, agent=agent, tenant=tenant, credentials=credentials, retry=retry)


async def _iterate(stream: GenerationStream) -> Any:
    return aiter(stream)


async def _next_report(
    reports: AsyncGenerator[fleet_service_pb2.DrainAgentResponse, None],
) -> fleet_service_pb2.DrainAgentResponse | None:
    return await anext(reports, None)


async def _next(tokens: Any) -> Token | None:
    return await anext(tokens, None)
