"""Tokenizers and chat templates of the served models, fetched from an agent once and kept by digest."""

from __future__ import annotations

import asyncio
import difflib
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import grpc

from dragoman.errors import DragomanError, from_rpc_error
from dragoman.prefix_hash import root_hash
from dragoman.v1 import agent_pb2, error_pb2, tokenizer_service_pb2, tokenizer_service_pb2_grpc
from dragoman_gateway.channels import Channels
from dragoman_gateway.errors import ApiError, invalid
from dragoman_gateway.fleet import Fleet, Member
from dragoman_text import ChatTemplate, TextTokenizer, TokenizerFiles, TokenizerFilesError

logger = logging.getLogger(__name__)

FETCH_SECONDS = 30.0
_TEXT_THREADS = 4
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ModelText:
    """All that the text of one model needs."""

    name: str
    model_digest: bytes
    max_context_tokens: int
    vocabulary_size: int
    tokenizer: TextTokenizer
    template: ChatTemplate

    def root(self, cache_salt: str) -> bytes:
        """The root of the model's prefix hashes."""
        return root_hash(self.model_digest, "", cache_salt)


class Models:
    """Names to models. Text work runs in its own threads, so that one long prompt does not hold up the streams."""

    def __init__(self, fleet: Fleet, channels: Channels, aliases: tuple[str, ...], any_name: bool) -> None:
        self._fleet = fleet
        self._channels = channels
        self._aliases = frozenset(aliases) - {"*"}
        self._any_name = any_name
        self._texts: dict[tuple[str, bytes], asyncio.Task[ModelText]] = {}
        self._by_digest: dict[bytes, tuple[TextTokenizer, ChatTemplate]] = {}
        self._threads = ThreadPoolExecutor(_TEXT_THREADS, thread_name_prefix="text")

    def resolve(self, name: str | None) -> str:
        """The served model that a request's `model` means. Raises ApiError 404 listing what is served, 503 if nothing is."""
        served = self._fleet.model_names()
        if name in served:
            assert name is not None
            return name
        if not served:
            raise self.nothing_served()
        if name is None:
            if len(served) == 1:
                return served[0]
            raise invalid(
                f"model is missing and several are served; name one of {', '.join(served)}",
                "model",
                "missing_required_parameter",
            )
        if len(served) == 1 and (self._any_name or name in self._aliases):
            return served[0]
        raise self.not_served(name)

    def not_served(self, name: str) -> ApiError:
        """The 404 of an unknown model."""
        served = [*self._fleet.model_names(), *sorted(self._aliases)]
        shown = name if len(name) <= 100 else name[:97] + "..."
        near = difflib.get_close_matches(name[:200], served, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        return ApiError(
            404,
            f"model {shown!r} is not served; {hint}served models: {', '.join(served) or 'none'}",
            code="model_not_found",
            param="model",
        )

    def nothing_served(self) -> ApiError:
        """The 503 while no agent serves anything."""
        phase = self._fleet.phase
        explained = {
            "controller_unreachable": "the controller does not answer",
            "model_loading": "the model is still loading",
            "agent_draining": "the agents are finishing their work",
        }.get(phase, "no agent has joined yet")
        code = {"model_loading": "model_loading", "agent_draining": "shutting_down"}.get(phase, "no_agent")
        return ApiError(
            503,
            f"no model can be served now: {explained}; try again soon",
            type="server_error",
            code=code,
            retryable=True,
            retry_after=2.0,
        )

    async def text(self, name: str) -> ModelText:
        """Tokenizer and template of a served model. Raises ApiError or DragomanError when no agent can give them."""
        holders = self._fleet.holders(name)
        if not holders:
            raise DragomanError(
                error_pb2.ERROR_REASON_NO_AGENT,
                f"model {name!r} has no live agent now; try again soon",
                retry_delay=2.0,
            )
        key = (name, holders[0][1].model_digest)
        task = self._texts.get(key)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._texts[key] = asyncio.ensure_future(self._fetch_from_any(name, holders))
        return await asyncio.shield(task)

    def known(self, model: agent_pb2.ServedModel) -> ModelText | None:
        """What was fetched of a served model; None before that, which is soon after its agent joined."""
        task = self._texts.get((model.model, model.model_digest))
        return task.result() if task and task.done() and not task.cancelled() and task.exception() is None else None

    def prefetch(self, member: Member) -> None:
        """Fetch what a new agent serves before the first request asks for it."""
        for model in member.agent.models:
            if (model.model, model.model_digest) not in self._texts and self._fleet.holders(model.model):
                task = asyncio.ensure_future(self.text(model.model))
                task.add_done_callback(_log_failed_prefetch)

    async def in_thread(self, work: Callable[[], T]) -> T:
        """The result of `work`, run in a text thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def close(self) -> None:
        """Stop the threads; a running template is left to its own limits."""
        for task in self._texts.values():
            task.cancel()
        await asyncio.gather(*self._texts.values(), return_exceptions=True)
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _fetch_from_any(self, name: str, holders: list[tuple[Member, agent_pb2.ServedModel]]) -> ModelText:
        failure: DragomanError | None = None
        for member, _ in holders:
            try:
                return await self._fetch(name, member.agent.data_address, member.agent.agent_id)
            except grpc.aio.AioRpcError as error:
                failure = from_rpc_error(error)
                logger.warning("tokenizer of %s not fetched from %s: %s", name, member.agent.agent_id, failure.message)
        assert failure is not None
        raise DragomanError(
            error_pb2.ERROR_REASON_NO_AGENT,
            f"no agent gave the tokenizer of {name!r} ({failure.message}); try again soon",
            retry_delay=2.0,
        )

    async def _fetch(self, name: str, address: str, agent_id: str) -> ModelText:
        stub = tokenizer_service_pb2_grpc.TokenizerServiceStub(self._channels.get(address, agent_id))
        known = next(iter(self._by_digest), b"")
        header: tokenizer_service_pb2.TokenizerHeader | None = None
        chunks: list[bytes] = []
        call = stub.GetTokenizer(
            tokenizer_service_pb2.GetTokenizerRequest(model=name, known_digest=known), timeout=FETCH_SECONDS
        )
        async for part in call:
            if part.HasField("header"):
                header = part.header
            else:
                chunks.append(part.chunk.data)
        if header is None:
            raise DragomanError(error_pb2.ERROR_REASON_INTERNAL, f"the agent at {address} sent no tokenizer header")
        if header.digest not in self._by_digest:
            self._by_digest[header.digest] = await self.in_thread(lambda: _build(chunks))
        tokenizer, template = self._by_digest[header.digest]
        logger.info(
            "model %s: tokenizer of %d tokens, context %d", name, header.vocabulary_size, header.max_context_tokens
        )
        if template.fault:
            logger.warning("model %s: chats are refused: %s", name, template.fault)
        return ModelText(
            name, header.model_digest, header.max_context_tokens, header.vocabulary_size, tokenizer, template
        )


def _build(chunks: list[bytes]) -> tuple[TextTokenizer, ChatTemplate]:
    try:
        files = TokenizerFiles.from_chunks(chunks)
        # What a model writes without a chat does not hang on its template.
        return TextTokenizer.from_files(files), ChatTemplate(files, is_needed=False)
    except (TokenizerFilesError, ValueError) as error:
        raise DragomanError(error_pb2.ERROR_REASON_INTERNAL, f"the agent's tokenizer cannot be used: {error}") from None


def _log_failed_prefetch(task: asyncio.Task[ModelText]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.warning("tokenizer not fetched ahead: %s", task.exception())
