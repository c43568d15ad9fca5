"""EmbeddingService: several inputs in, one unit vector each out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import numpy as np

from dragoman.channel import MAX_MESSAGE_BYTES
from dragoman.errors import DragomanError
from dragoman.limits import MAX_EMBED_TOKENS, MAX_NUM_INPUTS
from dragoman.serving import Context
from dragoman.v1 import embedding_service_pb2, embedding_service_pb2_grpc, error_pb2
from dragoman_agent.device.base import Float32Array
from dragoman_agent.engine.messages import Embedded, Failed, Finished, StartEmbed
from dragoman_agent.rpc.engine_client import EngineClient, Event
from dragoman_agent.rpc.gate import Gate
from dragoman_agent.rpc.refusal import invalid
from dragoman_agent.rpc.served_model import INLINE_TEXT_CHARS, ServedModel
from dragoman_agent.rpc.validate import PRIORITIES, check_request_id, check_token_ids
from dragoman_agent.tickets import OPEN_GRANT, Grant, check_prompt_tokens, presented_embed
from dragoman_text import TextTooLong

MAX_INSTRUCTION_CHARS = 4096
_FLOAT_BYTES = 4
_ENTRY_BYTES = 16  # of one vector's own framing in the reply


class EmbeddingServicer(embedding_service_pb2_grpc.EmbeddingServiceServicer):
    """Embeds texts and token ids: the last token's hidden state, normalised."""

    def __init__(self, engine: EngineClient, gate: Gate, model: ServedModel) -> None:
        self._engine = engine
        self._gate = gate
        self._model = model
        self._running: set[str] = set()  # ids of requests under way

    async def Embed(
        self, request: embedding_service_pb2.EmbedRequest, context: Context
    ) -> embedding_service_pb2.EmbedResponse:
        """All inputs or an error that names the one at fault; nothing runs when one is wrong."""
        grant = OPEN_GRANT
        try:
            check_request_id(request.request_id)
            self._check_not_running(request.request_id)
            self._model.check_name(request.model)
            self._gate.check_open()
            grant = self._gate.verify_ticket(request.ticket_token, lambda: presented_embed(request))
            check_shape(request, self._model.limits.hidden_size)
            prompts, num_added = await self._prompts(request)
            num_tokens = sum(map(len, prompts))
            check_total(num_tokens - num_added)
            # What this side has put before the texts nobody could ask a ticket for.
            check_prompt_tokens(grant, num_tokens - num_added)
            inputs = self._begin(request.request_id, prompts, grant, context.time_remaining())
        except DragomanError as error:
            self._gate.count_refusal(error, grant)
            raise
        try:
            values = await inputs.vectors
        finally:
            inputs.close()
            self._running.discard(request.request_id)
        vectors = unit_vectors(values, request.dimensions if request.HasField("dimensions") else None)
        return embedding_service_pb2.EmbedResponse(
            embeddings=[embedding_service_pb2.Embedding(values=vector) for vector in vectors.tolist()],
            prompt_tokens=num_tokens,
        )

    def _begin(self, request_id: str, prompts: list[list[int]], grant: Grant, seconds_left: float | None) -> _Inputs:
        self._check_not_running(request_id)  # again: the texts may have been tokenized meanwhile
        priority = PRIORITIES.get(grant.priority, 1)
        commands = [
            StartEmbed(f"{request_id}/{index}", ids, priority=priority, tenant=grant.tenant)
            for index, ids in enumerate(prompts)
        ]
        at_once = self._gate.admit_inputs(commands, grant)
        self._running.add(request_id)
        inputs = _Inputs(self._gate, self._engine, grant, commands, _least(seconds_left, grant.deadline_seconds))
        inputs.submit(at_once)
        return inputs

    def _check_not_running(self, request_id: str) -> None:
        if request_id in self._running:
            raise DragomanError(
                error_pb2.ERROR_REASON_DUPLICATE_REQUEST,
                f"request {request_id} is already under way here; use a new request id",
                metadata={"param": "request_id"},
            )

    async def _prompts(self, request: embedding_service_pb2.EmbedRequest) -> tuple[list[list[int]], int]:
        """Token ids of all inputs, and how many of these tokens this side has added for the prompts before them."""
        prefix = self._prefix(request)
        num_texts = sum(item.WhichOneof("input") == "text" for item in request.inputs)
        if prefix and num_texts < len(request.inputs) and (request.prompt_name or request.instruction):
            param = "instruction" if request.HasField("instruction") else "prompt_name"
            invalid(param, "is for texts, and some inputs are token ids; put its tokens into them instead")
        num_added = len(self._model.encode_text(prefix, "instruction")) * num_texts if prefix else 0

        def tokenize() -> list[list[int]]:
            return [self._prompt(item, index, prefix) for index, item in enumerate(request.inputs)]

        num_chars = sum(len(item.text) + len(prefix) for item in request.inputs)
        return (await asyncio.to_thread(tokenize) if num_chars > INLINE_TEXT_CHARS else tokenize()), num_added

    def _prefix(self, request: embedding_service_pb2.EmbedRequest) -> str:
        """What goes before each text."""
        name = request.prompt_name if request.HasField("prompt_name") else None
        instruction = request.instruction if request.HasField("instruction") else None
        if name is not None and instruction is not None:
            invalid(
                "instruction", "and prompt_name are both set; an instruction is a prompt of its own, send one of them"
            )
        if instruction is not None and not instruction.strip():
            invalid("instruction", "is empty; say in a sentence what the queries look for, or leave it out")
        if instruction is not None and len(instruction) > MAX_INSTRUCTION_CHARS:
            invalid("instruction", f"has {len(instruction)} characters, at most {MAX_INSTRUCTION_CHARS} are allowed")
        try:
            return self._model.embedding.prefix(name, instruction)
        except LookupError as error:
            invalid("prompt_name" if instruction is None else "instruction", str(error))

    def _prompt(self, item: embedding_service_pb2.EmbedInput, index: int, prefix: str) -> list[int]:
        param = f"inputs[{index}]"
        limit = self._model.limits.max_context_tokens
        limit = min(limit, self._model.embedding.max_num_tokens or limit)
        match item.WhichOneof("input"):
            case "text":
                if not item.text:
                    invalid(f"{param}.text", "is empty; there is nothing to embed")
                try:
                    self._model.tokenizer.check_size(item.text, limit)
                    self._model.tokenizer.check_beginning(item.text, limit)
                except TextTooLong as error:
                    raise _too_long(param, error.num_tokens, limit, at_least=True) from None
                except ValueError as error:
                    invalid(f"{param}.text", str(error))
                ids = self._model.encode_text(prefix + item.text, f"{param}.text")
            case "token_ids":
                ids = list(item.token_ids.ids)
                check_token_ids(ids, self._model.limits.vocab_size, f"{param}.token_ids.ids")
            case _:
                invalid(param, "is neither text nor token_ids")
        if not ids:
            invalid(param, "has no tokens; there is nothing to embed")
        if len(ids) > limit:
            raise _too_long(param, len(ids), limit)
        return ids


class _Inputs:
    """The inputs of one request on their way through the engine, some at a time: what ends makes room for the next."""

    def __init__(
        self, gate: Gate, engine: EngineClient, grant: Grant, commands: list[StartEmbed], seconds: float | None
    ) -> None:
        self._gate, self._engine, self._grant = gate, engine, grant
        self._commands = commands
        self._until = None if seconds is None else time.monotonic() + seconds
        self._num_submitted = 0
        self._found: dict[int, bytes] = {}
        self.vectors: asyncio.Future[list[bytes]] = asyncio.get_running_loop().create_future()

    def submit(self, num_inputs: int) -> None:
        """Hand the next inputs to the engine, in order."""
        first, self._num_submitted = self._num_submitted, min(self._num_submitted + num_inputs, len(self._commands))
        for command in self._commands[first : self._num_submitted]:
            command.deadline_seconds = None if self._until is None else max(self._until - time.monotonic(), 0.0)
            self._gate.submit_input(command, self._grant, self)

    def deliver(self, event: Event) -> None:
        """One input's end."""
        if self.vectors.done():
            return
        if isinstance(event, Embedded):
            self._found[int(event.request_id.rpartition("/")[2])] = event.values
            if len(self._found) == len(self._commands):
                self.vectors.set_result([self._found[index] for index in range(len(self._commands))])
            else:
                self.submit(1)
        elif isinstance(event, Failed):
            self.vectors.set_exception(DragomanError(event.reason, event.message))  # type: ignore[arg-type]
        elif isinstance(event, Finished):
            self.vectors.set_exception(DragomanError(error_pb2.ERROR_REASON_CANCELLED, "the embedding was cancelled"))

    def close(self) -> None:
        """End what is still under way and give up what has not begun."""
        submitted, self._commands = self._commands[: self._num_submitted], self._commands[self._num_submitted :]
        self._gate.drop_inputs(len(self._commands), self._grant)
        self.vectors.cancel()
        for command in submitted:
            self._engine.cancel(command.request_id, detach=True)


def unit_vectors(values: Sequence[bytes], dimensions: int | None) -> Float32Array:
    """float32 [num_inputs, width]: vectors of little-endian float32, cut to `dimensions` and scaled to Euclidean norm 1.

    Raises DragomanError for one without direction.
    """
    vectors = np.frombuffer(b"".join(values), "<f4").reshape(len(values), -1)[:, :dimensions].astype(np.float64)
    norms = np.sqrt(np.square(vectors).sum(axis=1, keepdims=True))
    wrong = np.flatnonzero(~np.isfinite(norms[:, 0]) | (norms[:, 0] == 0.0))
    if len(wrong):
        index = int(wrong[0])
        raise DragomanError(
            error_pb2.ERROR_REASON_NON_FINITE_LOGITS,
            f"inputs[{index}]: the model's vector has norm {norms[index, 0]:g} in the {vectors.shape[1]} dimensions asked for; "
            "report the input",
            metadata={"param": f"inputs[{index}]"},
        )
    unit: Float32Array = (vectors / norms).astype(np.float32)
    return unit


def check_shape(request: embedding_service_pb2.EmbedRequest, hidden_size: int) -> None:
    """The reply is bounded before anything is computed."""
    if not request.inputs:
        invalid("inputs", "is empty; send at least one input")
    if len(request.inputs) > MAX_NUM_INPUTS:
        invalid(
            "inputs", f"has {len(request.inputs)} entries, at most {MAX_NUM_INPUTS} are allowed; send several requests"
        )
    width = hidden_size
    if request.HasField("dimensions"):
        if not 1 <= request.dimensions <= hidden_size:
            invalid("dimensions", f"is {request.dimensions}, must be 1 to {hidden_size}, the model's width")
        width = request.dimensions
    size = len(request.inputs) * (width * _FLOAT_BYTES + _ENTRY_BYTES)
    if size > MAX_MESSAGE_BYTES:
        raise DragomanError(
            error_pb2.ERROR_REASON_REQUEST_TOO_LARGE,
            f"inputs: {len(request.inputs)} vectors of {width} values are {size} bytes, a reply holds {MAX_MESSAGE_BYTES}; "
            f"send at most {MAX_MESSAGE_BYTES // (width * _FLOAT_BYTES + _ENTRY_BYTES)} inputs in one request",
            metadata={"param": "inputs", "limit": str(MAX_MESSAGE_BYTES)},
        )


def check_total(num_tokens: int) -> None:
    """Texts ask for their ticket by their bytes; only here is seen that no ticket can allow so many tokens."""
    if num_tokens > MAX_EMBED_TOKENS:
        invalid(
            "inputs",
            f"all together have {num_tokens} tokens, at most {MAX_EMBED_TOKENS} go in one request; send several",
        )


def _too_long(param: str, num_tokens: int, limit: int, *, at_least: bool = False) -> DragomanError:
    count = f"at least {num_tokens}" if at_least else str(num_tokens)
    return DragomanError(
        error_pb2.ERROR_REASON_CONTEXT_EXCEEDED,
        f"{param} has {count} tokens, this model embeds at most {limit} here; shorten or split it",
        metadata={"prompt_tokens": str(num_tokens), "limit": str(limit), "param": param},
    )


def _least(*limits: float | None) -> float | None:
    given = [limit for limit in limits if limit is not None]
    return min(given) if given else None
