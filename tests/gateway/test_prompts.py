"""Prompts of models whose templates and tokenizers make trouble."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest

from dragoman.prefix_hash import prompt_digest_of_ids
from dragoman_gateway.errors import ApiError
from dragoman_gateway.models import ModelText, _build
from dragoman_gateway.prompts import chat_prompt, completion_prompts
from dragoman_gateway.schema import ChatBody, CompletionBody, parse_body
from dragoman_text import ChatTemplate, TextTokenizer, byte_tokenizer_files

HI = [{"role": "user", "content": "hi"}]
BOS = 256


def model(template: str | None = "", *, context: int = 1000, **changes: Any) -> ModelText:
    files = byte_tokenizer_files()
    files = dataclasses.replace(files, chat_template=files.chat_template if template == "" else template, **changes)
    tokenizer = TextTokenizer.from_files(files)
    return ModelText("m", b"d" * 32, context, tokenizer.vocab_size, tokenizer, ChatTemplate(files))


def chat(messages: Any, **fields: Any) -> ChatBody:
    return parse_body(ChatBody, {"messages": messages, **fields})[0]


def refusal(template: str | None, messages: Any = HI) -> ApiError:
    with pytest.raises(ApiError) as caught:
        chat_prompt(chat(messages), model(template), "")
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "system", "content": "s"}, *HI], [*HI, *HI], [{"role": "assistant", "content": "a"}],
        [{"role": "developer", "content": "s"}, *HI],
    ],
)  # fmt: skip
def test_b19_what_a_template_says_is_quoted(messages: Any) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    error = refusal(template, messages)
    assert "System role not supported" in error.message or "Roles must alternate" in error.message
    assert error.param == "messages"


def test_b19_a_model_without_a_template_says_how_to_set_one() -> None:
    message = refusal(None).message
    assert "tokenizer.chat_template" in message and "chat_template.jinja" in message


def test_b19_a_template_that_is_not_valid_costs_chats_alone() -> None:
    files = dataclasses.replace(byte_tokenizer_files(), chat_template="{% for %}")
    tokenizer, template = _build(list(files.to_chunks(1000)))
    served = ModelText("m", b"d" * 32, 1000, tokenizer.vocab_size, tokenizer, template)
    body = parse_body(CompletionBody, {"prompt": "hi"})[0]
    assert completion_prompts(body, served, "", 10)[0].token_ids == list(b"hi")
    with pytest.raises(ApiError) as caught:
        chat_prompt(chat(HI), served, "")
    assert (caught.value.status, caught.value.param) == (400, "messages")
    assert "not valid at line 1" in caught.value.message and "--chat-template" in caught.value.message


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "assistant", "content": "x", "tool_calls": 5}, "messages[0].tool_calls"),
        ({"role": "assistant", "content": "x", "tool_calls": "call"}, "messages[0].tool_calls"),
        ({"role": "assistant", "content": "x", "tool_calls": {"a": 1}}, "messages[0].tool_calls"),
        ({"role": "assistant", "content": "x", "tool_calls": True}, "messages[0].tool_calls"),
        ({"role": "user", "content": [{"type": []}]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": {"text": "a"}}]}, "messages[0].content[0]"),
    ],
)
def test_b12_fields_of_a_message_of_the_wrong_shape_are_named(message: Any, param: str) -> None:
    error = refusal("", [message])
    assert error.param == param


@pytest.mark.parametrize(
    "template",
    [
        "{{ nothing.at.all }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{{ ''.__class__.__mro__ }}",
        "{{ 'x' * 10**9 }}",
    ],
)
def test_b19_s06_a_faulty_template_ends_in_time_and_harms_nothing(template: str) -> None:
    start = time.monotonic()
    assert "template" in refusal(template).message
    assert time.monotonic() - start < 10
    assert chat_prompt(chat(HI), model(), "").token_ids


def test_b18_one_begin_of_text_token() -> None:
    with_bos = {"bos_token": "<|endoftext|>", "bos_token_id": BOS, "add_bos_token": True}
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    assert chat_prompt(chat(HI), model(template, **with_bos), "").token_ids.count(BOS) == 1
    for prompt in ("hi", "<|endoftext|>hi"):
        body = parse_body(CompletionBody, {"prompt": prompt})[0]
        assert completion_prompts(body, model(**with_bos), "", 10)[0].token_ids == [BOS, *b"hi"]


@pytest.mark.parametrize(("length", "fits"), [(98, True), (99, True), (100, False), (101, False), (1000, False)])
def test_b14_a_prompt_leaves_room_for_one_token(length: int, fits: bool) -> None:
    body = parse_body(CompletionBody, {"prompt": [65] * length, "max_tokens": 77})[0]
    if fits:
        assert len(completion_prompts(body, model(context=100), "", 10)[0].token_ids) == length
        return
    with pytest.raises(ApiError) as caught:
        completion_prompts(body, model(context=100), "", 10)
    assert caught.value.code == "context_length_exceeded"
    assert all(number in caught.value.message for number in (str(length), "100", "77 were asked for"))


def test_b14_a_chat_that_is_too_long_is_told_what_it_asked_for() -> None:
    with pytest.raises(ApiError) as caught:
        chat_prompt(chat([{"role": "user", "content": "a" * 200}]), model(context=100), "", 33)
    assert caught.value.code == "context_length_exceeded" and "33 were asked for" in caught.value.message


def test_hashes_depend_on_the_salt_and_the_digest_on_the_ids() -> None:
    body = parse_body(CompletionBody, {"prompt": "x" * 200})[0]
    plain, salted = (completion_prompts(body, model(), salt, 10)[0] for salt in ("", "mine"))
    assert len(plain.block_hashes) == 3
    assert not set(plain.block_hashes) & set(salted.block_hashes)
    assert plain.digest == salted.digest == prompt_digest_of_ids(plain.token_ids)


def test_continue_final_message_needs_an_assistant_at_the_end() -> None:
    with pytest.raises(ApiError) as caught:
        chat_prompt(chat(HI, continue_final_message=True), model(), "")
    assert caught.value.status == 400


@pytest.mark.parametrize("kind", ["chat", "text", "texts"])
def test_s14_a_prompt_of_too_many_bytes_is_refused_without_tokenizing_it(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = model(context=1000)
    text = "x" * (1 << 20)
    tokenized: list[int] = []
    encode = TextTokenizer.encode
    monkeypatch.setattr(
        TextTokenizer,
        "encode",
        lambda self, text, **options: (tokenized.append(len(text)), encode(self, text, **options))[1],
    )
    with pytest.raises(ApiError) as caught:
        if kind == "chat":
            chat_prompt(chat([*HI, {"role": "user", "content": text}]), served, "", 7)
        else:
            prompt = text if kind == "text" else ["short", text]
            completion_prompts(parse_body(CompletionBody, {"prompt": prompt, "max_tokens": 7})[0], served, "", 4)
    error = caught.value
    assert (error.status, error.code) == (400, "context_length_exceeded")
    assert error.param == {"chat": "messages", "text": "prompt", "texts": "prompt[1]"}[kind]
    assert "at least 20" in error.message and "7 were asked for" in error.message
    assert max(tokenized, default=0) < 10
