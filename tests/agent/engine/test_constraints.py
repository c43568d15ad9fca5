"""Words that must not appear, and parts of a request that leave no token."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman_agent.engine.constraints import completing_ids
from dragoman_agent.engine.messages import Delta, Failed

WORDS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), max_size=4)


@given(words=WORDS, prompt=st.lists(st.integers(0, 3), max_size=4), output=st.lists(st.integers(0, 3), max_size=6))
def test_a_word_is_complete_exactly_with_a_completing_id(
    words: list[list[int]], prompt: list[int], output: list[int]
) -> None:
    found = set(completing_ids(words, prompt + output, len(prompt)))
    for token_id in range(4):
        after = [*output, token_id]
        completes = any(len(after) >= len(word) and after[-len(word) :] == word for word in words)
        assert (token_id in found) == completes


def tokens_of(events: list[Any]) -> list[int]:
    return [token_id for event in events if isinstance(event, Delta) for token_id in event.token_ids]


@pytest.mark.parametrize("length", [1, 2, 4])
def test_bad_words_are_not_written(lab: Any, start: Any, length: int) -> None:
    free = tokens_of(lab().run(start("r", "hello", 60)))
    word = free[20 : 20 + length]
    bound = tokens_of(lab().run(start("r", "hello", 60, bad_word_ids=[word])))
    assert not any(bound[i : i + length] == word for i in range(60))
    first = next(i for i in range(61 - length) if free[i : i + length] == word)
    assert bound[: first + length - 1] == free[: first + length - 1], (
        "nothing changes before the word would be complete"
    )


def test_a_resumed_stream_knows_the_words_begun(lab: Any, start: Any) -> None:
    free = tokens_of(lab().run(start("r", "hello", 60)))
    word = free[20:23]
    bound = tokens_of(lab().run(start("r", "hello", 60, bad_word_ids=[word])))
    first = next(i for i in range(58) if free[i : i + 3] == word)
    resumed = lab().run(start("r", "hello", 60, bad_word_ids=[word], delivered=[bound[: first + 2]]))
    assert tokens_of(resumed) == bound[first + 2 :]


def test_words_that_leave_nothing_are_told(lab: Any, start: Any) -> None:
    events = lab().run(start("r", "hello", 5, allowed_token_ids=[65], bad_word_ids=[[65, 65]]))
    assert tokens_of(events) == [65]
    assert isinstance(events[-1], Failed) and "leave no token" in events[-1].message
