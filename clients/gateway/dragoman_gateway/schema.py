"""The request bodies, as pydantic models. null means absent; unknown names are collected, not refused.

Ranges are those of the OpenAI API description; fields it does not have follow vLLM's names.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.json_schema import WithJsonSchema

from dragoman.limits import MAX_NUM_CHOICES
from dragoman_gateway.errors import ApiError, invalid, unsupported

MAX_COUNT = 2**31 - 1  # of tokens; larger numbers can only be mistakes
_HEADER_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
_MAX_IGNORED_NAMES = 32

Finite = Annotated[float, Field(allow_inf_nan=False)]
TokenCount = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Ids = Annotated[list[Annotated[int, Field(ge=0, le=MAX_COUNT)]], Field(max_length=65536)]
StopIds = Annotated[list[Annotated[int, Field(ge=0, le=MAX_COUNT)]], Field(max_length=1024)]
# Checked by hand, so that the error names the bad item and a long list costs one pass.
Prompt = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "minItems": 1, "items": {"type": "string"}},
                {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
                {
                    "type": "array",
                    "minItems": 1,
                    "items": {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
                },
            ]
        }
    ),
]
Stop = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]})]
LogitBias = Annotated[
    Any, WithJsonSchema({"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}})
]
Messages = Annotated[
    Any,
    WithJsonSchema(
        {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["role"],
                "properties": {
                    "role": {"enum": ["system", "developer", "user", "assistant", "tool", "function"]},
                    "content": {
                        "anyOf": [
                            {"type": "string"},
                            {"type": "array", "items": {"type": "object"}},
                            {"type": "null"},
                        ]
                    },
                },
            },
        }
    ),
]


class Body(BaseModel):
    """A request body. Types are strict: "true" is not true and 1.5 is not a count."""

    model_config = ConfigDict(strict=True, extra="ignore", hide_input_in_errors=True)


class StreamOptions(Body):
    """What a stream carries besides the deltas."""

    include_usage: bool | None = None


class SamplingBody(Body):
    """What chat and completions have in common."""

    model: str | None = Field(None, description="Name of the model; may be left out where one model is served.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=0, le=MAX_COUNT)] | None = None
    temperature: Annotated[Finite, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Finite, Field(ge=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_NUM_CHOICES)] | None = None
    stop: Stop | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    frequency_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    logit_bias: LogitBias | None = None
    user: str | None = None
    # Beyond the OpenAI API.
    top_k: Annotated[int, Field(ge=-1, le=MAX_COUNT)] | None = Field(None, description="0 and -1 keep all.")
    min_p: Annotated[Finite, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[Finite, Field(ge=0.01, le=100)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_COUNT)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: StopIds | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: Ids | None = None
    bad_words: Annotated[list[Annotated[str, Field(min_length=1, max_length=256)]], Field(max_length=256)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = Field(None, description="One of json, regex, choice, grammar (Lark).")
    guided_json: dict[str, Any] | bool | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = Field(None, description="A Lark grammar.")
    grammar: str | None = Field(None, description="As guided_grammar.")
    json_schema: dict[str, Any] | bool | str | None = Field(None, description="As guided_json.")
    return_token_ids: bool | None = None
    priority: Literal["interactive", "standard", "batch"] | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None


class ChatBody(SamplingBody):
    """POST /v1/chat/completions."""

    messages: Messages
    max_tokens: TokenCount | None = None
    max_completion_tokens: TokenCount | None = Field(None, description="Wins over max_tokens.")
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionBody(SamplingBody):
    """POST /v1/completions."""

    prompt: Prompt
    echo: bool | None = None
    suffix: str | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_NUM_CHOICES)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    add_special_tokens: bool | None = None
    parse_special_tokens: bool | None = None


class EmbeddingBody(Body):
    """POST /v1/embeddings."""

    model: str | None = None
    input: Prompt
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=MAX_COUNT)] | None = Field(None, description="At most the model's width.")
    user: str | None = None
    # Beyond the OpenAI API.
    prompt_name: str | None = Field(None, description="One of the model's own prompts, such as query.")
    instruction: str | None = Field(None, description="The task of the queries that the texts are.")
    priority: Literal["interactive", "standard", "batch"] | None = None


class TokenizeBody(Body):
    """POST /tokenize: of a text, or of a chat through the model's template."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    parse_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    with_pieces: bool | None = None


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[Any, WithJsonSchema({"type": "array", "items": {"type": "integer", "minimum": 0}})]
    skip_special_tokens: bool | None = None


class TemplateBody(Body):
    """POST /apply-template."""

    model: str | None = None
    messages: Messages
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


# Part of the API and without effect here on purpose: they change nothing a caller could miss in the answer.
_HARMLESS = frozenset(
    {
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
        "verbosity", "prediction", "reasoning_effort", "moderation", "parallel_tool_calls", "web_search_options",
    }
)  # fmt: skip
# Asked for by name and not done here; ignoring them would give an answer that is wrong without saying so.
_UNSUPPORTED = {
    "functions": "function calling is not served; leave it out",
    "function_call": "function calling is not served; leave it out",
    "audio": "this model takes and gives text only; leave it out",
    "truncate_prompt_tokens": "prompts are never cut; shorten the prompt instead",
    "chat_template": "a request may not bring its own template; the model's is used",
    "use_beam_search": "beam search is not served; leave it out",
}
_NO_EFFECT_VALUES: tuple[Any, ...] = (None, False, [], {}, "", "none")

B = TypeVar("B", bound=Body)


def parse_body(model: type[B], value: dict[str, Any], *, strict: bool = False) -> tuple[B, list[str]]:
    """The validated body and the names that were ignored. Raises ApiError 400 with the path of the first bad field."""
    for name, why in _UNSUPPORTED.items():
        if name in value and value[name] not in _NO_EFFECT_VALUES:
            raise unsupported(name, why)
    modalities = value.get("modalities")
    if modalities not in (None, ["text"]):
        raise unsupported("modalities", 'only ["text"] is served; leave it out')
    known = model.model_fields
    ignored = [
        name
        for name, item in value.items()
        if item is not None
        and (name not in known or name == "user")
        and name not in _UNSUPPORTED
        and name != "modalities"
    ]
    refused = [name for name in ignored if name not in _HARMLESS] if strict else []
    if refused:
        raise ApiError(
            400,
            f"{_short(refused[0])}: unknown field (this server runs with --strict-params); correct or remove it",
            code="unknown_parameter",
            param=_short(refused[0]),
        )
    try:
        return model.model_validate(value), ignored
    except ValidationError as error:
        raise _first_problem(model, error) from None


def ignored_header(names: list[str]) -> dict[str, str]:
    """`x-ignored-params` for names that were ignored; names no header can carry are counted only."""
    if not names:
        return {}
    shown = [name for name in names if _HEADER_NAME.fullmatch(name)][:_MAX_IGNORED_NAMES]
    rest = len(names) - len(shown)
    return {"x-ignored-params": ",".join([*shown, f"+{rest}"] if rest else shown)}


def refuse_later_features(body: ChatBody) -> None:
    """Refuses what a later version brings. `tools` [] and `tool_choice` "none" mean nothing."""
    if body.tools and body.tool_choice != "none":
        raise unsupported("tools", "tool calls are not served yet; leave it out or set tool_choice to none")
    if body.tool_choice not in (None, "none", "auto"):
        raise unsupported("tool_choice", "tool calls are not served yet; leave it out or set it to none")


@cache
def _numbers(model: type[Body]) -> dict[str, str]:
    """What each plain number of a body may be, in words."""
    words = {}
    for name, field in model.model_json_schema()["properties"].items():
        for arm in field.get("anyOf", [field]):
            if arm.get("type") in ("integer", "number") and {"minimum", "maximum"} <= arm.keys():
                kind = "a whole number" if arm["type"] == "integer" else "a number"
                words[name] = f"must be {kind} from {arm['minimum']} to {arm['maximum']}"
    return words


def _first_problem(model: type[Body], error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    path = ""
    for part in first["loc"]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part in ("str", "bool", "int", "float") or part.startswith(("dict[", "list[")):
            continue  # the arm of a union, which the caller knows nothing of
        else:
            path += f".{_short(part)}" if path else _short(part)
    message = _numbers(model).get(path) or first["msg"][0].lower() + first["msg"][1:]
    missing = first["type"] == "missing"
    return invalid(
        f"{path}: {'this field is required' if missing else message}",
        path,
        "missing_required_parameter" if missing else "invalid_value",
    )


def _short(name: str) -> str:
    return name if len(name) <= 64 else name[:61] + "..."
