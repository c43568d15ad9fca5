"""What the harness calls a difference, a broken runner, and a case that is not written as it must be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from clients.conformance.case import BadCaseError, load_cases
from clients.conformance.expect import differences
from clients.conformance.observe import BadRunnerError, documents


@pytest.mark.parametrize(
    ("expected", "observed", "number"),
    [
        ({"a": 1}, {"a": 1, "b": 2}, 0),
        ({"a": 1}, {"a": 2}, 1),
        ({"a": 1}, {}, 1),
        ({"a": None}, {}, 1),
        ({"a": True}, {"a": 1}, 1),
        ({"a": 1}, {"a": True}, 1),
        ({"a": {"b": 1}}, {"a": None}, 1),
        ([1, {"a": 2}], [1, {"a": 2, "b": 3}], 0),
        ([1], [1, 2], 1),
        ({"$at_least": 3}, 3, 0),
        ({"$at_least": 3}, 2, 1),
        ({"$at_least": 3}, None, 1),
        ({"$at_least": 1, "$at_most": 3}, 4, 1),
        ({"$one_of": ["a", "b"]}, "c", 1),
        ({"$matches": "b+"}, "abbc", 0),
        ({"$matches": "^b"}, "abbc", 1),
        ({"$length": 2}, [1, 2], 0),
        ({"$near": [1, 0.1]}, 1.05, 0),
        ({"$near": [1, 0.1]}, 1.2, 1),
        ({"$has": [2]}, [1, 2], 0),
        ({"$has": [3]}, [1, 2], 1),
        ({"a": {"$same_as": "x.0.y"}}, {"a": 7}, 0),
        ({"a": {"$same_as": "x.0.y"}}, {"a": 8}, 1),
        ({"a": {"$same_as": "x.5.y"}}, {"a": 8}, 1),
    ],
)
def test_differences(expected: Any, observed: Any, number: int) -> None:
    assert len(differences(expected, observed, {"x": [{"y": 7}]})) == number


def test_an_operator_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match=r"\$atleast is not an operator"):
        differences({"$atleast": 3}, 3, {})


def token(cursor: int, *ids: int, choice: int = 0, finish: str | None = None, text: str = "x") -> dict[str, Any]:
    return {
        "call": 0, "event": "token", "cursor": cursor, "choice": choice, "token_ids": list(ids), "text": text,
        "finish_reason": finish,
    }  # fmt: skip


def result(*ids: int, text: str = "xx") -> dict[str, Any]:
    return {
        "call": 0,
        "event": "result",
        "choices": [{"text": text, "token_ids": list(ids), "finish_reason": "stop"}],
    }


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ([token(0, 1), token(1, 2, finish="stop"), result(1, 2)], ""),
        ([token(0, 1), token(2, 2, finish="stop"), result(1, 2)], "cursor 2 came where 1 is next"),
        ([token(0, 1), token(0, 1, finish="stop"), result(1, 1)], "cursor 0 came where 1 is next"),
        ([token(0, 1, finish="stop"), token(1, 2), result(1, 2)], "after its end"),
        ([token(0, 1), token(1, 2), result(1, 2)], "0 of 1 choices"),
        ([token(0, 1), token(1, 2, finish="stop"), result(1)], "token_ids of the result"),
        ([token(0, 1), token(1, 2, finish="stop"), result(1, 2, text="y")], "text of the result"),
        ([token(0, 1), token(1, 2, finish="stop", text="\ufffd"), result(1, 2, text="x\ufffd")], "U+FFFD"),
    ],
)
def test_every_stream_is_held_to_the_same(lines: list[dict[str, Any]], problem: str) -> None:
    found = documents(lines, 1)[0]["problems"]
    assert bool(found) == bool(problem)
    assert problem in "".join(found)


@pytest.mark.parametrize("lines", [[token(0, 1)], [result(1), result(1)], [result(1), token(0, 1)]])
def test_a_call_ends_once(lines: list[dict[str, Any]]) -> None:
    with pytest.raises(BadRunnerError):
        documents(lines, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- {name: a, why: b, stage: fleet, calls: [{do: embed, expect: {}}], what: 1}", "unknown key 'what'"),
        ("- {name: a, stage: fleet, calls: [{do: embed, expect: {}}]}", "why is missing"),
        ("- {name: a, why: b, stage: moon, calls: [{do: embed, expect: {}}]}", "stage 'moon'"),
        ("- {name: a, why: b, stage: fleet, calls: [{do: sing, expect: {}}]}", "do is 'sing'"),
        ("- {name: a, why: b, stage: fleet, calls: [{do: embed}]}", "expects nothing"),
        ("- {name: a, why: b, stage: fleet, calls: [{do: embed, expect: {}}], retry: {tries: 3}}", "retry.tries"),
        ("- {why: b}", "a mapping with a name"),
    ],
)
def test_a_case_that_is_not_written_as_it_must_be(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(BadCaseError, match=message):
        load_cases(tmp_path)
