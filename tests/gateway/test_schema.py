"""Request bodies: what is refused with which path, what is ignored and said so, what null means."""

from __future__ import annotations

from typing import Any

import pytest

from dragoman_gateway.errors import ApiError
from dragoman_gateway.forms import form_of
from dragoman_gateway.schema import (
    ChatBody,
    CompletionBody,
    SamplingBody,
    ignored_header,
    parse_body,
    refuse_later_features,
)

HI = [{"role": "user", "content": "hi"}]


def refusal(body: dict[str, Any], model: type[SamplingBody] = ChatBody, *, strict: bool = False) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parsed, _ = parse_body(model, body, strict=strict)  # type: ignore[type-var]
        form_of(parsed)  # type: ignore[arg-type]
        if isinstance(parsed, ChatBody):
            refuse_later_features(parsed)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stream", "true"), ("stream", 1), ("n", 0), ("n", 129), ("n", 5_000_000), ("n", True), ("n", 1.5),
        ("top_logprobs", 1_000_000_000), ("top_logprobs", -1), ("top_logprobs", 21), ("logprobs", 5),
        ("max_tokens", 2**63 - 1), ("max_tokens", -1), ("max_completion_tokens", 0), ("seed", 1.8446744073709552e19),
        ("seed", 2**63), ("top_k", -5), ("temperature", -0.1), ("temperature", 2.1), ("temperature", float("nan")),
        ("temperature", float("inf")), ("top_p", 1.1), ("frequency_penalty", 2.5), ("presence_penalty", -3),
        ("model", 3), ("tools", "x"), ("response_format", "json"), ("min_p", 2), ("repetition_penalty", 0),
        ("stop_token_ids", [-1]), ("priority", "urgent"),
    ],
)  # fmt: skip
def test_b07_a_value_out_of_range_is_named(field: str, value: Any) -> None:
    error = refusal({"messages": HI, field: value})
    assert error.param is not None and error.param.startswith(field)
    assert field in error.message


@pytest.mark.parametrize(
    ("field", "values", "words"),
    [
        ("max_tokens", (-1, 0, 2**31, 1e30, "5"), "must be a whole number from 1 to 2147483647"),
        ("top_k", (-2, 2**31), "must be a whole number from -1 to 2147483647"),
        ("n", (0, 129, 1.5), "must be a whole number from 1 to 128"),
        ("seed", (2**63, 1e30), f"must be a whole number from {-(2**63)} to {2**63 - 1}"),
        ("temperature", (-0.1, 2.1, float("nan"), "hot"), "must be a number from 0 to 2"),
    ],
)
def test_a_number_out_of_range_says_the_range(field: str, values: tuple[Any, ...], words: str) -> None:
    for value in values:
        assert refusal({"messages": HI, field: value}).message == f"{field}: {words}"


def test_a_missing_field_is_named() -> None:
    error = refusal({})
    assert (error.param, error.code) == ("messages", "missing_required_parameter")


def test_b12_null_is_absent_for_every_optional_field() -> None:
    for model, required in ((ChatBody, {"messages": HI}), (CompletionBody, {"prompt": "x"})):
        body: dict[str, Any] = dict.fromkeys(model.model_fields, None) | required
        parsed, ignored = parse_body(model, body)  # type: ignore[type-var]
        assert ignored == []
        form_of(parsed)


def test_s26_what_older_tools_send_is_accepted() -> None:
    for extra in ({"max_tokens": None}, {"temperature": 0}, {"top_p": 0}, {"top_p": 1}, {"temperature": -0.0}):
        parse_body(ChatBody, {"messages": HI, **extra})


@pytest.mark.parametrize("seed", [-9007199254740991, -(2**63), 0, 2**63 - 1])
def test_b08_negative_seeds_are_legal(seed: int) -> None:
    assert parse_body(ChatBody, {"messages": HI, "seed": seed})[0].seed == seed


def test_unknown_fields_are_ignored_and_listed() -> None:
    _, ignored = parse_body(ChatBody, {"messages": HI, "foo": 1, "user": "u", "bar": None, "b\nad": 1, "store": True})
    assert ignored == ["foo", "user", "b\nad", "store"]
    assert ignored_header(ignored) == {"x-ignored-params": "foo,user,store,+1"}
    assert ignored_header([]) == {}
    assert len(ignored_header([f"n{i}" for i in range(10_000)])["x-ignored-params"]) < 400


def test_strict_params_refuse_the_unknown_but_not_the_harmless() -> None:
    error = refusal({"messages": HI, "tempratur": 1, "user": "u"}, strict=True)
    assert (error.param, error.code) == ("tempratur", "unknown_parameter")
    parse_body(ChatBody, {"messages": HI, "user": "u", "store": True}, strict=True)


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"chat_template": "{% for i in range(10**9) %}x{% endfor %}"}, "chat_template"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"functions": [{}]}, "functions"),
    ],
)
def test_what_comes_later_is_refused_by_name(extra: dict[str, Any], param: str) -> None:
    error = refusal({"messages": HI, **extra})
    assert (error.param, error.code) == (param, "unsupported_parameter")


@pytest.mark.parametrize(
    "extra",
    [{"response_format": {"type": "text"}}, {"tools": []}, {"tool_choice": "none"}, {"tools": None},
     {"guided_json": None}, {"modalities": ["text"]}, {"functions": []}],
)  # fmt: skip
def test_what_asks_for_nothing_is_accepted(extra: dict[str, Any]) -> None:
    refuse_later_features(parse_body(ChatBody, {"messages": HI, **extra})[0])


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": {}}, "response_format.json_schema.name"),
        ({"type": "json_schema", "json_schema": {"name": "a"}}, "response_format.json_schema.schema"),
        ({"type": "json_schema", "json_schema": {"name": "a", "schema": 3}}, "response_format.json_schema.schema"),
        ({"type": "json_schema", "json_schema": {"name": 1, "schema": {}}}, "response_format.json_schema.name"),
        ({"type": "yaml"}, "response_format.type"),
        ({}, "response_format.type"),
        ({"type": "json_object", "json_schema": {"name": "a"}}, "response_format.json_schema"),
    ],
)
def test_b13_a_half_filled_response_format_is_400(form: dict[str, Any], param: str) -> None:
    assert refusal({"messages": HI, "response_format": form}).param == param


def test_b13_a_null_schema_is_any_json() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": None}}
    grammar, names = form_of(parse_body(ChatBody, {"messages": HI, "response_format": form})[0])
    assert grammar is not None and grammar.json_schema == "{}"
    assert names["sampling.grammar"] == "response_format"


@pytest.mark.parametrize(
    ("extra", "kind", "value"),
    [
        ({"guided_json": {"type": "null"}}, "json_schema", '{"type":"null"}'),
        ({"guided_json": '{"type": "null"}'}, "json_schema", '{"type": "null"}'),
        ({"json_schema": False}, "json_schema", "false"),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_grammar": "start: x"}, "lark", "start: x"),
        ({"grammar": "start: x"}, "lark", "start: x"),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"structured_outputs": {"json": {}, "regex": None}}, "json_schema", "{}"),
        ({"structured_outputs": {"json_object": True}}, "json_object", True),
        ({"response_format": {"type": "json_object"}}, "json_object", True),
    ],
)
def test_a_form_has_one_meaning_under_each_name(extra: dict[str, Any], kind: str, value: Any) -> None:
    grammar, _ = form_of(parse_body(ChatBody, {"messages": HI, **extra})[0])
    assert grammar is not None and grammar.WhichOneof("kind") == kind and getattr(grammar, kind) == value


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"guided_choice": []}, "guided_choice"), ({"guided_choice": [""]}, "guided_choice"),
        ({"guided_regex": ""}, "guided_regex"), ({"guided_json": 3}, "guided_json"),
        ({"structured_outputs": {"yaml": 1}}, "structured_outputs.yaml"),
        ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"bad_words": [""]}, "bad_words[0]"), ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ],
)  # fmt: skip
def test_a_wrong_form_is_named(extra: dict[str, Any], param: str) -> None:
    assert refusal({"messages": HI, **extra}).param == param
