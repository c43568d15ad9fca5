"""Streams whose tokens come from the engine without text: their text is made here."""

from __future__ import annotations

import numpy as np

from dragoman_agent.engine.messages import Delta, Start, Step
from dragoman_text import StreamDetokenizer, TextTokenizer

_MAX_KEYS = 1 << 31  # keys are int32


class TextStream:
    """One choice. Owns its detokenizer and the cursor of its next token."""

    __slots__ = ("_choice", "_cursor", "_detokenizer", "_vocab_size", "request_id")

    def __init__(self, start: Start, choice: int, tokenizer: TextTokenizer) -> None:
        """What was delivered before a resume is replayed, so that the text goes on where it was."""
        delivered = start.delivered[choice] if choice < len(start.delivered) else []
        self.request_id = start.request_id
        self._choice = choice
        self._cursor = len(delivered)
        # Logits may be wider than the vocabulary; such an id stands for no text.
        self._vocab_size = tokenizer.vocab_size
        self._detokenizer = StreamDetokenizer(tokenizer, skip_special_tokens=start.skip_special_tokens)
        self._detokenizer.push(token_id for token_id in delivered if token_id < self._vocab_size)

    def push(self, token_id: int) -> Delta:
        """The delta of the next token."""
        cursor = self._cursor
        self._cursor = cursor + 1
        text = self._detokenizer.push_token(token_id) if token_id < self._vocab_size else ""
        return Delta(self.request_id, self._choice, cursor, [token_id], text)

    def finish(self, last: Delta) -> Delta:
        """The engine's last delta of the choice with its text: a stop token shows none, and what was held back comes out.

        Nothing follows tokens that had ended the choice before a resume.
        """
        if not last.token_ids and last.finish != "cancelled":
            return last
        for token_id in last.token_ids:
            if last.stop_token_id is None:
                last.text += self.push(token_id).text
        last.text += self._detokenizer.flush()
        return last


class TextStreams:
    """Owns the keys and the open streams."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._next_key = 0
        self.by_key: dict[int, TextStream] = {}

    def open(self, start: Start) -> None:
        """Give a request its key, and open a stream for each of its choices that goes on."""
        start.key = self._free_keys(start.num_choices)
        for choice in range(start.num_choices):
            if choice not in start.finished_choices:
                self.by_key[start.key + choice] = TextStream(start, choice, self._tokenizer)

    def close(self, keys: range) -> None:
        """Forget the streams of a request that has ended."""
        for key in keys:
            self.by_key.pop(key, None)

    def _free_keys(self, count: int) -> int:
        """The first of `count` keys in a row that no stream has. A key comes again after 2**31 others."""
        first = self._next_key
        while True:
            if first + count > _MAX_KEYS:
                first = 0
            taken = next((key for key in reversed(range(first, first + count)) if key in self.by_key), None)
            if taken is None:
                self._next_key = first + count
                return first
            first = taken + 1


def columns(step: Step) -> tuple[list[int], list[int]]:
    """Keys and token ids of a frame's columns."""
    return np.frombuffer(step.keys, "<i4").tolist(), np.frombuffer(step.token_ids, "<i4").tolist()
