"""EmbeddingService: several inputs in, one unit vector each out."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

from dragoman.channel import MAX_MESSAGE_BYTES
from dragoman.errors import DragomanError
from dragoman.serving import Context
from dragoman.v1 import embedding_service_pb2, embedding_service_pb2_grpc, error_pb2
from dragoman_agent.engine.messages import Embedded, Failed, Finished, StartEmbed
from dragoman_agent.rpc.engine_client import EngineClient, Event
from dragoman_agent.rpc.gate import Gate
from dragoman_agent.rpc.refusal import invalid
from dragoman_agent.rpc.served_model import INLINE_TEXT_CHARS, ServedModel
from dragoman_agent.rpc.validate import check_request_id, check_token_ids, context_exceeded
from dragoman_agent.tickets import OPEN_GRANT, check_prompt_tokens, presented_embed

MAX_NUM_INPUTS = 2048
_FLOAT_BYTES = 4
_ENTRY_BYTES = 16  # of one vector's own framing in the reply


class EmbeddingServicer(embedding_service_pb2_grpc.EmbeddingServiceServicer):
    """Embeds texts and token ids: the last token's hidden state, normalised."""

    def __init__(self, engine: EngineClient, gate: Gate, model: ServedModel) -> None:
        self._engine = engine
        self._gate = gate
        self._model = model

    async def Embed(
        self, request: embedding_service_pb2.EmbedRequest, context: Context
    ) -> embedding_service_pb2.EmbedResponse:
        """All inputs or an error that names the one at fault; nothing runs when one is wrong."""
        grant = OPEN_GRANT
        try:
            check_request_id(request.request_id)
            self._model.check_name(request.model)
            self._gate.check_open()
            grant = self._gate.verify_ticket(request.ticket_token, lambda: presented_embed(request))
            check_shape(request, self._model.limits.hidden_size)
            prompts = [await self._prompt(item, index) for index, item in enumerate(request.inputs)]
            num_tokens = sum(map(len, prompts))
            check_prompt_tokens(grant, num_tokens)
            commands = [
                StartEmbed(
                    f"{request.request_id}/{index}",
                    ids,
                    tenant=grant.tenant,
                    deadline_seconds=_least(context.time_remaining(), grant.deadline_seconds),
                )
                for index, ids in enumerate(prompts)
            ]
            gathered = _Gathered(len(commands))
            self._gate.admit_all(commands, grant, gathered)
        except DragomanError as error:
            self._gate.count_refusal(error, grant)
            raise
        try:
            vectors = await gathered.vectors
        finally:
            for command in commands:
                self._engine.cancel(command.request_id, detach=True)
        dimensions = request.dimensions if request.HasField("dimensions") else None
        return embedding_service_pb2.EmbedResponse(
            embeddings=[embedding_service_pb2.Embedding(values=unit_vector(vector, dimensions)) for vector in vectors],
            prompt_tokens=num_tokens,
        )

    async def _prompt(self, item: embedding_service_pb2.EmbedInput, index: int) -> list[int]:
        param = f"inputs[{index}]"
        match item.WhichOneof("input"):
            case "text" if len(item.text) > INLINE_TEXT_CHARS:
                ids = await asyncio.to_thread(self._model.encode_text, item.text, f"{param}.text")
            case "text":
                if not item.text:
                    invalid(f"{param}.text", "is empty; there is nothing to embed")
                ids = self._model.encode_text(item.text, f"{param}.text")
            case "token_ids":
                ids = list(item.token_ids.ids)
                check_token_ids(ids, self._model.limits.vocab_size, f"{param}.token_ids.ids")
            case _:
                invalid(param, "is neither text nor token_ids")
        if not ids:
            invalid(param, "has no tokens; there is nothing to embed")
        if len(ids) >= self._model.limits.max_context_tokens:
            error = context_exceeded(len(ids), self._model.limits.max_context_tokens, None)
            raise DragomanError(error.reason, f"{param}: {error.message}", metadata={**error.metadata, "param": param})
        return ids


class _Gathered:
    """Waits for the vectors of all inputs, or for the first failure."""

    def __init__(self, num_inputs: int) -> None:
        self._found: dict[int, list[float]] = {}
        self._num_inputs = num_inputs
        self.vectors: asyncio.Future[list[list[float]]] = asyncio.get_running_loop().create_future()

    def deliver(self, event: Event) -> None:
        """One input's end."""
        if self.vectors.done():
            return
        if isinstance(event, Embedded):
            self._found[int(event.request_id.rpartition("/")[2])] = event.values
            if len(self._found) == self._num_inputs:
                self.vectors.set_result([self._found[index] for index in range(self._num_inputs)])
        elif isinstance(event, Failed):
            self.vectors.set_exception(DragomanError(event.reason, event.message))  # type: ignore[arg-type]
        elif isinstance(event, Finished):
            self.vectors.set_exception(DragomanError(error_pb2.ERROR_REASON_CANCELLED, "the embedding was cancelled"))


def unit_vector(values: Sequence[float], dimensions: int | None) -> list[float]:
    """`values` cut to `dimensions` and scaled to Euclidean norm 1. Raises DragomanError for one without direction."""
    values = values[:dimensions]
    norm = math.sqrt(math.fsum(value * value for value in values))
    if not math.isfinite(norm) or norm == 0.0:
        raise DragomanError(
            error_pb2.ERROR_REASON_NON_FINITE_LOGITS,
            f"the model's vector has norm {norm:g} in the {len(values)} dimensions asked for; report the input",
        )
    return [value / norm for value in values]


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


def _least(*limits: float | None) -> float | None:
    given = [limit for limit in limits if limit is not None]
    return min(given) if given else None
