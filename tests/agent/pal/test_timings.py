"""Timings go to a file and back; a file that is none is refused with what to do."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman_agent.pal.timings import TIMINGS_SCHEMA_VERSION, Timings, TimingsError

GOOD = {"schema_version": TIMINGS_SCHEMA_VERSION, "fingerprint": "f", "kernel_hash": "k", "seconds": {"a": 1e-6}}


@given(st.dictionaries(st.text(max_size=20), st.floats(1e-9, 1e3)))
def test_a_file_gives_back_what_was_written(seconds: dict[str, float]) -> None:
    timings = Timings("print", "hash", seconds)
    assert Timings.from_json(timings.to_json(), "file") == timings


def test_equal_timings_are_equal_files() -> None:
    assert Timings("f", "k", {"a": 1.0, "b": 2.0}).to_json() == Timings("f", "k", {"b": 2.0, "a": 1.0}).to_json()


def test_new_times_replace_old_ones() -> None:
    timings = Timings("f", "k", {"a": 1.0}).with_seconds({"a": 2.0, "b": 3.0})
    assert (timings.get("a"), timings.get("b"), timings.get("c")) == (2.0, 3.0, None)


def test_what_cannot_run_is_kept_with_its_reason() -> None:
    timings = Timings("f", "k", {"a": 1.0}).with_failed({"b": "OutOfResources: shared memory"})
    read = Timings.from_json(timings.to_json(), "file")
    assert read == timings and read.failed["b"].startswith("OutOfResources")
    assert [read.knows(key) for key in "abc"] == [True, True, False] and read.get("b") is None
    assert Timings.from_json(json.dumps(GOOD), "of before").failed == {}


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"schema_version": 2}, "schema version 2"),
        ({"seconds": {"a": float("nan")}}, "a is nan"),
        ({"seconds": {"a": -1.0}}, "a is -1.0"),
        ({"seconds": {"a": 0}}, "a is 0"),
        ({"seconds": {"a": True}}, "a is no number"),
        ({"seconds": {"a": "fast"}}, "a is no number"),
        ({"seconds": [1]}, "no object"),
        ({"failed": [1]}, "failed is no object"),
        ({"failed": {"a": 1}}, "a text was expected"),
        ({"fingerprint": 7}, "a text was expected"),
        ({"kernel_hash": None}, "a text was expected"),
    ],
)
def test_what_cannot_be_used_is_named(change: dict[str, object], what: str) -> None:
    with pytest.raises(TimingsError, match=what) as caught:
        Timings.from_json(json.dumps(GOOD | change), "times.json")
    assert "times.json" in str(caught.value) and "delete the file" in str(caught.value)


@given(st.text(max_size=40) | st.sampled_from(["{}", "[]", "null", "1", json.dumps(GOOD)[:-3]]))
def test_no_text_breaks_the_reader(text: str) -> None:
    with pytest.raises(TimingsError):
        Timings.from_json(text, "times.json")
