"""Request bodies to prompts of token ids: templates, tokenizing, range checks, and the context rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from dragoman.prefix_hash import prefix_hashes, prompt_digest_of_ids, wire_hash
from dragoman_gateway.errors import ApiError, invalid, unsupported
from dragoman_gateway.models import ModelText
from dragoman_gateway.sampling import check_ids
from dragoman_gateway.schema import CompletionBody
from dragoman_text import TemplateError, TextTooLong

# A tuple: what a caller gives as a part's type may be anything, also what has no hash.
_OTHER_PARTS = ("image_url", "input_image", "image", "input_audio", "audio", "file", "video_url")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, ready to be admitted. `text` is what `echo` repeats, None where nobody asked for it."""

    token_ids: list[int]
    block_hashes: list[int]
    digest: bytes
    text: str | None = None


class TemplateFields(Protocol):
    """The fields of a body that lay out a chat."""

    messages: Any
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template_kwargs: dict[str, Any] | None


def chat_prompt(body: TemplateFields, model: ModelText, cache_salt: str, max_tokens: int | None = None) -> Prompt:
    """The prompt of a chat; `max_tokens` are asked for. Runs the model's template: call it in a thread. Raises ApiError 400."""
    try:
        ids = template_ids(body, model, model.max_context_tokens - 1)
    except TextTooLong as error:
        raise _no_room(f"at least {error.num_tokens}", model, "messages", max_tokens) from None
    check_context(ids, model, "messages", max_tokens)
    return _prompt(ids, model, cache_salt)


def template_ids(body: TemplateFields, model: ModelText, max_num_tokens: int | None = None) -> list[int]:
    """Token ids of the laid-out chat. Raises ApiError 400 with the path of the bad message or the template's words.

    What cannot fit `max_num_tokens` is not tokenized whole and raises TextTooLong.
    """
    check_messages(body.messages)
    try:
        return model.template.encode(
            model.tokenizer, body.messages, **template_options(body), max_num_tokens=max_num_tokens
        )
    except TextTooLong:
        raise
    except ValueError as error:
        raise template_error(error) from None


def template_text(body: TemplateFields, model: ModelText) -> str:
    """Text of the laid-out chat. Raises as `template_ids` does."""
    check_messages(body.messages)
    try:
        return model.template.render(body.messages, **template_options(body))
    except ValueError as error:
        raise template_error(error) from None


def template_options(body: TemplateFields) -> dict[str, Any]:
    """The keyword arguments of a rendering."""
    options: dict[str, Any] = {"continue_final_message": bool(body.continue_final_message)}
    if body.add_generation_prompt is not None:
        options["add_generation_prompt"] = body.add_generation_prompt
    if body.chat_template_kwargs is not None:
        options["template_kwargs"] = body.chat_template_kwargs
    return options


def template_error(error: ValueError) -> ApiError:
    """The 400 of a chat that cannot be laid out."""
    message = str(error)
    if isinstance(error, TemplateError):
        return invalid(message, "messages", "template_error")
    named = message.split(" ", 1)[0]
    param = named if named.startswith("messages[") or named == "chat_template_kwargs" else "messages"
    return invalid(message, param)


def check_messages(messages: Any) -> None:
    """Raises ApiError 400 for messages that are none, before a template sees them; nothing is fetched for a part."""
    if not isinstance(messages, list):
        raise invalid("messages must be a list of objects with role and content", "messages")
    if not messages:
        raise invalid("messages is empty; send at least one", "messages")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise invalid(f"messages[{index}] must be an object with role and content", f"messages[{index}]")
        if "role" not in message:
            raise invalid(f"messages[{index}].role is missing", f"messages[{index}].role", "missing_required_parameter")
        content = message.get("content")
        for position, part in enumerate(content if isinstance(content, list) else ()):
            if isinstance(part, Mapping) and part.get("type") in _OTHER_PARTS:
                path = f"messages[{index}].content[{position}]"
                raise unsupported(path, f"type {part['type']} is not served; this model takes text only")


def completion_prompts(body: CompletionBody, model: ModelText, cache_salt: str, max_prompts: int) -> list[Prompt]:
    """The prompts of a completions request, all checked before any runs. Call it in a thread. Raises ApiError 400."""
    inputs = inputs_of(body.prompt, max_prompts, "prompt")
    prompts = []
    for index, item in enumerate(inputs):
        path = "prompt" if isinstance(body.prompt, str) or item is body.prompt else f"prompt[{index}]"
        if isinstance(item, str):
            ids = _encode(item, body, model, path)
            text: str | None = item
        else:
            if not item:
                raise invalid(f"{path} is empty; give at least one token id", path)
            check_ids(item, path, model.vocabulary_size)
            ids, text = item, None
        check_context(ids, model, path, body.max_tokens)
        if text is None and body.echo:
            text = model.tokenizer.decode(ids, skip_special_tokens=False)
        prompts.append(_prompt(ids, model, cache_salt, text if body.echo else None))
    return prompts


def inputs_of(prompt: Any, most: int, field: str) -> list[Any]:
    """The single prompts of `field`: each a text or a list of ids, at most `most`. Raises ApiError 400."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        raise invalid(f"{field} must be a string, a list of strings, token ids, or a list of lists of token ids", field)
    if not prompt:
        raise invalid(f"{field} is empty; give a text or at least one token id", field)
    kinds = {str if isinstance(item, str) else list if isinstance(item, list) else int for item in prompt}
    if kinds == {int}:
        return [prompt]
    if len(kinds) > 1:
        first = type(prompt[0])
        odd = next(index for index, item in enumerate(prompt) if type(item) is not first)
        raise invalid(f"{field}[{odd}] is not of the kind of {field}[0]; do not mix texts and ids", f"{field}[{odd}]")
    if len(prompt) > most:
        raise invalid(f"{field} has {len(prompt)} entries, at most {most} are allowed; send fewer", field)
    return prompt


def _encode(text: str, body: CompletionBody, model: ModelText, path: str) -> list[int]:
    try:
        model.tokenizer.check_size(text, model.max_context_tokens - 1)
        model.tokenizer.check_beginning(text, model.max_context_tokens - 1)
        ids = model.tokenizer.encode(
            text,
            add_special_tokens=body.add_special_tokens is not False,
            parse_special=body.parse_special_tokens is not False,
        )
    except TextTooLong as error:
        raise _no_room(f"at least {error.num_tokens}", model, path, body.max_tokens) from None
    except ValueError as error:
        raise invalid(f"{path}: {error}", path) from None
    if not ids:
        raise invalid(f"{path} is empty and this model has no token to begin with; give some text", path)
    return ids


def check_context(ids: list[int], model: ModelText, path: str, max_tokens: int | None) -> None:
    """Raises ApiError 400 when the prompt leaves no room for one token. Prompts are never cut; `max_tokens` are."""
    if len(ids) + 1 > model.max_context_tokens:
        raise _no_room(str(len(ids)), model, path, max_tokens)


def _no_room(count: str, model: ModelText, path: str, max_tokens: int | None) -> ApiError:
    asked = "" if max_tokens is None else f" ({max_tokens} were asked for)"
    return ApiError(
        400,
        f"the prompt has {count} tokens and the context of {model.name} is {model.max_context_tokens}, "
        f"which must hold the prompt and at least 1 new token{asked}; shorten the prompt",
        code="context_length_exceeded",
        param=path,
    )


def _prompt(ids: list[int], model: ModelText, cache_salt: str, text: str | None = None) -> Prompt:
    hashes = [wire_hash(full) for full in prefix_hashes(model.root(cache_salt), ids)]
    return Prompt(ids, hashes, prompt_digest_of_ids(ids), text)
