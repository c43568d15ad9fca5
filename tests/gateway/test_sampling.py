"""Request fields to the agent's messages."""

from __future__ import annotations

from typing import Any

import pytest

from dragoman_gateway.errors import ApiError
from dragoman_gateway.sampling import SMALLEST_TOP_P, finite_logprob, logit_bias_of, sampling_of, stop_of
from dragoman_gateway.schema import CompletionBody, parse_body

VOCABULARY = 259


def body(**fields: Any) -> CompletionBody:
    return parse_body(CompletionBody, {"prompt": "x", **fields})[0]


def test_fields_left_out_stay_unset() -> None:
    sampling = sampling_of(body(), None, VOCABULARY)
    assert sampling.ByteSize() == 0


def test_given_fields_arrive() -> None:
    sampling = sampling_of(body(temperature=-0.0, top_p=0, top_k=7, seed=-1, n=3, min_p=0.5), 4, VOCABULARY)
    assert str(sampling.temperature) == "0.0"
    assert sampling.top_p == pytest.approx(SMALLEST_TOP_P)
    assert (sampling.top_k, sampling.num_choices, sampling.num_logprobs) == (7, 3, 4)
    assert sampling.seed == 2**64 - 1
    assert sampling.min_p == 0.5


@pytest.mark.parametrize("bias", [{"9999999": 5}, {"-1": 5}, {"foo": 0}, {"5": 101}, {"5": None}, {"5": True},
                                  {"259": 1}, {"٣": 1}, {"5": float("nan")}, {"5": "1"}])  # fmt: skip
def test_b05_a_bad_logit_bias_names_its_key(bias: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as caught:
        logit_bias_of(bias, VOCABULARY)
    assert caught.value.param == f"logit_bias.{next(iter(bias))}"


def test_b05_null_and_the_edges_are_accepted() -> None:
    assert logit_bias_of(None, VOCABULARY) == {}
    assert logit_bias_of({"0": -100, "258": 100}, VOCABULARY) == {0: -100.0, 258: 100.0}


@pytest.mark.parametrize("stop", [["x"] * 1025, "x" * 100_000, "", [""], [3], {"a": 1}, 3])
def test_b03_stops_over_the_cap_name_the_field(stop: Any) -> None:
    with pytest.raises(ApiError) as caught:
        stop_of(body(stop=stop), 16, VOCABULARY)
    assert caught.value.param == "stop"
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "stop", [None, [], "a", ["a1", "b2", "c3", "d4", "e5"], ["s" * 20 + str(i) for i in range(1000)]]
)
def test_b03_stops_within_the_cap_are_accepted(stop: Any) -> None:
    expected = [] if not stop else [stop] if isinstance(stop, str) else stop
    assert list(stop_of(body(stop=stop), 16, VOCABULARY).strings) == expected


def test_min_tokens_may_not_exceed_the_budget() -> None:
    with pytest.raises(ApiError) as caught:
        stop_of(body(min_tokens=17), 16, VOCABULARY)
    assert caught.value.param == "min_tokens"
    assert stop_of(body(min_tokens=16), 16, VOCABULARY).min_output_tokens == 16


def test_b10_minus_infinity_becomes_a_number() -> None:
    assert finite_logprob(float("-inf")) == -9999.0
    assert finite_logprob(float("nan")) == -9999.0
    assert finite_logprob(-1.5) == -1.5


@pytest.mark.parametrize("top_k", [-1, 0])
def test_top_k_off_is_spelled_in_two_ways(top_k: int) -> None:
    sampling = sampling_of(body(top_k=top_k), None, VOCABULARY)
    assert sampling.HasField("top_k") and sampling.top_k == 0
