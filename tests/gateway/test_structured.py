"""Structured output and scored prompts through gateway, agent and engine: every form parses, every bad one is 400."""

from __future__ import annotations

import json
import re
import socket
from typing import Any

import jsonschema
import openai
import pytest
from pydantic import BaseModel

HI = [{"role": "user", "content": "hi"}]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def content(api: Any, **body: Any) -> str:
    choice = api.chat(HI, max_tokens=512, **body)["choices"][0]
    assert choice["finish_reason"] == "stop"
    return str(choice["message"]["content"])


def test_a_schema_gives_an_object_of_it(hashed: Any) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}
    for seed in range(3):
        text = content(hashed, response_format=form, temperature=1.0, seed=seed)
        jsonschema.validate(json.loads(text), PERSON)


def test_the_other_forms(hashed: Any) -> None:
    assert isinstance(json.loads(content(hashed, response_format={"type": "json_object"})), dict)
    assert content(hashed, guided_choice=["red", "green\n<>%", "réd"]) in ("red", "green\n<>%", "réd")
    assert re.fullmatch("[0-9]{3}-[a-f]+", content(hashed, guided_regex="[0-9]{3}-[a-f]+", temperature=1.0, seed=5))
    assert re.fullmatch("a*b", content(hashed, structured_outputs={"grammar": 'start: "a" start | "b"'}))
    json.loads(content(hashed, json_schema={"$ref": "#/$defs/t", "$defs": {"t": {"enum": [1, "x"]}}}))


class Point(BaseModel):
    x: int
    label: str | None


def test_parse_of_the_openai_client(hashed: Any) -> None:
    with openai.OpenAI(base_url=f"{hashed.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.parse(model="null", messages=HI, response_format=Point, max_tokens=512)
    parsed = answer.choices[0].message.parsed
    assert isinstance(parsed, Point)


def test_each_choice_has_a_form_of_its_own(hashed: Any, text_of: Any) -> None:
    body = {"messages": HI, "n": 3, "temperature": 1.0, "seed": 1, "max_tokens": 512}
    events = hashed.events(CHAT, **body, guided_json=PERSON)
    texts = {text_of(events, index) for index in range(3)}
    assert len(texts) > 1
    for text in texts:
        jsonschema.validate(json.loads(text), PERSON)


DEEP: dict[str, Any] = {}
for _ in range(300):
    DEEP = {"type": "object", "properties": {"a": DEEP}}


@pytest.mark.parametrize(
    ("extra", "param", "word"),
    [
        ({"guided_grammar": "root ::= ("}, "guided_grammar", "a rule of a Lark grammar is `start: ...`"),
        ({"guided_grammar": "root: ("}, "guided_grammar", "Expected"),
        ({"guided_json": {"$ref": "#"}}, "guided_json", "contradict"),
        ({"guided_json": {"$ref": "#/$defs/a"}}, "guided_json", "does not exist"),
        ({"guided_json": {"$ref": "http://127.0.0.1:1/x"}}, "guided_json", "127.0.0.1"),
        ({"guided_json": {"not": {}}}, "guided_json", "not"),
        ({"guided_json": {"if": {}, "then": {}}}, "guided_json", "if"),
        ({"guided_json": {"type": "array", "uniqueItems": True}}, "guided_json", "uniqueItems"),
        ({"guided_json": {"type": "integer", "minimum": 5, "maximum": 2}}, "guided_json", "minimum"),
        ({"guided_json": False}, "guided_json", "false"),
        ({"guided_json": {"enum": []}}, "guided_json", "empty"),
        ({"guided_json": DEEP}, "guided_json", "deep"),
        ({"guided_json": "{"}, "guided_json", "not JSON"),
        ({"guided_regex": "(?=a)b"}, "guided_regex", "look-around"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}},
         "response_format", "not"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_b15_a_form_that_cannot_be_compiled_is_400(
    hashed: Any, extra: dict[str, Any], param: str, word: str, stream: bool
) -> None:
    error = hashed.refused(CHAT, messages=HI, stream=stream, **extra)
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert word in error["message"] and len(error["message"]) < 400
    assert error["message"].startswith(f"{param}: ")


def test_b15_a_schema_may_refer_to_itself(hashed: Any) -> None:
    link = {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}
    node = {
        "type": "object",
        "properties": {"value": {"type": "boolean"}, "next": link},
        "required": ["value", "next"],
        "additionalProperties": False,
    }
    schema = {"$ref": "#/$defs/node", "$defs": {"node": node}}
    depths = set()
    for seed in range(6):
        value = json.loads(content(hashed, guided_json=schema, temperature=1.0, seed=seed))
        jsonschema.validate(value, schema)
        depths.add(str(value).count("value"))
    assert len(depths) > 1


def test_b15_nothing_is_fetched(hashed: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as canary:
        canary.settimeout(0.3)
        url = f"http://127.0.0.1:{canary.getsockname()[1]}/s.json"
        for schema in ({"$ref": url}, {"type": "object", "properties": {"a": {"$ref": f"{url}#/a"}}}):
            error = hashed.refused(CHAT, messages=HI, guided_json=schema)
            assert url in error["message"]
        assert content(hashed, guided_json={"$schema": url, "$id": url, "const": 7}) == "7"
        with pytest.raises(TimeoutError):
            canary.accept()


def test_b15_large_forms_compile(hashed: Any) -> None:
    names = [f"value{i}" for i in range(20_000)]
    assert json.loads(content(hashed, guided_json={"enum": names})) in names
    nested = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 100_000}}, "required": ["a"]}
    assert "a" in json.loads(content(hashed, guided_json=nested))


def test_b16_white_space_ends(hashed: Any) -> None:
    bias = {str(ord(" ")): 100, str(ord("\n")): 100}
    schema = {**PERSON, "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}}, "required": ["a", "b"]}
    text = content(hashed, guided_json=schema, logit_bias=bias)
    jsonschema.validate(json.loads(text), schema)
    assert max(len(run) for run in re.findall(r"\s*", text)) <= 16
    choice = hashed.chat(HI, max_tokens=512, response_format={"type": "json_object"}, logit_bias=bias)["choices"][0]
    if choice["finish_reason"] == "stop":
        json.loads(choice["message"]["content"])
    else:
        assert choice["finish_reason"] == "length"


def test_bad_words_do_not_appear(hashed: Any) -> None:
    free = hashed.complete("hello", max_tokens=40, seed=7)["choices"][0]["text"]
    word, first = free[10:13].strip(), free[0]
    assert word and first.strip(), "the seed gives other text now: choose one whose text has words there"
    bound = hashed.complete("hello", max_tokens=40, seed=7, bad_words=[word, first])["choices"][0]["text"]
    assert word in free and word not in bound and free[0] not in bound


@pytest.mark.parametrize("stream", [False, True])
def test_b04_a_prompt_is_scored(hashed: Any, stream: bool) -> None:
    prompt = "The capital of France"
    body = {"prompt": prompt, "echo": True, "max_tokens": 0, "logprobs": 2}
    if stream:
        events = hashed.events(COMPLETIONS, **body, stream_options={"include_usage": True})
        usage = events[-1]["usage"]
        shown = [event["choices"][0] for event in events[:-1]]
        text = "".join(choice["text"] for choice in shown)
        logprobs, finish = shown[0]["logprobs"], shown[-1]["finish_reason"]
    else:
        answer = hashed.complete(**body)
        choice, usage = answer["choices"][0], answer["usage"]
        text, logprobs, finish = choice["text"], choice["logprobs"], choice["finish_reason"]
    assert (text, finish, usage["completion_tokens"]) == (prompt, "length", 0)
    assert [len(values) for values in logprobs.values()] == [len(prompt)] * 4
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
    assert "".join(logprobs["tokens"]) == prompt and logprobs["text_offset"] == list(range(len(prompt)))
    assert all(len(top) <= 3 for top in logprobs["top_logprobs"][1:])


def test_b04_scores_are_those_of_a_run_that_generates(hashed: Any) -> None:
    scored = hashed.complete([[72, 105, 33], [72, 105]], echo=True, max_tokens=0, logprobs=1)["choices"]
    running = hashed.complete([[72, 105, 33], [72, 105]], echo=True, max_tokens=1, logprobs=1)["choices"]
    for one, other in zip(scored, running, strict=True):
        count = len(one["logprobs"]["tokens"])
        assert one["logprobs"]["token_logprobs"] == other["logprobs"]["token_logprobs"][:count]
        assert len(other["logprobs"]["tokens"]) == count + 1
        assert other["logprobs"]["text_offset"][-1] == len(one["text"])


def test_prompt_logprobs(hashed: Any) -> None:
    choice = hashed.complete("hey", max_tokens=1, prompt_logprobs=1)["choices"][0]
    entries = choice["prompt_logprobs"]
    assert entries[0] is None and len(entries) == 3
    assert entries[1][str(ord("e"))]["decoded_token"] == "e"
    whole = hashed.chat(HI, max_tokens=1, prompt_logprobs=0)
    assert len(whole["prompt_logprobs"]) == whole["usage"]["prompt_tokens"]
    error = hashed.refused(COMPLETIONS, prompt="hey", prompt_logprobs=1, stream=True)
    assert error["param"] == "prompt_logprobs"
