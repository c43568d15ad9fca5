"""/v1/embeddings: kinds of input, both encodings, the real client, prompts, refusals, an agent that is lost."""

from __future__ import annotations

import base64
import math
import signal
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from tests.gateway.stack import Stack

from dragoman import Client

PATH = "/v1/embeddings"
QUERY = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:"


def vectors(api: Any, input: Any, **fields: Any) -> list[list[float]]:
    reply = api.post(PATH, input=input, **fields)
    assert reply.status_code == 200, reply.text
    data = reply.json()["data"]
    assert [entry["index"] for entry in data] == list(range(len(data)))
    assert {entry["object"] for entry in data} == {"embedding"}
    return [entry["embedding"] for entry in data]


def test_the_real_client_reads_both_encodings(hashed: Any) -> None:
    with openai.OpenAI(base_url=f"{hashed.url}/v1", api_key="any", max_retries=0) as client:
        default = client.embeddings.create(model="null", input=["first", "second"])  # asks for base64 by itself
        floats = client.embeddings.create(model="null", input=["first", "second"], encoding_format="float")
        short = client.embeddings.create(model="null", input="first", dimensions=8)
    assert [item.embedding for item in default.data] == [item.embedding for item in floats.data]
    assert [item.index for item in default.data] == [0, 1]
    assert default.usage.prompt_tokens == default.usage.total_tokens == len("firstsecond")
    assert (default.object, default.model) == ("list", "null")
    for item in (*floats.data, *short.data):
        assert math.sqrt(sum(value * value for value in item.embedding)) == pytest.approx(1.0, abs=1e-5)
    whole, cut = floats.data[0].embedding[:8], short.data[0].embedding
    norm = math.sqrt(sum(value * value for value in whole))
    assert cut == pytest.approx([value / norm for value in whole], abs=1e-5)


def test_base64_is_of_little_endian_float32(hashed: Any) -> None:
    (text,) = vectors(hashed, "hello", encoding_format="base64")
    data = base64.b64decode(text, validate=True)
    assert list(struct.unpack(f"<{len(data) // 4}f", data)) == vectors(hashed, "hello")[0]


def test_every_kind_of_input_gives_what_the_agent_gives(hash_stack: Stack, hashed: Any) -> None:
    with Client(hash_stack.controller_address) as client:
        one, two = (list(vector) for vector in client.embed(["one", "two"]).vectors)
        asked = list(client.embed(["one"], prompt_name="query").vectors[0])
    assert vectors(hashed, "one") == vectors(hashed, ["one"]) == [one]
    assert vectors(hashed, ["one", "two", "one"]) == [one, two, one]
    assert vectors(hashed, list(b"one")) == vectors(hashed, [list(b"one")]) == [one]
    assert vectors(hashed, [list(b"one"), list(b"two")]) == [one, two]
    assert vectors(hashed, "one", prompt_name="query") == vectors(hashed, QUERY + "one") == [asked]
    assert vectors(hashed, "one", instruction="Find it") == vectors(hashed, "Instruct: Find it\nQuery:one") != [one]


def test_many_inputs_go_through_in_one_request(hashed: Any) -> None:
    found = vectors(hashed, [f"text {index}" for index in range(2048)], encoding_format="base64", dimensions=16)
    assert len(set(found)) == 2048
    assert found[77:78] == vectors(hashed, "text 77", encoding_format="base64", dimensions=16)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"input": ""}, "input", "empty"),
        ({"input": []}, "input", "empty"),
        ({"input": ["a", ""]}, "input[1]", "empty"),
        ({"input": [[1], []]}, "input[1]", "empty"),
        ({"input": [[1], "a"]}, "input[1]", "do not mix"),
        ({"input": 5}, "input", "must be a string"),
        ({"input": {"a": 1}}, "input", "must be a string"),
        ({"input": None}, "input", "must be a string"),
        ({"input": [1, 2.5]}, "input[1]", "whole number"),
        ({"input": [[1], [True]]}, "input[1][0]", "whole number"),
        ({"input": [1, 999_999]}, "input[1]", "outside the vocabulary"),
        ({"input": [[1]] * 2049}, "input", "at most 2048"),
        ({}, "input", "required"),
        ({"input": "a", "dimensions": 0}, "dimensions", "a whole number from 1"),
        ({"input": "a", "dimensions": 100_000}, "dimensions", "the model's width"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "'float' or 'base64'"),
        ({"input": "a", "prompt_name": "passage"}, "prompt_name", "known: query, document"),
        ({"input": [1], "prompt_name": "query"}, "prompt_name", "token ids"),
        ({"input": "a", "prompt_name": "query", "instruction": "b"}, "instruction", "send one of them"),
        ({"input": "a", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "never cut"),
    ],
)
def test_what_is_refused_names_the_field(hashed: Any, fields: dict[str, Any], param: str, words: str) -> None:
    reply = hashed.post(PATH, **fields)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error"), error
    assert words in error["message"], error


def test_more_tokens_than_one_request_may_have_are_refused_for_good(hashed: Any) -> None:
    error = hashed.refused(PATH, input=[[65] * 32_000] * 66)
    assert (error["param"], error["type"]) == ("input", "invalid_request_error")
    assert "2112000 tokens" in error["message"] and "2097151" in error["message"]


def test_a_text_over_the_context_is_named(hashed: Any) -> None:
    reply = hashed.post(PATH, input=["short", "x" * 40_000])
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "input[1]"), error


def test_headers_models_and_metrics(hashed: Any) -> None:
    before = hashed.metric("dragoman_gateway_requests_total", route="embeddings", outcome="ok")
    reply = hashed.post(PATH, input="a", user="me", odd=1)
    assert reply.headers["x-dragoman-agent"] == "agent-0"
    assert "odd" in reply.headers["x-ignored-params"]
    assert hashed.metric("dragoman_gateway_requests_total", route="embeddings", outcome="ok") == before + 1
    (model,) = hashed.http.get("/v1/models").json()["data"]
    assert model["capabilities"]["embeddings"] is True
    refused = hashed.metric("dragoman_gateway_requests_total", route="embeddings", outcome="refused")
    assert hashed.post(PATH, input="").status_code == 400
    assert hashed.metric("dragoman_gateway_requests_total", route="embeddings", outcome="refused") == refused + 1


@pytest.mark.parametrize("caller", ["gateway", "client"])
def test_an_agent_that_is_lost_costs_a_retry_only(start_stack: Callable[..., Stack], caller: str) -> None:
    """The one that has the request is killed; the answer comes from the other."""
    stack = start_stack([("--null-speed", "20"), ("--null-speed", "20")])
    texts = [f"text number {index}, " * 60 for index in range(64)]
    found: list[Any] = []

    def ask() -> None:
        if caller == "gateway":
            found.append(httpx.post(f"{stack.url}{PATH}", json={"input": texts}, timeout=60))
        else:
            with Client(stack.controller_address) as client:
                found.append(client.embed(texts))

    thread = threading.Thread(target=ask)
    thread.start()
    victim = busy_agent(stack)
    stack.agents[victim].child.send_signal(signal.SIGKILL)
    thread.join(60)
    (reply,) = found
    if caller == "client":
        assert len(reply.vectors) == 64
    else:
        assert reply.status_code == 200, reply.text
        assert len(reply.json()["data"]) == 64
        assert reply.headers["x-dragoman-agent"] == f"agent-{1 - victim}"


def busy_agent(stack: Stack) -> int:
    """The number of the agent that runs something."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        for agent in httpx.get(f"{stack.url}/v1/server/info").json()["agents"]:
            if agent["running_requests"] + agent["waiting_requests"]:
                return int(agent["agent_id"].removeprefix("agent-"))
        time.sleep(0.02)
    raise AssertionError("no agent got the request")
