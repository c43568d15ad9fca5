"""What a request must say, and the error that names the field where it does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dragoman.errors import DragomanError
from dragoman_controller.requests import DEFAULT_OUTPUT_TOKENS, Resume, validate


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"request_id": ""}, "request_id"),
        ({"request_id": "x" * 129}, "request_id"),
        ({"request_id": "a\nb"}, "request_id"),
        ({"tenant": "a\x1b[2J"}, "tenant"),
        ({"tenant": "ü" * 65}, "tenant"),
        ({"model": ""}, "model"),
        ({"prompt_tokens": None}, "prompt_bytes"),
        ({"prompt_tokens": 0}, "prompt_tokens"),
        ({"prompt_digest": b"p" * 31}, "prompt_digest"),
        ({"prompt_digest": b""}, "prompt_digest"),
        ({"num_choices": 129}, "num_choices"),
        ({"prompt_tokens": 127, "block_hashes": (1, 2)}, "block_hashes"),
        ({"max_queue_wait_seconds": -1.0}, "max_queue_wait"),
        ({"deadline_seconds": -0.5}, "deadline"),
        ({"resume": Resume("a", 1, 0, 0)}, "resume.attempt"),
        ({"resume": Resume("a", 1, 4, 0)}, "resume.attempt"),
    ],
)
def test_a_bad_field_is_named(bench: Any, fields: dict[str, Any], param: str) -> None:
    request = replace(bench.request("r"), **fields)
    with pytest.raises(DragomanError) as raised:
        validate(request)
    assert raised.value.metadata["param"] == param
    assert param.split(".")[-1] in raised.value.message


def test_good_requests_pass(bench: Any) -> None:
    validate(bench.request("r", prompt_tokens=128, block_hashes=(1, 2), resume=Resume("a", 1, 3, 5)))
    validate(bench.request("r", prompt_tokens=None, prompt_bytes=1))


def test_sizes_that_are_not_told_are_predicted(bench: Any) -> None:
    request = bench.request("r", prompt_tokens=None, prompt_bytes=400, max_output_tokens=0)
    assert request.predicted_prompt_tokens() == 100
    assert request.predicted_output_tokens() == DEFAULT_OUTPUT_TOKENS
    assert request.min_context_tokens() == 1


def test_inputs_to_embed_are_bounded_together(bench: Any) -> None:
    told = bench.request("r", prompt_tokens=65_536, num_inputs=512)
    assert told.min_context_tokens() == 128  # the longest has at least the mean
    assert told.max_prompt_tokens(512) == 65_536
    unknown = bench.request("r", prompt_tokens=None, prompt_bytes=600, num_inputs=100)
    assert unknown.max_prompt_tokens(512) == 600 + 16 * 100
    assert bench.request("r", prompt_tokens=None, prompt_bytes=10**6, num_inputs=3).max_prompt_tokens(512) == 3 * 512
    assert (
        bench.request("r", prompt_tokens=None, prompt_bytes=10**9, num_inputs=2048).max_prompt_tokens(32_768) < 1 << 21
    )
    validate(bench.request("r", prompt_tokens=1 << 20, num_inputs=2048))
    for wrong, param in (
        ({"num_inputs": 2049}, "num_inputs"),
        ({"num_inputs": 2, "prompt_tokens": 1 << 21}, "prompt_tokens"),
    ):
        with pytest.raises(DragomanError) as raised:
            validate(bench.request("r", **wrong))
        assert raised.value.metadata["param"] == param
