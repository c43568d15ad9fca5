"""The messages that a call's arguments become, and what is said of arguments that cannot."""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import pytest

from dragoman import AsyncClient, DragomanError
from dragoman.prefix_hash import prefix_hashes, root_hash, wire_hash
from dragoman.request import build_acquire, build_generate, build_messages, given_options
from dragoman.v1 import admission_service_pb2


def build(prompt: Any = "hi", **options: Any) -> Any:
    return build_generate(prompt, given_options(options), "m")  # type: ignore[arg-type]


def test_options_land_in_their_fields() -> None:
    request = build(
        temperature=0.5, top_p=0.9, top_k=40, min_p=0.1, seed=3, n=2, logprobs=4, stop="a", stop_token_ids=[7],
        max_output_tokens=9, min_output_tokens=1, ignore_eos=True, include_stop_string=True, logit_bias={5: -1.0},
        skip_special_tokens=False, cache_salt="s", request_id="r", repetition_penalty=1.5, json_schema="{}",
    )  # fmt: skip
    sampling, stop = request.sampling, request.stop
    assert (sampling.temperature, sampling.top_k, sampling.seed, sampling.num_choices) == (0.5, 40, 3, 2)
    assert (sampling.num_logprobs, sampling.logit_bias[5], sampling.grammar.json_schema) == (4, -1.0, "{}")
    assert (stop.max_output_tokens, list(stop.strings), list(stop.token_ids), stop.ignore_eos) == (9, ["a"], [7], True)
    assert request.text_options.skip_special_tokens is False
    assert (request.cache_salt, request.request_id, request.text) == ("s", "r", "hi")


def test_the_form_of_the_output() -> None:
    def grammar(**options: Any) -> Any:
        return build(**options).sampling.grammar

    assert grammar(json_schema={"type": "null"}).json_schema == '{"type": "null"}'
    assert grammar(json_object=True).json_object
    assert list(grammar(choices=["a", "b"]).choices.texts) == ["a", "b"]
    assert grammar(grammar="start: x").lark == "start: x"
    assert not build().sampling.HasField("grammar")
    for options, param in (
        ({"json_schema": "{}", "regex": "a"}, "regex"), ({"choices": "ab"}, "choices"), ({"regex": 3}, "regex"),
        ({"json_schema": {"a": object()}}, "json_schema"), ({"choices": [1]}, "choices"),
    ):  # fmt: skip
        with pytest.raises(DragomanError) as caught:
            grammar(**options)
        assert caught.value.metadata["param"] == param


def test_unset_is_not_zero() -> None:
    request = build(temperature=0, top_k=None)
    assert request.sampling.HasField("temperature")
    for name in ("top_k", "top_p", "seed", "num_choices", "num_logprobs"):
        assert not request.sampling.HasField(name)
    assert not request.stop.HasField("max_output_tokens")
    assert len(request.request_id) == 36


def test_the_controller_sees_sizes_and_a_digest_and_never_the_prompt() -> None:
    options = given_options({"priority": "batch", "max_queue_wait": 1.5})
    text = build_acquire(build("grüße"), options, "tenant")
    assert (text.prompt_bytes, text.HasField("prompt_tokens")) == (7, False)
    assert text.prompt_digest == hashlib.sha256("grüße".encode()).digest()
    assert text.priority == admission_service_pb2.PRIORITY_BATCH
    assert text.max_queue_wait.ToTimedelta().total_seconds() == 1.5
    assert "grüße".encode() not in text.SerializeToString()
    long = build(list(range(1, 200)))
    hashes = [wire_hash(full) for full in prefix_hashes(root_hash(b"d" * 32), range(1, 200))]
    assert list(build_acquire(long, {}, "", b"d" * 32).block_hashes) == hashes and len(hashes) == 3
    assert (
        not build_acquire(long, {}, "").block_hashes
        and not build_acquire(build("text"), {}, "", b"d" * 32).block_hashes
    )
    ids = build_acquire(build([1, 2, 300]), {}, "")
    assert ids.prompt_tokens == 3
    assert ids.prompt_digest == hashlib.sha256(struct.pack("<3I", 1, 2, 300)).digest()


@pytest.mark.parametrize(
    ("prompt", "options", "param"),
    [
        ([], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([1.5], {}, "prompt"),
        ("\udc80", {}, "prompt"),
        (None, {}, "prompt"),
        (5, {}, "prompt"),
        (b"hi", {}, "prompt"),
        ({"a": 1}, {}, "prompt"),
        ("hi", {"top_k": -1}, "top_k"),
        ("hi", {"seed": "x"}, "seed"),
        ("hi", {"stop": [""]}, "stop"),
        ("hi", {"stop": [3]}, "stop"),
        ("hi", {"stop": 3}, "stop"),
        ("hi", {"request_id": 5}, "request_id"),
        ("hi", {"request_id": "\ud800"}, "request_id"),
        ("hi", {"cache_salt": 5}, "cache_salt"),
        ("hi", {"logit_bias": {"a": 1}}, "logit_bias"),
        ("hi", {"allowed_token_ids": ["a"]}, "allowed_token_ids"),
        ("hi", {"json_schema": "{}", "regex": "a"}, "regex"),
        ("hi", {"max_output_tokens": 1 << 40}, "max_output_tokens"),
    ],
)
def test_a_bad_argument_is_named(prompt: Any, options: dict[str, Any], param: str) -> None:
    with pytest.raises(DragomanError) as failure:
        build(prompt, **options)
    assert failure.value.reason_name == "invalid_request"
    assert failure.value.metadata["param"] == param
    assert failure.value.message.startswith(f"{param}: ")


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (None, "messages"),
        ("hi", "messages"),
        (["hi"], "messages[0]"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": 1, "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": "x", "name": "y"}], "messages[0].name"),
    ],
)
def test_a_bad_message_is_named(messages: Any, param: str) -> None:
    with pytest.raises(DragomanError) as failure:
        build_messages(messages)
    assert failure.value.metadata["param"] == param


def test_an_empty_text_cannot_be_admitted() -> None:
    with pytest.raises(DragomanError, match="prompt: the text is empty"):
        build_acquire(build(""), {}, "")


@pytest.mark.parametrize("prompt", [None, 5, {"a": 1}])
async def test_a_prompt_of_no_known_kind_is_refused_when_it_is_read(prompt: Any) -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(DragomanError, match="prompt: must be a text"):
            await client.complete(prompt, model="m")


def test_an_unknown_option_names_the_nearest() -> None:
    with pytest.raises(TypeError, match="unknown option 'temprature'; did you mean 'temperature'"):
        build(temprature=1)


@pytest.mark.parametrize("deadline", [0, -1, float("nan"), float("inf"), "soon", True])
async def test_a_bad_deadline(deadline: Any) -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(DragomanError, match="deadline: must be a number of seconds above 0"):
            client.generate("hi", deadline=deadline)


async def test_a_bad_priority_and_queue_wait() -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(DragomanError, match="priority: 'urgent' is not one of interactive, standard, batch"):
            await client.complete("hi", model="m", priority="urgent")  # type: ignore[typeddict-item]
        with pytest.raises(DragomanError, match="max_queue_wait: must be"):
            await client.complete("hi", model="m", max_queue_wait=-1)
