"""Token ids to text as they come, never splitting a character."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from dragoman_text.tokenizer import TextTokenizer


class StreamDetokenizer:
    """Text of one sequence of tokens, a piece at a time.

    The pieces joined are `tokenizer.decode` of all ids. What has come out after a token depends on the tokens up
    to it and on nothing else, so a resumed stream that replays them stands at the same place. O(1) a token.
    """

    def __init__(self, tokenizer: TextTokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._has_pending_bytes = False
        self._strips_next_space = tokenizer.strips_leading_space
        self._ascii_texts = tokenizer.ascii_texts

    def push(self, ids: Iterable[int]) -> str:
        """The text that `ids` complete; a character still missing bytes waits. Raises ValueError for an unknown id."""
        token_bytes, skipped = self._tokenizer.token_bytes, self._skipped
        data = b"".join([token_bytes(token_id) for token_id in ids if token_id not in skipped])
        if data.isascii() and not self._has_pending_bytes:
            text = data.decode("ascii")
        else:
            text = self._decoder.decode(data)
            self._has_pending_bytes = bool(self._decoder.getstate()[0])
        return self._without_leading_space(text) if self._strips_next_space else text

    def push_token(self, token_id: int) -> str:
        """`push` of one token; quicker where its bytes are ASCII and nothing waits, as nearly always."""
        if self._has_pending_bytes or self._strips_next_space or token_id in self._skipped:
            return self.push((token_id,))
        text = self._ascii_texts.get(token_id)
        if text is None:
            data = self._tokenizer.token_bytes(token_id)
            if not data.isascii():
                return self.push((token_id,))
            text = self._ascii_texts[token_id] = data.decode("ascii")
        return text

    def flush(self) -> str:
        """The end of the sequence: an incomplete character comes out as one U+FFFD. Call it once."""
        return self._without_leading_space(self._decoder.decode(b"", final=True))

    def _without_leading_space(self, text: str) -> str:
        if self._strips_next_space and text:
            self._strips_next_space = False
            return text[1:] if text.startswith(" ") else text
        return text
