"""What a tokenizer is made of, in one value that travels from the agent to the gateway."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

MAX_VOCAB_SIZE = 1 << 24  # a size from the wire is bounded before anything is sized by it
CHUNK_BYTES = 1 << 20  # well under the 4 MiB default of a gRPC message


class TokenizerFilesError(ValueError):
    """Tokenizer files that cannot be used. The message says what, why and what to do."""


@dataclass(frozen=True)
class TokenizerFiles:
    """Everything needed to tokenize, detokenize and lay out a chat for one model."""

    tokenizer_json: bytes  # the `tokenizers` library's tokenizer.json
    chat_template: str | None = None  # jinja2 source; None when the model has none
    bos_token: str | None = None
    eos_token: str | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()  # the union of every file that names an end token
    add_bos_token: bool = False
    vocab_size: int | None = None  # token ids the model has; those the tokenizer has no token for have no text

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) over every field; equal digests mean equal text behaviour."""
        parts = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "tokenizer_json"}
        state = hashlib.sha256(json.dumps(parts, sort_keys=True, ensure_ascii=True).encode())
        state.update(self.tokenizer_json)
        return state.hexdigest()

    def to_json(self) -> bytes:
        """One JSON object, UTF-8, with the digest inside; `from_json` reads it back."""
        value: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        value["tokenizer_json"] = self.tokenizer_json.decode()
        value["digest"] = self.digest
        return json.dumps(value, ensure_ascii=True).encode()

    @classmethod
    def from_json(cls, data: bytes) -> TokenizerFiles:
        """Read `to_json`'s bytes. Raises TokenizerFilesError when they are not whole or were altered."""
        try:
            value = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise TokenizerFilesError(f"tokenizer files: not valid JSON ({error}); fetch them again") from None
        if not isinstance(value, dict):
            raise TokenizerFilesError("tokenizer files: a JSON object was expected; fetch them again")
        digest = value.pop("digest", None)
        unknown = sorted(value.keys() - {field.name for field in fields(cls)})
        if unknown:
            raise TokenizerFilesError(
                f"tokenizer files: unknown field {unknown[0]!r}; the other side runs a newer version, update this one"
            )
        files = _checked(value)
        if digest != files.digest:
            raise TokenizerFilesError("tokenizer files: the content does not match its digest; fetch them again")
        return files

    def to_chunks(self, chunk_bytes: int = CHUNK_BYTES) -> Iterator[bytes]:
        """`to_json` cut into pieces of at most `chunk_bytes`, for a stream of messages."""
        data = self.to_json()
        for start in range(0, len(data), chunk_bytes):
            yield data[start : start + chunk_bytes]

    @classmethod
    def from_chunks(cls, chunks: Iterable[bytes]) -> TokenizerFiles:
        """Join the pieces of `to_chunks`. Raises TokenizerFilesError as `from_json` does."""
        return cls.from_json(b"".join(chunks))


def _checked(value: dict[str, Any]) -> TokenizerFiles:
    def optional(name: str, kind: type) -> Any:
        field = value.get(name)
        if field is not None and (not isinstance(field, kind) or (kind is int and isinstance(field, bool))):
            raise TokenizerFilesError(
                f"tokenizer files: field {name!r} is {type(field).__name__}, {kind.__name__} was expected"
            )
        return field

    tokenizer_json = optional("tokenizer_json", str)
    if tokenizer_json is None:
        raise TokenizerFilesError("tokenizer files: field 'tokenizer_json' is missing; fetch them again")
    eos_token_ids = optional("eos_token_ids", list) or []
    if not all(isinstance(token_id, int) and not isinstance(token_id, bool) for token_id in eos_token_ids):
        raise TokenizerFilesError("tokenizer files: field 'eos_token_ids' must hold integers only")
    vocab_size = optional("vocab_size", int)
    if vocab_size is not None and not 0 < vocab_size <= MAX_VOCAB_SIZE:
        raise TokenizerFilesError(
            f"tokenizer files: field 'vocab_size' is {vocab_size}, 1 to {MAX_VOCAB_SIZE} are possible"
        )
    return TokenizerFiles(
        tokenizer_json=tokenizer_json.encode("utf-8", "surrogatepass"),
        chat_template=optional("chat_template", str),
        bos_token=optional("bos_token", str),
        eos_token=optional("eos_token", str),
        bos_token_id=optional("bos_token_id", int),
        eos_token_ids=tuple(eos_token_ids),
        add_bos_token=bool(optional("add_bos_token", bool)),
        vocab_size=vocab_size,
    )
