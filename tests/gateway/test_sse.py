"""The bytes of a stream, against the JSON they must hold."""

from __future__ import annotations

import json

import pytest

from dragoman_gateway.sse import Chunks


def chunks(*, is_chat: bool, include_usage: bool) -> Chunks:
    return Chunks(
        response_id="chatcmpl-1", object_name="chat.completion.chunk", created=5, model='m"\n', fingerprint="f",
        include_usage=include_usage, is_chat=is_chat,
    )  # fmt: skip


def parsed(data: bytes) -> dict[str, object]:
    assert data.startswith(b"data: ") and data.endswith(b"\n\n")
    assert data.count(b"\n") == 2
    value = json.loads(data[6:])
    assert isinstance(value, dict)
    assert "error" not in value
    return value


@pytest.mark.parametrize(
    "text", ["", "plain", 'q"uote\\', "line\nbreak\r\n", "naïve 你好 👩‍👩‍👧 e\u0301", "\u2028\x00"]
)
@pytest.mark.parametrize("include_usage", [True, False])
@pytest.mark.parametrize("is_chat", [True, False])
def test_every_text_survives(text: str, include_usage: bool, is_chat: bool) -> None:
    value = parsed(chunks(is_chat=is_chat, include_usage=include_usage).text(3, text))
    choice = {"index": 3, "logprobs": None, "finish_reason": None}
    choice |= {"delta": {"content": text}} if is_chat else {"text": text}
    assert value == {
        "id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 5, "model": 'm"\n',
        "system_fingerprint": "f", "choices": [choice], **({"usage": None} if include_usage else {}),
    }  # fmt: skip


def test_logprobs_and_ids_are_in_the_choice() -> None:
    value = parsed(chunks(is_chat=True, include_usage=False).text(0, "a", {"content": []}, [97]))
    assert value["choices"] == [
        {"index": 0, "delta": {"content": "a"}, "logprobs": {"content": []}, "token_ids": [97], "finish_reason": None}
    ]


def test_role_finish_and_usage() -> None:
    made = chunks(is_chat=True, include_usage=True)
    assert parsed(made.role(1))["choices"] == [
        {"index": 1, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    assert parsed(made.finish(1, "stop", "END"))["choices"] == [
        {"index": 1, "delta": {}, "logprobs": None, "finish_reason": "stop", "stop_reason": "END"}
    ]
    last = parsed(made.usage({"total_tokens": 3}))
    assert (last["choices"], last["usage"]) == ([], {"total_tokens": 3})
    text = chunks(is_chat=False, include_usage=False)
    assert parsed(text.finish(0, "length", None))["choices"] == [
        {"index": 0, "text": "", "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
