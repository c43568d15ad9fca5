"""Tokens of one choice to text: detokenized, stopped, and handed out with cursors.

What has come out up to cursor c depends on the tokens up to c and the stop list only, so a resumed stream that replays its
delivered tokens goes on exactly where it was.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import NamedTuple

from dragoman_agent.engine.messages import Stop
from dragoman_text import StopMatcher, StreamDetokenizer, TextTokenizer


class Piece(NamedTuple):
    """What one token brought: text that is now certain, and how the choice ended, if it did."""

    text: str
    finish: str  # "", "stop" or "length"
    stop_string: str | None
    stop_token_id: int | None


class OutputStream:
    """Output of one choice. `num_sent` is the cursor of the next token to be handed out."""

    __slots__ = (
        "_detokenizer",
        "_matcher",
        "_max_num_tokens",
        "_min_num_tokens",
        "_stop_ids",
        "_vocab_size",
        "num_sent",
    )

    def __init__(
        self, tokenizer: TextTokenizer, stop: Stop, max_num_tokens: int, *, skip_special_tokens: bool = True
    ) -> None:
        """`max_num_tokens` bounds the output: the asked length, or less where the context ends first."""
        self._detokenizer = StreamDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self._matcher = StopMatcher(stop.strings, stop.include_stop_string) if stop.strings else None
        self._stop_ids = frozenset((*stop.stop_token_ids, *stop.eos_token_ids))
        self._min_num_tokens = stop.min_output_tokens
        self._max_num_tokens = max_num_tokens
        self._vocab_size = tokenizer.vocab_size
        self.num_sent = 0

    def push(self, token_id: int) -> Piece:
        """Take the next token. A stop wins over the length when both come with it.

        A stop id ends the output from the token after the minimum on, a stop string from the minimum's last token on:
        the string is part of what was generated, the id is not.
        """
        cursor = self.num_sent
        self.num_sent = cursor + 1
        if token_id in self._stop_ids and cursor >= self._min_num_tokens:
            return Piece(self.flush(), "stop", None, token_id)
        # Logits may be wider than the vocabulary; such an id stands for no text.
        text = self._detokenizer.push_token(token_id) if token_id < self._vocab_size else ""
        matched = None
        if self._matcher is not None:
            text, matched = self._matcher.push(text, counts=self._strings_count)
            if matched is not None:
                return Piece(text, "stop", matched, None)
        if self.num_sent < self._max_num_tokens:
            return Piece(text, "", None, None)
        rest, matched = self._flush()
        return Piece(text + rest, "length" if matched is None else "stop", matched, None)

    def replay(self, token_ids: Iterable[int]) -> Piece:
        """Take tokens that were delivered before. Their text is dropped; `finish` tells if they ended the choice."""
        piece = Piece("", "length" if self._max_num_tokens <= 0 else "", None, None)
        for token_id in token_ids:
            piece = self.push(token_id)
            if piece.finish:
                break
        return piece._replace(text="")

    def complete(self, piece: Piece) -> Piece:
        """The piece of the last token, where nothing can follow it: a stop, which wins over the length."""
        if piece.finish:
            return piece._replace(finish="stop")
        rest, matched = self._flush()
        return Piece(piece.text + rest, "stop", matched, None)

    def flush(self) -> str:
        """The text held back, once no more can come."""
        return self._flush()[0]

    def _flush(self) -> tuple[str, str | None]:
        text = self._detokenizer.flush()
        if self._matcher is None:
            return text, None
        shown, matched = self._matcher.push(text, counts=self._strings_count) if text else ("", None)
        return shown + self._matcher.flush(), matched

    @property
    def _strings_count(self) -> bool:
        return self.num_sent >= self._min_num_tokens


def replay_ids(
    token_ids: Sequence[int], stop_ids: Container[int], min_num_tokens: int, max_num_tokens: int
) -> tuple[int, Piece]:
    """`OutputStream.replay` for a choice without stop strings, whose text nobody needs here: tokens taken, and the end."""
    for index, token_id in enumerate(token_ids):
        if token_id in stop_ids and index >= min_num_tokens:
            return index + 1, Piece("", "stop", None, token_id)
        if index + 1 >= max_num_tokens:
            return index + 1, Piece("", "length", None, None)
    return len(token_ids), Piece("", "length" if max_num_tokens <= 0 else "", None, None)
