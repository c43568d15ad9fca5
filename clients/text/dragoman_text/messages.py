"""Chat messages in the one form templates see, and control-token text in them put out of the template's reach."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
PART_JOINER = "\n"
MAX_DEPTH = 64
_PRIVATE_USE = range(0xF0000, 0xFFFFE)  # plane 15


def normalise_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as templates expect them: `developer` is `system`, text parts are joined by a newline, tool-call
    arguments are objects, absent content is "".

    Raises ValueError naming the message and what is wrong with it.
    """
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence) or not messages:
        raise ValueError("messages must be a list with at least one message")
    return [_normalise_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _normalise_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ValueError(f"{where} must be an object with role and content, not {type(message).__name__}")
    role = message.get("role")
    if role not in ROLES:
        raise ValueError(f"{where}.role is {reprlib.repr(role)}; known roles are {', '.join(ROLES)}")
    normalised = dict(message)
    normalised["role"] = "system" if role == "developer" else role
    calls = message.get("tool_calls")
    if calls:
        if not isinstance(calls, list):
            raise ValueError(f"{where}.tool_calls must be a list of calls, not {type(calls).__name__}")
        normalised["tool_calls"] = [_with_object_arguments(call) for call in calls]
    elif "tool_calls" in normalised:
        del normalised["tool_calls"]
    content = message.get("content")
    if content is None and not (role == "assistant" or calls or message.get("function_call")):
        raise ValueError(f"{where}.content is missing; a {role} message needs text")
    normalised["content"] = _content_text(content, f"{where}.content")
    return normalised


def _content_text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise ValueError(f"{where} must be a string or a list of parts, not {type(content).__name__}")
    return PART_JOINER.join(_part_text(part, f"{where}[{index}]") for index, part in enumerate(content))


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise ValueError(f"{where} must be a text part, not {type(part).__name__}")
    kind = part.get("type")
    if kind not in ("text", "input_text", "output_text"):
        raise ValueError(f"{where} has type {reprlib.repr(kind)}; this model takes text only")
    text = part.get("text")
    if not isinstance(text, str):
        raise ValueError(f"{where}.text must be a string")
    return text


def _with_object_arguments(call: Any) -> Any:
    """Arguments arrive as a JSON string; templates print them as an object. Anything else stays as it is."""
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        return call
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        try:
            parsed = json.loads(function["arguments"] or "{}")
        except (ValueError, RecursionError):
            return call
        if isinstance(parsed, dict):
            function["arguments"] = parsed
    return {**call, "function": function}


def strings_in(value: Any, depth: int = 0) -> Iterator[str]:
    """Every string in nested lists and objects, keys too. Raises ValueError below MAX_DEPTH levels."""
    if depth > MAX_DEPTH:
        raise ValueError(f"messages, tools or template arguments are nested more than {MAX_DEPTH} levels deep")
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from strings_in(key, depth + 1)
            yield from strings_in(item, depth + 1)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from strings_in(item, depth + 1)


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of nested lists and objects with `change` applied to every string, keys too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {map_strings(key, change): map_strings(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [map_strings(item, change) for item in value]
    return value


def spare_characters(used: set[str], count: int) -> list[str]:
    """`count` private-use characters that are not in `used`."""
    spare: list[str] = []
    for code in _PRIVATE_USE:
        if len(spare) == count:
            return spare
        if chr(code) not in used:
            spare.append(chr(code))
    raise ValueError("the messages use up a whole plane of private-use characters; remove them")


class ControlText:
    """Replaces the spelling of control tokens in user-given strings by single stand-in characters, and back.

    A template then cannot see them, cannot split them, and what it writes itself is told apart from them.
    """

    def __init__(self, spellings: Sequence[str], values: Sequence[Any]) -> None:
        """`values` are everything the user gave. `found` lists the spellings that occur in them."""
        strings = [text for value in values for text in strings_in(value)]
        self.num_chars = sum(map(len, strings))
        ordered = sorted(spellings, key=len, reverse=True)  # a longer token before one it contains
        self.found = [spelling for spelling in ordered if any(spelling in text for text in strings)]
        private = {character for text in strings for character in text if ord(character) >= _PRIVATE_USE.start}
        *stand_ins, self.end_mark = spare_characters(private, len(self.found) + 1)
        self._pairs = list(zip(self.found, stand_ins, strict=True))

    def hide(self, value: Any) -> Any:
        """A copy of `value` with stand-ins in all its strings; `value` itself when there is nothing to hide."""
        return map_strings(value, self._hide_text) if self._pairs else value

    def restore(self, text: str) -> str:
        """The text as the user wrote it, also where a template escaped the stand-ins as JSON."""
        for spelling, stand_in in self._pairs:
            escaped = json.dumps(stand_in)[1:-1]
            text = text.replace(stand_in, spelling).replace(escaped, spelling)
        return text

    def _hide_text(self, text: str) -> str:
        for spelling, stand_in in self._pairs:
            text = text.replace(spelling, stand_in)
        return text
