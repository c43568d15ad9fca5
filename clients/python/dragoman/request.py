"""Turns the arguments of a call into the messages of the protocol, and says clearly what is wrong with them."""

from __future__ import annotations

import difflib
import json
import math
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from dragoman.durations import duration_of
from dragoman.errors import DragomanError
from dragoman.prefix_hash import prefix_hashes, prompt_digest_of_ids, prompt_digest_of_text, root_hash, wire_hash
from dragoman.v1 import admission_service_pb2 as admission_pb
from dragoman.v1 import error_pb2, tokens_pb2
from dragoman.v1 import generation_service_pb2 as pb
from dragoman.v1.tokenizer_service_pb2 import ChatMessage

Message = Mapping[str, str]
Prompt = str | Sequence[int] | Sequence[Message]


class GenerateOptions(TypedDict, total=False):
    """Options of `generate`, `chat`, `complete` and `quote`. One that is left out, or None, means the model's default.

    Names and ranges are those of SamplingParameters and StopCriteria in generation_service.proto; `n` is num_choices,
    `logprobs` is num_logprobs, `stop` is one stop string or several.
    The output has one form at most: `json_schema` (a schema or its text), `json_object`, `regex`, `choices` (one of these
    texts) or `grammar` (a Lark grammar). `deadline` and `max_queue_wait` are in seconds.
    """

    model: str | None
    max_output_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    stop: str | Sequence[str] | None
    n: int | None
    deadline: float | None
    request_id: str | None
    logprobs: int | None
    prompt_logprobs: int | None
    repetition_penalty: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    logit_bias: Mapping[int, float] | None
    allowed_token_ids: Sequence[int] | None
    bad_words: Sequence[str] | None
    json_schema: str | Mapping[str, Any] | None
    json_object: bool | None
    regex: str | None
    choices: Sequence[str] | None
    grammar: str | None
    min_output_tokens: int | None
    stop_token_ids: Sequence[int] | None
    include_stop_string: bool | None
    ignore_eos: bool | None
    add_special_tokens: bool | None
    parse_special_tokens: bool | None
    skip_special_tokens: bool | None
    cache_salt: str | None
    priority: Literal["interactive", "standard", "batch"] | None
    max_queue_wait: float | None


_PRIORITIES = {
    "interactive": admission_pb.PRIORITY_INTERACTIVE,
    "standard": admission_pb.PRIORITY_STANDARD,
    "batch": admission_pb.PRIORITY_BATCH,
}
# option -> field of the message
_SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "seed": "seed",
    "n": "num_choices",
    "logprobs": "num_logprobs",
    "prompt_logprobs": "num_prompt_logprobs",
    "repetition_penalty": "repetition_penalty",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "logit_bias": "logit_bias",
    "allowed_token_ids": "allowed_token_ids",
    "bad_words": "bad_words",
}
_STOP = {
    "max_output_tokens": "max_output_tokens",
    "min_output_tokens": "min_output_tokens",
    "stop_token_ids": "token_ids",
    "include_stop_string": "include_stop_string",
    "ignore_eos": "ignore_eos",
}
_FORMS = {
    "json_schema": "json_schema",
    "json_object": "json_object",
    "regex": "regex",
    "choices": "choices",
    "grammar": "lark",
}
_TEXT = ("add_special_tokens", "parse_special_tokens", "skip_special_tokens")


def invalid(param: str, message: str) -> DragomanError:
    """The error of a bad argument."""
    return DragomanError(error_pb2.ERROR_REASON_INVALID_REQUEST, f"{param}: {message}", metadata={"param": param})


def given_options(options: GenerateOptions) -> dict[str, Any]:
    """The options that are not None. Raises TypeError for a name that does not exist."""
    known = GenerateOptions.__annotations__
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f" (known: {', '.join(known)})"
            raise TypeError(f"unknown option {name!r}{hint}")
    return {name: value for name, value in options.items() if value is not None}


def build_generate(prompt: str | Sequence[int], given: Mapping[str, Any], model: str) -> pb.GenerateRequest:
    """The request for an agent, without ticket, deadline and resume state. Raises DragomanError(INVALID_REQUEST)."""
    request_id = read_text("request_id", given.get("request_id") or str(uuid.uuid4()))
    request = pb.GenerateRequest(request_id=request_id, model=model)
    if isinstance(prompt, bytes | bytearray) or not isinstance(prompt, Sequence):
        raise invalid("prompt", f"must be a text, a list of token ids or a list of messages, not {prompt!r:.80}")
    if isinstance(prompt, str):
        request.text = read_text("prompt", prompt)
    else:
        if not prompt:
            raise invalid("prompt", "the list of token ids is empty; give at least one")
        try:
            request.token_ids.ids.extend(prompt)
        except (TypeError, ValueError) as error:
            raise invalid("prompt", f"is neither a text nor a list of token ids: {error}") from None
    for option, name in _SAMPLING.items():
        if option in given:
            _assign(request.sampling, name, option, given[option])
    for option, name in _STOP.items():
        if option in given:
            _assign(request.stop, name, option, given[option])
    for option in _TEXT:
        if option in given:
            _assign(request.text_options, option, option, given[option])
    stops = given.get("stop", ())
    if not isinstance(stops, str | Sequence):
        raise invalid("stop", f"must be a text or a list of texts, not {stops!r:.80}")
    for text in [stops] if isinstance(stops, str) else stops:
        if not isinstance(text, str) or not text:
            raise invalid("stop", f"{text!r} is not a text of at least one character")
        request.stop.strings.append(read_text("stop", text))
    _add_form(request.sampling, given)
    request.cache_salt = read_text("cache_salt", given.get("cache_salt", ""))
    return request


def _add_form(sampling: pb.SamplingParameters, given: Mapping[str, Any]) -> None:
    """Write the one form that the output must have, if any."""
    forms = [option for option in _FORMS if option in given]
    if len(forms) > 1:
        raise invalid(forms[1], f"{forms[0]} and {forms[1]} are both given; the output can have one form only")
    for option in forms:
        value = given[option]
        if option == "json_schema" and isinstance(value, Mapping):
            try:
                value = json.dumps(value)
            except (TypeError, ValueError, RecursionError) as error:
                raise invalid(option, f"is not JSON: {error}") from None
        if option == "choices":
            if isinstance(value, str):
                raise invalid(option, "is one text; give a list of texts")
            _assign(sampling.grammar.choices, "texts", option, value)
        else:
            _assign(sampling.grammar, _FORMS[option], option, value)


def build_acquire(
    request: pb.GenerateRequest, given: Mapping[str, Any], tenant: str, model_digest: bytes = b""
) -> admission_pb.AcquireTicketRequest:
    """What the controller is told of a request: sizes, a digest and, where the model's digest is known, hashes of the full
    units of 64 ids, by which it finds an agent that holds them; never the prompt.
    """
    acquire = admission_pb.AcquireTicketRequest(
        request_id=request.request_id,
        model=request.model,
        max_output_tokens=request.stop.max_output_tokens,
        num_choices=request.sampling.num_choices,
        tenant=tenant,
    )
    if request.WhichOneof("prompt") == "text":
        if not request.text:  # 0 bytes would read as a size that was not given
            raise invalid("prompt", "the text is empty; give at least one character")
        acquire.prompt_bytes = len(request.text.encode())
        acquire.prompt_digest = prompt_digest_of_text(request.text)
    else:
        acquire.prompt_tokens = len(request.token_ids.ids)
        acquire.prompt_bytes = 4 * len(request.token_ids.ids)
        acquire.prompt_digest = prompt_digest_of_ids(request.token_ids.ids)
        if model_digest:
            root = root_hash(model_digest, cache_salt=request.cache_salt)
            acquire.block_hashes.extend(wire_hash(full) for full in prefix_hashes(root, request.token_ids.ids))
    priority = given.get("priority", "standard")
    if priority not in _PRIORITIES:
        raise invalid("priority", f"{priority!r} is not one of {', '.join(_PRIORITIES)}")
    acquire.priority = _PRIORITIES[priority]
    if "max_queue_wait" in given:
        acquire.max_queue_wait.CopyFrom(duration_of(read_seconds("max_queue_wait", given["max_queue_wait"])))
    return acquire


def build_messages(messages: Sequence[Message]) -> list[ChatMessage]:
    """The conversation. Raises DragomanError(INVALID_REQUEST) for a message that is not {"role": text, "content": text}."""
    built = []
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        raise invalid(
            "messages", f'must be a list such as [{{"role": "user", "content": "..."}}], not {messages!r:.80}'
        )
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise invalid(path, f'{message!r} is not of the form {{"role": "user", "content": "..."}}')
        extra = set(message) - {"role", "content"}
        if extra:
            raise invalid(f"{path}.{min(extra)}", "is not known; a message has role and content")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise invalid(f"{path}.{key}", f"must be a text, not {message.get(key)!r}")
        built.append(ChatMessage(role=message["role"], content=read_text(f"{path}.content", message["content"])))
    if not built:
        raise invalid("messages", "the conversation is empty; give at least one message")
    return built


def is_conversation(prompt: Prompt) -> bool:
    """Whether a prompt is a list of messages."""
    is_list = isinstance(prompt, Sequence) and not isinstance(prompt, str)
    return is_list and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def read_seconds(param: str, value: Any) -> float:
    """A positive, finite number of seconds."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise invalid(param, f"must be a number of seconds above 0, not {value!r}")
    return float(value)


def read_text(param: str, text: Any) -> str:
    """A text that can be sent. Raises DragomanError(INVALID_REQUEST) for anything else, and for half a character."""
    if not isinstance(text, str):
        raise invalid(param, f"must be a text, not {text!r:.80}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise invalid(param, f"is not valid Unicode: a lone surrogate at position {error.start}") from None
    return text


def read_ids(param: str, ids: Any) -> tokens_pb2.TokenIds:
    """Token ids to send. Raises DragomanError(INVALID_REQUEST) for anything that is no list of them."""
    if ids is None or isinstance(ids, str | bytes | bytearray):  # none would be sent, or characters pass for ids
        raise invalid(param, f"must be a list of token ids, not {ids!r:.80}")
    try:
        return tokens_pb2.TokenIds(ids=ids)
    except (TypeError, ValueError) as error:
        raise invalid(param, f"is no list of token ids: {error}") from None


def _assign(message: Any, name: str, option: str, value: Any) -> None:
    try:
        if isinstance(value, Mapping):
            getattr(message, name).update(value)
        elif isinstance(value, Sequence) and not isinstance(value, str):
            getattr(message, name).extend(value)
        else:
            setattr(message, name, value)
    except (TypeError, ValueError) as error:
        raise invalid(option, f"{value!r} does not fit: {error}") from None
