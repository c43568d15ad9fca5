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


def prompt_arrays(
    tokenizer: TextTokenizer, token_ids: Sequence[int], entries: Sequence[TokenLogprob], text: str, num_top: int
) -> dict[str, list[Any]]:
    """The four arrays of an echoed prompt. The first token has no log-probability: nothing comes before it.

    `entries` are those of the tokens from the second on. Offsets count characters of `text`; a token that the tokenizer put
    before the text (a beginning-of-text token) is at its start.
    """
    detokenizer = StreamDetokenizer(tokenizer, skip_special_tokens=False)
    starts, num_chars = [], 0
    for token_id in token_ids:
        starts.append(num_chars)
        num_chars += len(detokenizer.push([token_id]))
    shift = max(num_chars + len(detokenizer.flush()) - len(text), 0)
    arrays: dict[str, list[Any]] = {
        "tokens": [token_text(tokenizer.token_bytes(token_id)) for token_id in token_ids],
        "token_logprobs": [None, *(finite_logprob(entry.logprob) for entry in entries)],
        "top_logprobs": [None, *(_top(entry, num_top) for entry in entries)],
        "text_offset": [min(max(start - shift, 0), len(text)) for start in starts],
    }
    return arrays


def prompt_entries(
    token_ids: Sequence[int], entries: Sequence[TokenLogprob]
) -> list[dict[str, dict[str, float | str]] | None]:
    """`prompt_logprobs` of an answer: null for the first token, then an object by token id for each."""
    shown: list[dict[str, dict[str, float | str]] | None] = [None] if token_ids else []
    for entry in entries:
        values = {str(entry.token_id): _prompt_entry(entry.token_bytes, entry.logprob)}
        for other in entry.top:
            values.setdefault(str(other.token_id), _prompt_entry(other.token_bytes, other.logprob))
        shown.append(values)
    return shown


def _prompt_entry(token_bytes: bytes, logprob: float) -> dict[str, float | str]:
    return {"logprob": finite_logprob(logprob), "decoded_token": token_text(token_bytes)}


def _top(entry: TokenLogprob, num_top: int | None = None) -> dict[str, float]:
    """The token's own and the best alternatives (all that came, or `num_top`): there may be one more than was asked for."""
    top = {token_text(entry.token_bytes): finite_logprob(entry.logprob)}
    for other in entry.top[:num_top]:
        top.setdefault(token_text(other.token_bytes), finite_logprob(other.logprob))
    return top


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
            arrays["top_logprobs"].append(_top(entry))
            arrays["text_offset"].append(self._offset if end is None else min(self._offset, end))
            self._offset += len(self._detokenizer.push([entry.token_id]))
        return arrays
