"""/v1/models, names and aliases, and the text routes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

PATH = "/v1/completions"


def test_the_client_lists_and_retrieves(alphabet: Any) -> None:
    with openai.OpenAI(base_url=f"{alphabet.url}/v1", api_key="any", max_retries=0) as client:
        listed = client.models.list().data
        assert [model.id for model in listed] == ["null"]
        assert (listed[0].object, listed[0].owned_by) == ("model", "dragoman")
        assert listed[0].created > 0
        assert client.models.retrieve("null") == listed[0]
        with pytest.raises(openai.NotFoundError) as caught:
            client.models.retrieve("org/unknown")
    assert caught.value.code == "model_not_found"


def test_s18_an_unknown_model_lists_what_is_served(alphabet: Any) -> None:
    for name in ("nul", "gpt-4", "x" * 10_000, ""):
        error = alphabet.refused(PATH, status=404, prompt="A", model=name)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert "null" in error["message"] and len(error["message"]) < 400
    assert "did you mean 'null'" in alphabet.refused(PATH, status=404, prompt="A", model="nul")["message"]


def test_s18_a_name_with_slashes(start_stack: Callable[..., Any]) -> None:
    stack = start_stack([("--served-model-name", "org/team/model")])
    for path in ("org/team/model", "org%2Fteam%2Fmodel"):
        assert httpx.get(f"{stack.url}/v1/models/{path}").json()["id"] == "org/team/model"
    reply = httpx.post(f"{stack.url}{PATH}", json={"model": "org/team/model", "prompt": "A", "max_tokens": 1})
    assert reply.json()["model"] == "org/team/model"


@pytest.mark.parametrize("option", [("--any-model",), ("--served-model-name", "*")])
def test_any_name_may_be_accepted(extra_gateway: Callable[..., str], option: tuple[str, ...]) -> None:
    url = extra_gateway(*option)
    reply = httpx.post(f"{url}{PATH}", json={"model": "gpt-4", "prompt": "A", "max_tokens": 1})
    assert reply.status_code == 200
    assert reply.json()["model"] == "gpt-4"


def test_an_alias_is_accepted_and_nothing_else(extra_gateway: Callable[..., str]) -> None:
    url = extra_gateway("--served-model-name", "gpt-4")
    for name, status in (("gpt-4", 200), ("gpt-5", 404), ("null", 200)):
        reply = httpx.post(f"{url}{PATH}", json={"model": name, "prompt": "A", "max_tokens": 1})
        assert reply.status_code == status


def test_tokenize_and_back(alphabet: Any) -> None:
    text = "naïve 你好 👩‍👩‍👧 <|im_end|>"
    reply = alphabet.post("/tokenize", prompt=text, with_pieces=True).json()
    assert reply["count"] == len(reply["tokens"]) == len(reply["pieces"])
    assert alphabet.post("/detokenize", tokens=reply["tokens"]).json() == {"prompt": text}
    assert b"".join(bytes(piece["bytes"]) for piece in reply["pieces"]).decode() == text
    literal = alphabet.post("/tokenize", prompt="<|im_end|>", parse_special_tokens=False).json()["tokens"]
    assert all(token_id < 256 for token_id in literal)


def test_the_template_is_applied(alphabet: Any) -> None:
    messages = [{"role": "user", "content": "hi"}]
    text = alphabet.post("/apply-template", messages=messages).json()["prompt"]
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    ids = alphabet.post("/tokenize", messages=messages).json()["tokens"]
    assert alphabet.post("/detokenize", tokens=ids).json()["prompt"] == text
    shorter = alphabet.post("/apply-template", messages=messages, add_generation_prompt=False).json()["prompt"]
    assert text.startswith(shorter) and len(shorter) < len(text)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"), ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": []}, "messages"), ("/detokenize", {"tokens": [1, 999]}, "tokens[1]"),
        ("/detokenize", {"tokens": "x"}, "tokens"), ("/detokenize", {"tokens": [True]}, "tokens[0]"),
        ("/detokenize", {}, "tokens"), ("/apply-template", {}, "messages"), ("/apply-template", {"messages": []}, "messages"),
        ("/apply-template", {"messages": [{"role": "foo", "content": "x"}]}, "messages[0].role"),
    ],
)  # fmt: skip
def test_bad_text_requests_are_named(alphabet: Any, path: str, body: dict[str, Any], param: str) -> None:
    assert alphabet.refused(path, **body)["param"] == param


def test_more_text_than_is_tokenized_at_once_is_refused(alphabet: Any) -> None:
    limit = 2 << 20
    long = "é" * (limit // 2 + 1)
    for body, param in (
        ({"prompt": long, "with_pieces": True}, "prompt"),
        ({"messages": [{"role": "user", "content": long}]}, "messages"),
    ):
        error = alphabet.refused("/tokenize", **body)
        assert error["param"] == param and str(limit) in error["message"]


def test_more_tokens_than_are_read_at_once_are_refused(alphabet: Any) -> None:
    reply = alphabet.http.post("/detokenize", content=b'{"tokens":[' + b"7," * (2 << 20) + b"7]}")
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "tokens" and str(2 << 20) in reply.json()["error"]["message"]


def test_health_and_info_show_the_agent(alphabet: Any) -> None:
    health = alphabet.http.get("/health").json()
    assert (health["status"], health["phase"], health["models"]) == ("ok", "serving", ["null"])
    agent = alphabet.http.get("/v1/server/info").json()["agents"][0]
    assert (agent["agent_id"], agent["state"]) == ("agent-0", "serving")
    assert agent["models"][0]["max_context_tokens"] > 0
