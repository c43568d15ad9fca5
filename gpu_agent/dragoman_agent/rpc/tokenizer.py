"""TokenizerService: text to tokens and back, chat templates, and the tokenizer itself. Needs no ticket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from dragoman.channel import MAX_MESSAGE_BYTES
from dragoman.errors import DragomanError
from dragoman.limits import MAX_DETOKENIZE_TOKENS, MAX_TOKENIZE_BYTES
from dragoman.serving import Context
from dragoman.v1 import error_pb2, tokenizer_service_pb2, tokenizer_service_pb2_grpc, tokens_pb2
from dragoman_agent.rpc.refusal import invalid
from dragoman_agent.rpc.served_model import ServedModel
from dragoman_agent.rpc.validate import check_token_ids

FILE_NAME = "tokenizer-files.json"
CHUNK_BYTES = 256 << 10
MAX_NUM_MESSAGES = 4096


class TokenizerServicer(tokenizer_service_pb2_grpc.TokenizerServiceServicer):
    """Long work runs in threads: the tokenizer library and the bounded template sandbox are safe there."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model

    async def Tokenize(
        self, request: tokenizer_service_pb2.TokenizeRequest, context: Context
    ) -> tokenizer_service_pb2.TokenizeResponse:
        """Ids and the bytes each stands for; an empty text gives what the tokenizer adds by itself."""
        self._model.check_name(request.model)
        check_num_bytes("text", len(request.text.encode()))
        return await asyncio.to_thread(self._tokenize, request)

    async def Detokenize(
        self, request: tokenizer_service_pb2.DetokenizeRequest, context: Context
    ) -> tokenizer_service_pb2.DetokenizeResponse:
        """Text of ids; bytes that form no character appear as U+FFFD."""
        self._model.check_name(request.model)
        num_ids = len(request.token_ids.ids)
        if num_ids > MAX_DETOKENIZE_TOKENS:
            raise _too_large("token_ids.ids", f"{num_ids} ids", f"{MAX_DETOKENIZE_TOKENS} go", MAX_DETOKENIZE_TOKENS)
        return await asyncio.to_thread(self._detokenize, request)

    async def ApplyTemplate(
        self, request: tokenizer_service_pb2.ApplyTemplateRequest, context: Context
    ) -> tokenizer_service_pb2.ApplyTemplateResponse:
        """The conversation as text and as ids; control tokens spelled in messages stay text in the ids."""
        self._model.check_name(request.model)
        if not request.messages:
            invalid("messages", "is empty; send at least one message")
        if len(request.messages) > MAX_NUM_MESSAGES:
            invalid("messages", f"has {len(request.messages)} entries, at most {MAX_NUM_MESSAGES} are allowed")
        check_num_bytes("messages", sum(len(message.content.encode()) for message in request.messages))
        return await asyncio.to_thread(self._apply, request)

    async def GetTokenizer(
        self, request: tokenizer_service_pb2.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[tokenizer_service_pb2.GetTokenizerResponse]:
        """The header, then the tokenizer's files as one JSON file in chunks; the header alone when the caller holds it."""
        self._model.check_name(request.model)
        header = self._model.header()
        yield tokenizer_service_pb2.GetTokenizerResponse(header=header)
        if request.known_digest == header.digest:
            return
        for chunk in self._model.files.to_chunks(CHUNK_BYTES):
            yield tokenizer_service_pb2.GetTokenizerResponse(
                chunk=tokenizer_service_pb2.TokenizerChunk(file_name=FILE_NAME, data=chunk)
            )

    def _detokenize(self, request: tokenizer_service_pb2.DetokenizeRequest) -> tokenizer_service_pb2.DetokenizeResponse:
        ids = list(request.token_ids.ids)
        check_token_ids(ids, self._model.tokenizer.vocab_size, "token_ids.ids")
        text = self._model.tokenizer.decode(ids, skip_special_tokens=request.skip_special_tokens)
        response = tokenizer_service_pb2.DetokenizeResponse(text=text)
        size = response.ByteSize()
        if size > MAX_MESSAGE_BYTES:
            raise _too_large("token_ids.ids", f"a text of {size} bytes", f"{MAX_MESSAGE_BYTES} come", MAX_MESSAGE_BYTES)
        return response

    def _tokenize(self, request: tokenizer_service_pb2.TokenizeRequest) -> tokenizer_service_pb2.TokenizeResponse:
        try:
            ids = self._model.tokenizer.encode(
                request.text,
                add_special_tokens=not request.HasField("add_special_tokens") or request.add_special_tokens,
                parse_special=not request.HasField("parse_special_tokens") or request.parse_special_tokens,
            )
        except ValueError as error:
            invalid("text", str(error))
        return tokenizer_service_pb2.TokenizeResponse(
            token_ids=tokens_pb2.TokenIds(ids=ids), pieces=[self._model.token_bytes(token_id) for token_id in ids]
        )

    def _apply(
        self, request: tokenizer_service_pb2.ApplyTemplateRequest
    ) -> tokenizer_service_pb2.ApplyTemplateResponse:
        messages = [{"role": message.role, "content": message.content} for message in request.messages]
        ending = not request.HasField("add_generation_prompt") or request.add_generation_prompt
        try:
            text, ids = self._model.template.apply(
                self._model.tokenizer,
                messages,
                add_generation_prompt=ending,
                continue_final_message=request.continue_final_message,
            )
        except ValueError as error:
            invalid("messages", str(error))
        return tokenizer_service_pb2.ApplyTemplateResponse(text=text, token_ids=tokens_pb2.TokenIds(ids=ids))


def check_num_bytes(param: str, num_bytes: int) -> None:
    """Raises DragomanError for more text than is tokenized in one request."""
    if num_bytes > MAX_TOKENIZE_BYTES:
        raise _too_large(param, f"{num_bytes} bytes", f"{MAX_TOKENIZE_BYTES} are tokenized", MAX_TOKENIZE_BYTES)


def _too_large(param: str, found: str, most: str, limit: int) -> DragomanError:
    return DragomanError(
        error_pb2.ERROR_REASON_REQUEST_TOO_LARGE,
        f"{param}: has {found}, at most {most} in one request; send it in parts",
        metadata={"param": param, "limit": str(limit)},
    )
