"""Text of one choice against the whole decoded at once, and the rules of ending."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman_agent.engine.messages import Stop
from dragoman_agent.engine.output import OutputStream
from dragoman_text import TextTokenizer, byte_tokenizer_files

TOKENIZER = TextTokenizer.from_files(byte_tokenizer_files())


def stream(limit: int = 1000, **stop: Any) -> OutputStream:
    return OutputStream(TOKENIZER, Stop(**stop), limit)


def play(output: OutputStream, ids: list[int]) -> tuple[list[str], str, str | None]:
    pieces: list[str] = []
    for token_id in ids:
        piece = output.push(token_id)
        pieces.append(piece.text)
        if piece.finish:
            return pieces, piece.finish, piece.stop_string
    return pieces, "", None


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=40), stops=st.lists(st.text(min_size=1, max_size=4), max_size=4), include=st.booleans())
def test_text_is_the_decoded_text_up_to_the_first_stop(text: str, stops: list[str], include: bool) -> None:
    ids = list(text.encode())
    if not ids:
        return
    pieces, finish, found = play(stream(len(ids), strings=stops, include_stop_string=include), ids)
    ends = [(text.find(s) + len(s), -len(s), s) for s in stops if s in text]
    if not ends:
        assert ("".join(pieces), finish) == (text, "length")
        return
    end, negative_length, expected = min(ends)
    assert (finish, found) == ("stop", expected)
    assert "".join(pieces) == text[: end if include else end + negative_length]


@settings(max_examples=100, deadline=None)
@given(
    ids=st.lists(st.integers(0, 258), max_size=40),
    cut=st.integers(0, 40),
    stops=st.lists(st.sampled_from(["a", "ab", "é"])),
)
def test_replay_stands_where_the_stream_stood(ids: list[int], cut: int, stops: list[str]) -> None:
    whole = stream(len(ids) + 1, strings=stops)
    pieces, finish, _ = play(whole, ids)
    again = stream(len(ids) + 1, strings=stops)
    kept = min(cut, len(pieces))
    piece = again.replay(ids[:kept])
    assert piece.text == "" and again.num_sent == kept
    if kept < len(pieces) or not finish:
        assert not piece.finish
        rest, _, _ = play(again, ids[kept : len(pieces)])
        assert rest == pieces[kept:]
    else:
        assert piece.finish == finish


def test_characters_are_never_split_and_an_unfinished_one_is_shown_at_the_end() -> None:
    assert play(stream(5), list("é🙂".encode())[:5]) == (["", "é", "", "", "\ufffd"], "length", None)


def test_a_stop_string_made_only_by_the_end_counts() -> None:
    pieces, finish, found = play(stream(2, strings=["a\ufffd"]), [ord("a"), 0xC3])
    assert ("".join(pieces), finish, found) == ("", "stop", "a\ufffd")


def test_special_tokens_show_only_when_asked_for() -> None:
    ids = [ord("a"), 257, ord("b")]
    shown = OutputStream(TOKENIZER, Stop(), 3, skip_special_tokens=False)
    assert "".join(play(shown, ids)[0]) == "a<|im_start|>b"
    assert "".join(play(stream(3), ids)[0]) == "ab"


def test_an_id_beyond_the_vocabulary_has_no_text() -> None:
    assert play(stream(2), [400, ord("b")])[0] == ["", "b"]


@pytest.mark.parametrize("minimum", [0, 1, 3])
def test_a_stop_counts_from_the_minimum_on(minimum: int) -> None:
    pieces, finish, _ = play(stream(10, strings=["a"], min_output_tokens=minimum), list(b"aaaaaaaaaa"))
    assert (finish, len(pieces)) == ("stop", max(minimum, 1))


@pytest.mark.parametrize("limit", [5, 6])
def test_s30_a_stop_string_that_the_minimums_last_token_completes_ends_it(limit: int) -> None:
    """Begun before the minimum, completed with it; at the limit the stop wins."""
    pieces, finish, found = play(stream(limit, strings=["cde"], min_output_tokens=5), list(b"abcdef"))
    assert ("".join(pieces), finish, found) == ("ab", "stop", "cde")


def test_a_stop_before_the_minimum_is_shown_and_a_later_one_found() -> None:
    pieces, finish, found = play(stream(20, strings=["bc", "cdx"], min_output_tokens=4), list(b"abcdabcdxbcd"))
    assert pieces[:4] == ["a", "", "b", ""]  # c may begin cdx, and d goes on with it
    assert ("".join(pieces), finish, found) == ("abcda", "stop", "bc")
