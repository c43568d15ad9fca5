"""The forms an output can be asked to have, under all their names, as the one grammar of the protocol."""

from __future__ import annotations

from typing import Any

import orjson

from dragoman.v1 import generation_service_pb2
from dragoman_gateway.errors import ApiError, invalid
from dragoman_gateway.generation import GenerationSpec
from dragoman_gateway.schema import ChatBody, CompletionBody

ANY_JSON = "{}"
_STRUCTURED_KINDS = {
    "json": "guided_json",
    "regex": "guided_regex",
    "choice": "guided_choice",
    "grammar": "guided_grammar",
    "json_object": "guided_json_object",
}
# Field of the agent or the controller -> field of this API, for refusals; "sampling.grammar" depends on the request.
_PARAM_NAMES = {
    "sampling.num_choices": "n",
    "num_choices": "n",
    "sampling.num_logprobs": "logprobs",
    "stop.max_output_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "stop.strings": "stop",
    "stop.token_ids": "stop_token_ids",
    "stop.ignore_eos": "ignore_eos",
    "stop.include_stop_string": "include_stop_str_in_output",
    "text_options.skip_special_tokens": "skip_special_tokens",
    "token_ids": "prompt",
    "prompt_tokens": "prompt",
    "prompt_bytes": "prompt",
    "sampling.bad_words": "bad_words",
    "sampling.num_prompt_logprobs": "prompt_logprobs",
    "sampling.allowed_token_ids": "allowed_token_ids",
    "stop.min_output_tokens": "min_tokens",
}


def form_of(body: ChatBody | CompletionBody) -> tuple[generation_service_pb2.Grammar | None, dict[str, str]]:
    """The grammar a request asks for, if any, and how the agent's names of fields read here.

    Raises ApiError 400 naming a part that is missing or wrong, and for two forms at once.
    """
    found: list[tuple[str, generation_service_pb2.Grammar]] = []
    if body.response_format is not None:
        grammar = _response_format(body.response_format)
        if grammar is not None:
            found.append(("response_format", grammar))
    if body.structured_outputs is not None:
        found.extend(_structured(body.structured_outputs))
    for name in ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "grammar", "json_schema"):
        value = getattr(body, name)
        if value is not None:
            found.append((name, _grammar(name, name, value)))
    if len(found) > 1:
        raise invalid(f"{found[1][0]}: {found[0][0]} asks for a form already; the output can have one", found[1][0])
    if not found:
        return None, _PARAM_NAMES
    param, grammar = found[0]
    return grammar, {**_PARAM_NAMES, "sampling.grammar": param}


def refuse_streamed_scores(body: ChatBody | CompletionBody) -> None:
    """Raises ApiError 400 for prompt_logprobs with stream: chunks have no place for them."""
    if body.stream and body.prompt_logprobs is not None:
        raise invalid("prompt_logprobs is not sent in streams; leave out stream", "prompt_logprobs")


def restrict(spec: GenerationSpec, grammar: generation_service_pb2.Grammar | None, names: dict[str, str]) -> None:
    """Put what `form_of` gave into a spec."""
    if grammar is not None:
        spec.generate.sampling.grammar.CopyFrom(grammar)
    spec.param_names = names


def _response_format(form: dict[str, Any]) -> generation_service_pb2.Grammar | None:
    kind = form.get("type")
    if kind is None:
        raise invalid(
            "response_format.type is missing; use text, json_object or json_schema",
            "response_format.type",
            "missing_required_parameter",
        )
    if kind not in ("text", "json_object", "json_schema"):
        raise invalid("response_format.type must be text, json_object or json_schema", "response_format.type")
    if kind != "json_schema" and form.get("json_schema") is not None:
        path = "response_format.json_schema"
        raise invalid(f"{path} belongs to type json_schema, and type is {kind}; leave it out or change type", path)
    if kind == "text":
        return None
    if kind == "json_object":
        return generation_service_pb2.Grammar(json_object=True)
    part = form.get("json_schema")
    if not isinstance(part, dict):
        raise _missing("response_format.json_schema", "give name and schema")
    if not isinstance(part.get("name"), str) or not part["name"]:
        raise _missing("response_format.json_schema.name", "give a name")
    if "schema" not in part:
        raise _missing("response_format.json_schema.schema", "give a schema, or null for any JSON")
    return _schema(part["schema"], "response_format.json_schema.schema")


def _missing(path: str, what: str) -> ApiError:
    return invalid(f"{path} is missing; {what}", path, "missing_required_parameter")


def _structured(value: dict[str, Any]) -> list[tuple[str, generation_service_pb2.Grammar]]:
    given = {name: item for name, item in value.items() if item is not None and item is not False}
    for name in given:
        if name not in _STRUCTURED_KINDS:
            path = f"structured_outputs.{name[:64]}"
            raise invalid(f"{path} is not known; use one of {', '.join(_STRUCTURED_KINDS)}", path)
    return [
        (f"structured_outputs.{name}", _grammar(_STRUCTURED_KINDS[name], f"structured_outputs.{name}", item))
        for name, item in given.items()
    ]


def _grammar(kind: str, path: str, value: Any) -> generation_service_pb2.Grammar:
    if kind in ("guided_json", "json_schema"):
        return _schema(value, path)
    if kind == "guided_json_object":
        if value is not True:
            raise invalid(f"{path} must be true or left out", path)
        return generation_service_pb2.Grammar(json_object=True)
    if kind == "guided_choice":
        if not isinstance(value, list) or not value or not all(isinstance(item, str) and item for item in value):
            raise invalid(f"{path} must be a list of texts of at least one character", path)
        return generation_service_pb2.Grammar(choices=generation_service_pb2.GrammarChoices(texts=value))
    if not isinstance(value, str) or not value:
        raise invalid(f"{path} must be a text of at least one character", path)
    if kind == "guided_regex":
        return generation_service_pb2.Grammar(regex=value)
    return generation_service_pb2.Grammar(lark=value)


def _schema(value: Any, path: str) -> generation_service_pb2.Grammar:
    """A schema as an object, a boolean, its JSON text, or null for any JSON."""
    if isinstance(value, str):
        text = value
    elif value is None:
        text = ANY_JSON
    elif isinstance(value, (dict, bool)):
        try:
            text = orjson.dumps(value).decode()
        except orjson.JSONEncodeError:  # it was read from JSON, so that only its depth can be wrong
            raise invalid(f"{path}: the schema is nested too deeply", path) from None
    else:
        raise invalid(f"{path} must be a JSON schema: an object", path)
    if not text:
        raise invalid(f"{path} is empty; give a JSON schema", path)
    return generation_service_pb2.Grammar(json_schema=text)
