"""Request fields to the sampling and stop messages of the agent: checks that need the vocabulary, and defaults."""

from __future__ import annotations

import math
from typing import Any

from dragoman.v1 import admission_service_pb2, generation_service_pb2
from dragoman_gateway.errors import invalid
from dragoman_gateway.schema import EmbeddingBody, SamplingBody
from dragoman_text import validate_stops

MAX_NUM_LOGIT_BIAS = 4096
SMALLEST_TOP_P = 1e-6  # top_p 0 asks for the smallest nucleus, which is one token
_PRIORITIES = {
    "interactive": admission_service_pb2.PRIORITY_INTERACTIVE,
    "standard": admission_service_pb2.PRIORITY_STANDARD,
    "batch": admission_service_pb2.PRIORITY_BATCH,
}


def sampling_of(
    body: SamplingBody, num_logprobs: int | None, vocabulary_size: int
) -> generation_service_pb2.SamplingParameters:
    """The sampling message; a field left out stays unset, so that the model's own default holds. Raises ApiError 400."""
    sampling = generation_service_pb2.SamplingParameters()
    if body.temperature is not None:
        sampling.temperature = body.temperature + 0.0  # -0.0 becomes 0.0
    if body.top_p is not None:
        sampling.top_p = max(body.top_p, SMALLEST_TOP_P)
    if body.top_k is not None:
        sampling.top_k = max(body.top_k, 0)  # -1 is what many clients send for off
    for name in ("min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"):
        value = getattr(body, name)
        if value is not None:
            setattr(sampling, name, value)
    if body.seed is not None:
        sampling.seed = body.seed % 2**64
    for token_id, bias in logit_bias_of(body.logit_bias, vocabulary_size).items():
        sampling.logit_bias[token_id] = bias
    if num_logprobs is not None:
        sampling.num_logprobs = num_logprobs
    if body.n is not None:
        sampling.num_choices = body.n
    if body.allowed_token_ids is not None:
        if not body.allowed_token_ids:
            raise invalid("allowed_token_ids is empty, so no token could be chosen; leave it out", "allowed_token_ids")
        check_ids(body.allowed_token_ids, "allowed_token_ids", vocabulary_size)
        sampling.allowed_token_ids.extend(body.allowed_token_ids)
    if body.bad_words:
        sampling.bad_words.extend(body.bad_words)
    if body.prompt_logprobs is not None:
        sampling.num_prompt_logprobs = body.prompt_logprobs
    return sampling


def stop_of(
    body: SamplingBody, max_output_tokens: int | None, vocabulary_size: int
) -> generation_service_pb2.StopCriteria:
    """The stop message. Raises ApiError 400 naming `stop` and the cap that was passed."""
    if body.stop == "":
        raise invalid("stop is empty and would stop before the first character; leave it out", "stop")
    try:
        strings = validate_stops(body.stop)
    except ValueError as error:
        raise invalid(str(error), "stop") from None
    stop = generation_service_pb2.StopCriteria(strings=strings)
    if max_output_tokens is not None:
        stop.max_output_tokens = max_output_tokens
    if body.ignore_eos:
        stop.ignore_eos = True
    if body.stop_token_ids:
        check_ids(body.stop_token_ids, "stop_token_ids", vocabulary_size)
        stop.token_ids.extend(body.stop_token_ids)
    if body.min_tokens:
        if max_output_tokens is not None and body.min_tokens > max_output_tokens:
            raise invalid(
                f"min_tokens is {body.min_tokens}, over the {max_output_tokens} tokens asked for", "min_tokens"
            )
        stop.min_output_tokens = body.min_tokens
    if body.include_stop_str_in_output:
        stop.include_stop_string = True
    return stop


def logit_bias_of(value: Any, vocabulary_size: int) -> dict[int, float]:
    """Token id to bias. Raises ApiError 400 naming the bad key."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise invalid("logit_bias must be an object of token ids and numbers", "logit_bias")
    if len(value) > MAX_NUM_LOGIT_BIAS:
        raise invalid(f"logit_bias has {len(value)} entries, at most {MAX_NUM_LOGIT_BIAS} are allowed", "logit_bias")
    biases = {}
    for key, bias in value.items():
        param = f"logit_bias.{key[:32]}"
        if not (key.isascii() and key.isdecimal() and len(key) < 12 and int(key) < vocabulary_size):
            raise invalid(f"{param}: the key must be a token id, 0 to {vocabulary_size - 1}", param)
        if isinstance(bias, bool) or not isinstance(bias, (int, float)) or not -100 <= bias <= 100:
            raise invalid(f"{param}: the value must be a number from -100 to 100", param)
        biases[int(key)] = float(bias)
    return biases


def check_ids(ids: list[Any], param: str, vocabulary_size: int) -> None:
    """Raises ApiError 400 with the position of the first item that is no token id of the vocabulary."""
    for position, token_id in enumerate(ids):
        # bool is an int to Python; a caller who sends true made a mistake.
        if type(token_id) is not int:
            raise invalid(f"{param}[{position}] must be a token id, a whole number", f"{param}[{position}]")
        if not 0 <= token_id < vocabulary_size:
            raise invalid(
                f"{param}[{position}] is {token_id}, outside the vocabulary (0 to {vocabulary_size - 1})",
                f"{param}[{position}]",
            )


def priority_of(body: SamplingBody | EmbeddingBody) -> admission_service_pb2.Priority:
    """The class of service; unset is the default."""
    return _PRIORITIES.get(body.priority or "", admission_service_pb2.PRIORITY_UNSPECIFIED)


def finite_logprob(value: float) -> float:
    """JSON has no infinity, so that -inf is written as -9999.0, as clients expect."""
    return value if math.isfinite(value) and value > -9999.0 else -9999.0
