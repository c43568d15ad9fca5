"""Which tokens a row may not have: words that must not appear, ids that would end it too soon, and whether any is left."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from dragoman_agent.engine.request import Sequence

if TYPE_CHECKING:
    from dragoman_agent.engine.grammar import Form


def banned_ids(sequence: Sequence) -> list[int]:
    """Ids the next token of `sequence` must not be."""
    stop, words = sequence.request.stop, sequence.request.sampling.bad_word_ids
    banned = list(stop.masked_until_min) if sequence.num_output < stop.min_output_tokens else []
    if words:
        banned.extend(completing_ids(words, sequence.token_ids, sequence.num_prompt))
    return banned


def completing_ids(words: Iterable[list[int]], token_ids: list[int], num_prompt: int) -> list[int]:
    """Last tokens of the words whose other tokens the output ends with; a word of one token always counts.

    Only the output is looked at: a word that the prompt begins may be completed.
    """
    num_output = len(token_ids) - num_prompt
    return [
        word[-1]
        for word in words
        if len(word) == 1 or (num_output >= len(word) - 1 and token_ids[1 - len(word) :] == word[:-1])
    ]


def nothing_left(sequence: Sequence) -> bool:
    """Whether the parts of a request leave no token between them."""
    return _is_empty(sequence.form, sequence.request.sampling.allowed_token_ids, banned_ids(sequence))


def _is_empty(form: Form | None, allowed: Collection[int], banned: Collection[int]) -> bool:
    if form is None and not allowed:
        return False
    left = set(allowed) if form is None else form.allowed_ids()
    if form is not None and allowed:
        left &= set(allowed)
    return not left - set(banned)
