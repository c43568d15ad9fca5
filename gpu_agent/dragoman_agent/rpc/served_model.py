"""The one model an agent serves, as the rpc process needs it: names, limits, tokenizer, chat template."""

from __future__ import annotations

import asyncio
import reprlib
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from dragoman.errors import DragomanError
from dragoman.v1 import error_pb2, generation_service_pb2, tokenizer_service_pb2
from dragoman_agent.model.embedding import PLAIN, EmbeddingSpec
from dragoman_agent.rpc.refusal import invalid
from dragoman_agent.rpc.validate import ModelLimits, SamplingDefaults, asked_output_tokens, context_exceeded
from dragoman_text import ChatTemplate, TextTokenizer, TextTooLong, TokenizerFiles

if TYPE_CHECKING:
    from dragoman_agent.model.source import ModelSource

# Tokenizing this much text takes about a millisecond; more goes to a thread, so that streams keep flowing.
INLINE_TEXT_CHARS = 4096


@dataclass(frozen=True)
class ServedModel:
    """A model under its names. An agent serves one model, so an empty name in a request means it."""

    names: tuple[str, ...]
    digest: bytes  # 32 bytes
    limits: ModelLimits
    tokenizer: TextTokenizer
    embedding: EmbeddingSpec = PLAIN

    @property
    def files(self) -> TokenizerFiles:
        """What the tokenizer was made of."""
        return self.tokenizer.files

    @property
    def name(self) -> str:
        """The name shown."""
        return self.names[0]

    @cached_property
    def template(self) -> ChatTemplate:
        """The chat template. Raises TemplateError when the model's own is not valid."""
        return ChatTemplate(self.files)

    def check_name(self, name: str) -> None:
        """Raises DragomanError when `name` is not served."""
        if name and name not in self.names:
            raise DragomanError(
                error_pb2.ERROR_REASON_MODEL_NOT_SERVED,
                f"model {reprlib.repr(name)} is not served here; this agent serves {', '.join(self.names)}",
                metadata={"param": "model", "served": ",".join(self.names)},
            )

    def token_bytes(self, token_id: int) -> bytes:
        """Raw bytes of a token; empty for an id that the model has and its tokenizer does not."""
        return self.tokenizer.token_bytes(token_id) if token_id < self.tokenizer.vocab_size else b""

    def prompt_now(self, request: generation_service_pb2.GenerateRequest) -> list[int] | None:
        """The prompt's token ids, or None when the text is long enough to tokenize in a thread. Raises DragomanError."""
        kind = request.WhichOneof("prompt")
        if kind == "token_ids":
            return list(request.token_ids.ids)
        if kind is None:
            invalid("prompt", "is missing; send text or token_ids")
        if len(request.text) > INLINE_TEXT_CHARS:
            self._refuse_hopeless_text(request)
            return None
        return self._encode(request)

    async def prompt_later(self, request: generation_service_pb2.GenerateRequest) -> list[int]:
        """The prompt's token ids, tokenized in a thread. Raises DragomanError."""
        return await asyncio.to_thread(self._encode, request)

    def encode_word(self, text: str) -> list[int]:
        """Token ids of a word inside a text: nothing is added, control tokens are not read. Raises DragomanError."""
        try:
            return self.tokenizer.encode(text, add_special_tokens=False)
        except ValueError as error:
            invalid("sampling.bad_words", str(error))

    def encode_text(self, text: str, param: str) -> list[int]:
        """Token ids of an embedding's input. Raises DragomanError."""
        try:
            return self.tokenizer.encode(text, add_special_tokens=True, parse_special=True)
        except ValueError as error:
            invalid(param, str(error))

    def _encode(self, request: generation_service_pb2.GenerateRequest) -> list[int]:
        options = request.text_options
        limit = self.limits.max_context_tokens
        try:
            self.tokenizer.check_beginning(request.text, limit - 1)
            return self.tokenizer.encode(
                request.text,
                add_special_tokens=not options.HasField("add_special_tokens") or options.add_special_tokens,
                parse_special=not options.HasField("parse_special_tokens") or options.parse_special_tokens,
            )
        except TextTooLong as error:
            raise context_exceeded(error.num_tokens, limit, asked_output_tokens(request), at_least=True) from None
        except ValueError as error:
            invalid("text", str(error))

    def _refuse_hopeless_text(self, request: generation_service_pb2.GenerateRequest) -> None:
        """A text that cannot fit however it is tokenized is refused at once, without tokenizing it."""
        limit = self.limits.max_context_tokens
        try:
            self.tokenizer.check_size(request.text, limit - 1)
        except TextTooLong as error:
            raise context_exceeded(error.num_tokens, limit, asked_output_tokens(request), at_least=True) from None

    def header(self) -> tokenizer_service_pb2.TokenizerHeader:
        """What GetTokenizer sends first."""
        defaults = self.limits.defaults
        return tokenizer_service_pb2.TokenizerHeader(
            model=self.name,
            digest=bytes.fromhex(self.files.digest),
            vocabulary_size=self.limits.vocab_size,
            max_context_tokens=self.limits.max_context_tokens,
            model_digest=self.digest,
            defaults=tokenizer_service_pb2.GenerationDefaults(
                temperature=defaults.temperature,
                top_p=defaults.top_p,
                top_k=defaults.top_k,
                min_p=defaults.min_p,
                repetition_penalty=defaults.repetition_penalty,
            ),
        )


def served_model(
    source: ModelSource, names: tuple[str, ...], max_context_tokens: int, chat_template: str | None = None
) -> ServedModel:
    """The served model of opened files. `max_context_tokens` is the plan's, at most the model's own.

    `chat_template` takes the place of the model's own.
    """
    generation = source.generation
    files = source.tokenizer if chat_template is None else replace(source.tokenizer, chat_template=chat_template)
    return ServedModel(
        names=names or (source.name,),
        digest=bytes.fromhex(source.digest),
        limits=ModelLimits(
            vocab_size=source.config.vocab_size,
            max_context_tokens=max_context_tokens,
            hidden_size=source.config.hidden_size,
            eos_token_ids=tuple(generation.eos_token_ids),
            defaults=SamplingDefaults(
                temperature=generation.temperature,
                top_p=generation.top_p,
                top_k=generation.top_k,
                min_p=generation.min_p,
                repetition_penalty=generation.repetition_penalty,
            ),
        ),
        tokenizer=TextTokenizer.from_files(files),
        embedding=source.embedding,
    )
