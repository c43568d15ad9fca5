"""What a model's own files say about generating: sampling defaults and every token that ends a text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dragoman_agent.model.errors import ModelFileError

MAX_JSON_BYTES = 64 << 20
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Defaults a request falls back to; None where the model says nothing, and the OpenAI default holds."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    eos_token_ids: tuple[int, ...] = ()  # the union of all files that name an end token, ascending
    origin: str | None = field(default=None, compare=False)  # who names the sampling values, for people

    def in_words(self) -> str:
        """The sampling values and where they come from, such as "temperature 0.2, top_p 0.9 (from X)"."""
        named = [f"{name} {value:g}" for name in _SAMPLING if (value := getattr(self, name)) is not None]
        if not named:
            return "OpenAI's (the model names none)"
        return ", ".join(named) + (f" (from {self.origin})" if self.origin else "")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ModelFileError when it is not one."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ModelFileError(path, f"larger than {MAX_JSON_BYTES >> 20} MiB, which no such file is")
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelFileError(path, f"cannot be read ({error.strerror or error})", "check the path") from None
    except (ValueError, RecursionError) as error:
        raise ModelFileError(path, f"not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise ModelFileError(path, f"a JSON object was expected, found {type(value).__name__}")
    return value


def read_beside(directory: Path, base: GenerationDefaults, token_ids: Mapping[str, int]) -> GenerationDefaults:
    """`base` joined with generation_config.json, config.json and tokenizer_config.json of a model directory.

    Sampling values of generation_config.json win; end tokens of all files are joined, an end token given as text is
    looked up in `token_ids`. Files that are absent say nothing. Raises ModelFileError for a value of the wrong type.
    """
    eos = set(base.eos_token_ids)
    sampling: dict[str, float | None] = {name: getattr(base, name) for name in _SAMPLING}
    origin = base.origin
    for name in ("generation_config.json", "config.json", "tokenizer_config.json"):
        path = directory / name
        if not path.exists():
            continue
        value = read_json(path)
        eos |= _end_tokens(path, value, token_ids)
        if name == "generation_config.json":
            named = {key: _number(path, key, value[key]) for key in sampling if value.get(key) is not None}
            sampling |= named
            origin = f"{base.origin} and {name}" if named and base.origin else name if named else base.origin
    top_k = sampling["top_k"]
    return GenerationDefaults(
        temperature=sampling["temperature"],
        top_p=sampling["top_p"],
        top_k=None if top_k is None else int(top_k),
        min_p=sampling["min_p"],
        repetition_penalty=sampling["repetition_penalty"],
        eos_token_ids=tuple(sorted(eos)),
        origin=origin,
    )


def _number(path: Path, key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value or value < 0:
        raise ModelFileError(path, f"{key} is {value!r}, a number from 0 was expected", "correct the file")
    return value


def _end_tokens(path: Path, value: Mapping[str, Any], token_ids: Mapping[str, int]) -> set[int]:
    named = value.get("eos_token_id")
    ids = named if isinstance(named, list) else [] if named is None else [named]
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise ModelFileError(path, f"eos_token_id holds {token_id!r}, a token id was expected", "correct the file")
    text = value.get("eos_token")
    text = text.get("content") if isinstance(text, dict) else text
    if text is None:
        return set(ids)
    if text not in token_ids:
        raise ModelFileError(path, f"eos_token {text!r} is not in the vocabulary", "use files of one model")
    return {*ids, token_ids[text]}
