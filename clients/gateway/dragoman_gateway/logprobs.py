"""Log-probabilities in the two shapes of the API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dragoman.v1.generation_service_pb2 import TokenLogprob
from dragoman_gateway.sampling import finite_logprob
from dragoman_text import StreamDetokenizer, TextTokenizer


def token_text(token_bytes: bytes) -> str:
    """A token for people: its text, or "bytes:\\xe4\\xbd" where it is a part of a character."""
    try:
        return token_bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)


def chat_entries(entries: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """`logprobs.content` of a chat choice: one entry a token, with its true bytes."""
    return [
        {
            **_chat_entry(entry.token_bytes, entry.logprob),
            "top_logprobs": [_chat_entry(top.token_bytes, top.logprob) for top in entry.top],
        }
        for entry in entries
    ]


def _chat_entry(token_bytes: bytes, logprob: float) -> dict[str, Any]:
    return {"token": token_text(token_bytes), "logprob": finite_logprob(logprob), "bytes": list(token_bytes)}


class CompletionLogprobs:
    """The four parallel arrays of one completions choice. Offsets count characters of the returned text."""

    def __init__(self, tokenizer: TextTokenizer, first_offset: int, *, skip_special_tokens: bool) -> None:
        self._detokenizer = StreamDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self._offset = first_offset

    def arrays(self, entries: Sequence[TokenLogprob], end: int | None = None) -> dict[str, Any]:
        """The arrays of the next tokens. `end` is the length of the whole text, once it is known."""
        arrays: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for entry in entries:
            arrays["tokens"].append(token_text(entry.token_bytes))
            arrays["token_logprobs"].append(finite_logprob(entry.logprob))
            # The sampled token's own is always there, so that there may be one more than was asked for.
            top = {token_text(entry.token_bytes): finite_logprob(entry.logprob)}
            for other in entry.top:
                top.setdefault(token_text(other.token_bytes), finite_logprob(other.logprob))
            arrays["top_logprobs"].append(top)
            arrays["text_offset"].append(self._offset if end is None else min(self._offset, end))
            self._offset += len(self._detokenizer.push([entry.token_id]))
        return arrays
