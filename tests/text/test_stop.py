"""Stop strings across pieces of text."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman_text import StopMatcher, validate_stops
from dragoman_text.stop import MAX_NUM_STOPS, MAX_STOP_CHARS, MAX_TOTAL_STOP_CHARS

short = st.text(alphabet="ab", min_size=1, max_size=4)


def run(stops: list[str], pieces: list[str], *, include_stop: bool = False) -> tuple[list[str], str | None]:
    """What comes out piece by piece (the flush last) and the stop string found."""
    matcher = StopMatcher(stops, include_stop)
    shown = [matcher.push(piece)[0] for piece in pieces]
    return [*shown, matcher.flush()], matcher.matched


def first_match(stops: list[str], text: str) -> tuple[str, str | None]:
    """Reference: the match that ends first, the longest of those that end there."""
    for end in range(len(text) + 1):
        matching = [stop for stop in stops if text[:end].endswith(stop)]
        if matching:
            stop = max(matching, key=len)
            return text[: end - len(stop)], stop
    return text, None


@given(stops=st.lists(short, max_size=5), pieces=st.lists(st.text(alphabet="abc", max_size=5), max_size=12))
def test_equals_a_plain_search(stops: list[str], pieces: list[str]) -> None:
    shown, matched = run(stops, pieces)
    assert ("".join(shown), matched) == first_match(stops, "".join(pieces))


@given(stops=st.lists(short, min_size=1, max_size=5), pieces=st.lists(st.text(alphabet="abc", max_size=5), max_size=12))
def test_the_stop_is_added_whole_when_included(stops: list[str], pieces: list[str]) -> None:
    shown, matched = run(stops, pieces, include_stop=True)
    before, expected = first_match(stops, "".join(pieces))
    assert ("".join(shown), matched) == (before + (expected or ""), expected)


@given(stops=st.lists(short, max_size=5), text=st.text(alphabet="abc", max_size=30))
def test_holds_back_only_what_may_begin_a_stop(stops: list[str], text: str) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    for index, character in enumerate(text):
        safe, matched = matcher.push(character)
        shown += safe
        if matched is not None:
            return
        held = text[len(shown) : index + 1]
        beginnings = [n for stop in stops for n in range(1, len(stop)) if text[: index + 1].endswith(stop[:n])]
        assert len(held) == max(beginnings, default=0)


@pytest.mark.parametrize(
    ("stops", "pieces", "text"),
    [
        (["O P Q"], [" L", " M", " N", " O", " P", " Q", " R"], " L M N "),
        (["DEFGHIJ"], list("ABCDEFGHIJK"), "ABC"),
        (["own fox"], ["The", " brown", " fox", " jumps"], "The br"),
        (["🙂"], ["a", "🙂b"], "a"),
        (["aab"], ["aaab"], "a"),
        (["bcd", "abcde"], ["abcde"], "a"),
        (["abc", "c"], ["xabc"], "x"),
    ],
)
def test_text_ends_before_the_match(stops: list[str], pieces: list[str], text: str) -> None:
    shown, matched = run(stops, pieces)
    assert "".join(shown) == text
    assert matched in stops


def test_the_start_of_a_stop_is_not_shown_early() -> None:
    matcher = StopMatcher(["O P Q"])
    assert matcher.push("N O") == ("N ", None)
    assert matcher.push(" P") == ("", None)
    assert matcher.push(" X") == ("O P X", None)


def test_the_tail_comes_with_the_flush() -> None:
    assert run(["abc"], ["xab"]) == (["x", "ab"], None)


def test_nothing_comes_after_a_match() -> None:
    matcher = StopMatcher(["b"])
    assert matcher.push("abc") == ("a", "b")
    assert matcher.push("more") == ("", "b")
    assert matcher.flush() == ""


def test_without_stops_text_passes() -> None:
    assert run([], ["a", "b"]) == (["a", "b", ""], None)


class CountingList(list[int]):
    """A list that counts how often it is read."""

    num_reads = 0

    def __getitem__(self, index: Any) -> Any:
        self.num_reads += 1
        return super().__getitem__(index)


@pytest.mark.parametrize("stops", [["qx" * 10], [f"q{index:04d}x{'q' * 14}" for index in range(1000)]])
def test_a_thousand_stops_take_the_steps_of_one(stops: list[str]) -> None:
    """Counted, not timed: the ways back taken are at most one a character, however many stops there are."""
    matcher = StopMatcher(stops)
    matcher._fail = CountingList(matcher._fail)
    pieces = ["q0123xqqq ", "qxqxqx ", "q0999xqqqqqqqqqqqqz"] * 50
    for piece in pieces:
        matcher.push(piece)
    assert 0 < matcher._fail.num_reads <= sum(map(len, pieces))


def test_the_largest_allowed_set_builds_quickly() -> None:
    stops = [f"{index:05d}{'x' * 59}" for index in range(MAX_NUM_STOPS)]
    began = time.process_time()
    StopMatcher(stops)
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    ("stops", "accepted"),
    [
        (None, ()),
        ("x", ("x",)),
        (["a", "b"], ("a", "b")),
        (("a",), ("a",)),
        ([], ()),
        (["a1", "b2", "c3", "d4", "e5"],) * 2,
    ],
)
def test_accepted_stops(stops: object, accepted: object) -> None:
    assert list(validate_stops(stops)) == list(accepted)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("stops", "message"),
    [
        (["a"] * (MAX_NUM_STOPS + 1), r"stop has 1025 strings, at most 1024"),
        (["x" * 100_000], r"stop\[0\] has 100000 characters, at most 4096"),
        (["x" * MAX_STOP_CHARS] * (MAX_TOTAL_STOP_CHARS // MAX_STOP_CHARS + 1), r"69632 characters together"),
        (["a", ""], r"stop\[1\] is empty"),
        ("", r"stop\[0\] is empty"),
        ([1], r"stop\[0\] must be a string, not int"),
        (["a", None], r"stop\[1\] must be a string, not NoneType"),
        (5, "must be a string or a list of strings, not int"),
        ({"a": 1}, "not dict"),
        (b"ab", "not bytes"),
    ],
)
def test_refused_stops_name_the_rule(stops: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        validate_stops(stops)


@given(
    text=st.text("abc", max_size=12),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4),
    first=st.integers(0, 12),
)
def test_a_stop_counts_where_the_text_says_so(text: str, stops: list[str], first: int) -> None:
    """Beside a plain search: the first stop whose last character is at `first` or later."""
    matcher = StopMatcher(stops)
    shown, found = "", None
    for index, character in enumerate(text):
        more, found = matcher.push(character, counts=index >= first)
        shown += more
        if found is not None:
            break
    ends = [(end, -len(s)) for s in stops for end in range(max(first + 1, 1), len(text) + 1) if text[:end].endswith(s)]
    if not ends:
        assert (shown + matcher.flush(), found) == (text, None)
        return
    end, negative_length = min(ends)
    assert (shown, found) == (text[: end + negative_length], text[end + negative_length : end])
