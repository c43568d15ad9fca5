"""/v1/completions: kinds of prompt, echo, logprobs, stops, seeds, limits."""

from __future__ import annotations

import math
import time
from typing import Any

import openai
import pytest

PATH = "/v1/completions"


def test_client_whole_and_stream(alphabet: Any) -> None:
    with openai.OpenAI(base_url=f"{alphabet.url}/v1", api_key="any", max_retries=0) as client:
        answer = client.completions.create(model="null", prompt="A B C", max_tokens=5)
        assert answer.id.startswith("cmpl-")
        assert (answer.object, answer.choices[0].text, answer.choices[0].finish_reason) == (
            "text_completion", "DEFGH", "length",
        )  # fmt: skip
        chunks = list(client.completions.create(model="null", prompt="A B C", max_tokens=5, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "DEFGH"
    assert chunks[-1].choices[0].finish_reason == "length"
    assert all(chunk.object == "text_completion" for chunk in chunks)


def test_sixteen_tokens_by_default(alphabet: Any) -> None:
    assert alphabet.complete("A")["usage"]["completion_tokens"] == 16


def test_the_model_may_be_left_out_where_one_is_served(alphabet: Any) -> None:
    assert alphabet.complete("A", max_tokens=1)["model"] == "null"
    assert alphabet.complete("A", max_tokens=1, model=None)["model"] == "null"


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("A", ["BC"]),
        (["A", "K"], ["BC", "LM"]),
        ([65], ["BC"]),
        ([[65], [75, 76]], ["BC", "MN"]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_every_kind_of_prompt(alphabet: Any, text_of: Any, prompt: Any, texts: list[str], stream: bool) -> None:
    expected = [text for text in texts for _ in range(2)]
    if stream:
        events = alphabet.events(PATH, prompt=prompt, max_tokens=2, n=2)
        assert [text_of(events, index) for index in range(len(expected))] == expected
        reasons = {event["choices"][0]["index"]: event["choices"][0]["finish_reason"] for event in events}
        assert reasons == dict.fromkeys(range(len(expected)), "length")
    else:
        answer = alphabet.complete(prompt, max_tokens=2, n=2)
        assert [choice["text"] for choice in answer["choices"]] == expected
        assert [choice["index"] for choice in answer["choices"]] == list(range(len(expected)))
        assert answer["usage"]["completion_tokens"] == 2 * len(expected)


def test_many_prompts_more_than_run_at_once(alphabet: Any) -> None:
    prompts = [chr(65 + index % 20) for index in range(300)]
    answer = alphabet.complete(prompts, max_tokens=3)
    assert [choice["text"][0] for choice in answer["choices"]] == [chr(ord(prompt) + 1) for prompt in prompts]
    assert alphabet.refused(PATH, prompt=["x"] * 1025)["param"] == "prompt"


@pytest.mark.parametrize("stream", [False, True])
def test_echo_puts_the_prompt_before_the_text(alphabet: Any, text_of: Any, stream: bool) -> None:
    for prompt, shown in (("A é漢🙂 C", "A é漢🙂 C"), ([65, 66], "AB")):
        if stream:
            assert text_of(alphabet.events(PATH, prompt=prompt, max_tokens=2, echo=True))[: len(shown)] == shown
        else:
            text = alphabet.complete(prompt, max_tokens=2, echo=True)["choices"][0]["text"]
            assert text[: len(shown)] == shown and len(text) == len(shown) + 2


@pytest.mark.parametrize("stream", [False, True])
def test_b04_zero_tokens(alphabet: Any, text_of: Any, stream: bool) -> None:
    body = {"prompt": ["The capital", "x"], "echo": True, "max_tokens": 0}
    if stream:
        events = alphabet.events(PATH, **body, stream_options={"include_usage": True})
        texts = [text_of(events, 0), text_of(events, 1)]
        usage = events[-1]["usage"]
        assert [e["choices"][0]["finish_reason"] for e in events[:-1] if e["choices"][0]["finish_reason"]] == (
            ["length"] * 2
        )
    else:
        answer = alphabet.complete(**body)
        texts, usage = [choice["text"] for choice in answer["choices"]], answer["usage"]
        assert all(choice["finish_reason"] == "length" for choice in answer["choices"])
    assert texts == ["The capital", "x"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (12, 0)


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ([999999], "prompt[0]"), ([65, -1], "prompt[1]"), ([], "prompt"), ([[]], "prompt[0]"),
        ([[1, 2], []], "prompt[1]"), ([1.5], "prompt[0]"), ([True], "prompt[0]"), ([1, "a"], "prompt[1]"),
        ([2147483648], "prompt[0]"), ([[65], [66, 259]], "prompt[1][1]"), (["a", [1]], "prompt[1]"), ("", "prompt"),
        (None, "prompt"), ({}, "prompt"), (3, "prompt"), ([None], "prompt[0]"),
    ],
)  # fmt: skip
def test_b06_a_bad_prompt_is_named_and_nothing_runs(alphabet: Any, prompt: Any, param: str) -> None:
    before = alphabet.metric("dragoman_gateway_requests_total", route="completions", outcome="ok")
    assert alphabet.refused(PATH, prompt=prompt)["param"] == param
    assert alphabet.metric("dragoman_gateway_requests_total", route="completions", outcome="ok") == before


@pytest.mark.parametrize("bias", [{"9999999": 5}, {"-1": 5}, {"foo": 0}, {"5": 101}, {"5": None}])
def test_b05_a_bad_logit_bias_is_named(alphabet: Any, bias: dict[str, Any]) -> None:
    error = alphabet.refused(PATH, prompt="A", logit_bias=bias)
    assert error["param"] == f"logit_bias.{next(iter(bias))}"
    assert alphabet.complete("A", max_tokens=1, logit_bias=None)["choices"][0]["text"] == "B"
    assert alphabet.complete("A", max_tokens=2, logit_bias={"90": 100})["choices"][0]["text"] == "ZZ"


def test_b05_a_bias_beyond_every_number_is_named(alphabet: Any) -> None:
    reply = alphabet.http.post(PATH, content=b'{"prompt":"A","logit_bias":{"66":1,"5":1e400}}')
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "logit_bias.5")


@pytest.mark.parametrize(
    ("field", "raw"),
    [
        ("temperature", b"NaN"), ("temperature", b"1e999"), ("top_p", b"NaN"), ("n", b"5000000"),
        ("logprobs", b"1000000000"), ("max_tokens", b"9223372036854775807"), ("seed", b"18446744073709551616"),
        ("top_k", b"-5"),
    ],
)  # fmt: skip
def test_b07_absurd_numbers_are_refused_at_once(alphabet: Any, field: str, raw: bytes) -> None:
    start = time.monotonic()
    reply = alphabet.http.post(PATH, content=b'{"prompt":"A","' + field.encode() + b'":' + raw + b"}")
    assert reply.status_code == 400
    assert time.monotonic() - start < 0.5
    error = reply.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["param"] == field


@pytest.mark.parametrize("temperature", [-0.0, 1e-30, 0])
def test_b07_tiny_temperatures_are_greedy(alphabet: Any, temperature: float) -> None:
    assert alphabet.complete("A", max_tokens=3, temperature=temperature)["choices"][0]["text"] == "BCD"


def test_b08_choices_of_one_seed_differ_and_repeat(hashed: Any) -> None:
    def texts(**body: Any) -> list[str]:
        answer = hashed.complete("Once", temperature=1, max_tokens=16, **body)
        return [choice["text"] for choice in answer["choices"]]

    four = texts(n=4, seed=7)
    assert len(set(four)) == 4
    assert texts(n=4, seed=7) == four
    assert texts(seed=7) == four[:1]
    assert texts(seed=8) != four[:1]
    again = hashed.complete(["Once", "Once", "Twice"], seed=7, temperature=1, max_tokens=16)["choices"]
    assert [choice["text"] for choice in again[:2]] == four[:1] * 2, "each prompt of a list draws as it would alone"
    assert again[2]["text"] != four[0]
    assert texts(seed=-9007199254740991) == texts(seed=-9007199254740991)
    chat = [
        hashed.chat([{"role": "user", "content": "Once"}], n=4, seed=7, temperature=1, max_tokens=16)["choices"]
        for _ in range(2)
    ]
    assert [choice["message"] for choice in chat[0]] == [choice["message"] for choice in chat[1]]
    assert len({choice["message"]["content"] for choice in chat[0]}) == 4


def test_b03_five_stops_and_a_thousand(alphabet: Any) -> None:
    for stop in (["a1", "b2", "c3", "d4", "E"], [f"{index:020}" for index in range(999)] + ["E"]):
        choice = alphabet.complete("A", max_tokens=16, stop=stop)["choices"][0]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("BCD", "stop", "E")
    error = alphabet.refused(PATH, prompt="A", stop="x" * 100_000)
    assert error["param"] == "stop" and "4096" in error["message"]


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(("stop", "before"), [("OPQ", "LMN"), ("LM", ""), (["XYZ", "NOP"], "LM")])
def test_b02_a_stop_across_tokens_never_leaks(
    alphabet: Any, text_of: Any, stop: Any, before: str, include: bool
) -> None:
    body = {"prompt": "A B C D E F G H I J K", "max_tokens": 30, "stop": stop, "include_stop_str_in_output": include}
    whole = alphabet.complete(**body)
    events = alphabet.events(PATH, **body, stream_options={"include_usage": True})
    matched = stop if isinstance(stop, str) else "NOP"
    expected = before + matched if include else before
    assert whole["choices"][0]["text"] == text_of(events) == expected
    assert whole["choices"][0]["finish_reason"] == events[-2]["choices"][0]["finish_reason"] == "stop"
    assert whole["choices"][0]["stop_reason"] == events[-2]["choices"][0]["stop_reason"] == matched
    assert whole["usage"]["completion_tokens"] == events[-1]["usage"]["completion_tokens"]


@pytest.mark.parametrize("body", [
    {"max_tokens": 3, "stop": "D"}, {"max_tokens": 3, "stop_token_ids": [68]}, {"max_tokens": 3, "min_tokens": 2, "stop": "D"},
    {"max_tokens": 3, "min_tokens": 3, "stop": "D"},
])  # fmt: skip
def test_s30_stop_wins_over_length(alphabet: Any, text_of: Any, body: dict[str, Any]) -> None:
    whole = alphabet.complete("A", **body)
    events = alphabet.events(PATH, prompt="A", **body)
    assert whole["choices"][0]["finish_reason"] == events[-1]["choices"][0]["finish_reason"] == "stop"
    assert whole["choices"][0]["text"] == text_of(events) == "BC"
    assert whole["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("stream", [False, True])
def test_s30_what_was_held_back_for_a_stop_comes_out_at_the_length(alphabet: Any, text_of: Any, stream: bool) -> None:
    body = {"prompt": "A", "max_tokens": 3, "stop": ["CDE", "BCDEF"]}
    if stream:
        events = alphabet.events(PATH, **body)
        text, choice = text_of(events), events[-1]["choices"][0]
    else:
        choice = alphabet.complete(**body)["choices"][0]
        text = choice["text"]
    assert (text, choice["finish_reason"], choice["stop_reason"]) == ("BCD", "length", None)


@pytest.mark.parametrize(
    ("fields", "text", "reason"),
    [
        ({}, "", None),
        ({"skip_special_tokens": True}, "", None),
        ({"skip_special_tokens": False}, "<|im_start|>" * 3, None),
        ({"skip_special_tokens": False, "stop_token_ids": [257]}, "", 257),
        ({"skip_special_tokens": False, "stop": "<|im_start|>"}, "", "<|im_start|>"),
    ],
)
def test_s25_control_tokens_are_shown_only_when_asked_for(
    alphabet: Any, text_of: Any, fields: dict[str, Any], text: str, reason: Any
) -> None:
    body = {"prompt": "A", "max_tokens": 3, "allowed_token_ids": [257], **fields}
    choice = alphabet.complete(**body)["choices"][0]
    assert choice["text"] == text_of(alphabet.events(PATH, **body)) == text
    assert choice["stop_reason"] == reason


def test_b17_control_tokens_in_a_plain_prompt_may_be_switched_off(alphabet: Any) -> None:
    read, spelled = (
        alphabet.complete("<|im_end|>A", max_tokens=1, parse_special_tokens=parse)["usage"]["prompt_tokens"]
        for parse in (True, False)
    )
    assert (read, spelled) == (2, len("<|im_end|>A"))


def test_b01_characters_of_several_tokens_stay_whole(echo: Any, text_of: Any) -> None:
    text = "naïve 你好 👩‍👩‍👧 e\u0301 🏳️‍🌈"
    size = len(text.encode())
    for max_tokens in (size, text.encode().index("👩".encode()) + 6):
        whole = echo.complete(text, max_tokens=max_tokens, temperature=0)["choices"][0]["text"]
        events = echo.events(PATH, prompt=text, max_tokens=max_tokens, temperature=0)
        assert text_of(events) == whole
        pieces = [event["choices"][0]["text"] for event in events]
        assert not any("\ufffd" in piece for piece in pieces[:-2])
        if max_tokens == size:
            assert whole == text
        else:
            assert text.startswith(whole.removesuffix("\ufffd"))


def test_s09_logprob_bytes_are_the_true_bytes(echo: Any) -> None:
    text = "é漢🙂"
    size = len(text.encode())
    answer = echo.chat([{"role": "user", "content": text}], max_tokens=60, logprobs=True, temperature=0)
    content = answer["choices"][0]["logprobs"]["content"]
    joined = b"".join(bytes(entry["bytes"]) for entry in content)
    assert text.encode() in joined and size > 3
    assert all("Ã" not in entry["token"] for entry in content)


@pytest.mark.parametrize("stream", [False, True])
def test_s08_offsets_count_characters_of_the_returned_text(echo: Any, stream: bool) -> None:
    text = "é漢🙂a"
    body = {"prompt": text, "max_tokens": len(text.encode()), "temperature": 0, "logprobs": 1}
    if stream:
        arrays: dict[str, list[Any]] = {}
        for event in echo.events(PATH, **body):
            for name, values in (event["choices"][0]["logprobs"] or {}).items():
                arrays.setdefault(name, []).extend(values)
    else:
        arrays = echo.complete(**body)["choices"][0]["logprobs"]
    assert arrays.keys() == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert {len(values) for values in arrays.values()} == {len(text.encode())}
    assert arrays["text_offset"] == [0, 0, 1, 1, 1, 2, 2, 2, 2, 3]
    assert all(math.isfinite(value) and value <= 0 for value in arrays["token_logprobs"])
    assert all(1 <= len(top) <= 2 for top in arrays["top_logprobs"])


@pytest.mark.parametrize("raw", [b'{"prompt":"\\udc8d"}', b'{"prompt":"x","stop":"\\udc8d"}'])
def test_s07_a_lone_surrogate_is_400(alphabet: Any, raw: bytes) -> None:
    reply = alphabet.http.post(PATH, content=raw)
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "invalid_json"


@pytest.mark.parametrize("body", [{"temperature": 0}, {"top_p": 0}, {"top_p": 1}, {"top_k": 0}, {"max_tokens": None}])
def test_s26_what_older_tools_send_runs(hashed: Any, body: dict[str, Any]) -> None:
    assert hashed.complete("x", **body)["usage"]["completion_tokens"] == 16


def test_b14_the_context_is_never_exceeded_silently(alphabet: Any) -> None:
    limit = alphabet.http.get("/v1/models/null").json()["max_model_len"]
    for too_long in (limit, limit + 1, 10 * limit):
        error = alphabet.refused(PATH, prompt=[65] * too_long, max_tokens=1)
        assert error["code"] == "context_length_exceeded"
        assert str(too_long) in error["message"] and str(limit) in error["message"]
    for body in ({"max_tokens": 1}, {"max_tokens": 10}, {}):
        answer = alphabet.complete([65] * (limit - 1), **body)
        assert answer["usage"]["prompt_tokens"] == limit - 1
        assert answer["usage"]["completion_tokens"] == 1
        assert answer["choices"][0]["finish_reason"] == "length"
    error = alphabet.refused(PATH, prompt="A", truncate_prompt_tokens=5)
    assert error["param"] == "truncate_prompt_tokens"


def test_b18_usage_agrees_with_tokenize(alphabet: Any) -> None:
    for prompt in ("hello", "<|endoftext|>hello"):
        counted = alphabet.post("/tokenize", prompt=prompt).json()["count"]
        assert alphabet.complete(prompt, max_tokens=1)["usage"]["prompt_tokens"] == counted


@pytest.mark.parametrize(
    ("body", "param"),
    [({"suffix": "x"}, "suffix"), ({"best_of": 3}, "best_of"), ({"best_of": 1, "n": 2}, "best_of")],
)  # fmt: skip
def test_what_is_not_served_is_named(alphabet: Any, body: dict[str, Any], param: str) -> None:
    error = alphabet.refused(PATH, prompt="A", **body)
    assert (error["param"], error["code"]) == (param, "unsupported_parameter")


def test_best_of_equal_to_n_changes_nothing(alphabet: Any) -> None:
    assert len(alphabet.complete("A", n=2, best_of=2, max_tokens=1)["choices"]) == 2


def test_a_hundred_and_twenty_eight_choices(alphabet: Any) -> None:
    answer = alphabet.complete("A", n=128, max_tokens=2)
    assert [choice["text"] for choice in answer["choices"]] == ["BC"] * 128


def test_token_ids_are_returned_on_request(alphabet: Any) -> None:
    assert alphabet.complete("A", max_tokens=2, return_token_ids=True)["choices"][0]["token_ids"] == [66, 67]
    events = alphabet.events(PATH, prompt="A", max_tokens=2, return_token_ids=True)
    assert [i for event in events for i in event["choices"][0].get("token_ids", [])] == [66, 67]
