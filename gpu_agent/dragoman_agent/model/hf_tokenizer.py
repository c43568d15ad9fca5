"""Tokenizer and chat template of a model directory: tokenizer.json, tokenizer_config.json, chat_template.jinja."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from dragoman_agent.model.errors import ModelFileError
from dragoman_agent.model.generation import MAX_JSON_BYTES, read_json
from dragoman_agent.model.json_object import JsonObject
from dragoman_text.files import TokenizerFiles

_OTHER_KINDS: Final = ("tokenizer.model", "vocab.json", "tekken.json")


class HfTokenizer:
    """The tokenizer files of a directory, read once."""

    def __init__(self, directory: Path) -> None:
        """Raises ModelFileError when there is no tokenizer.json or a file is not what its name says."""
        self._directory = directory
        self.path = directory / "tokenizer.json"
        if not self.path.exists():
            other = next((name for name in _OTHER_KINDS if (directory / name).exists()), None)
            what = f"is missing; {other} alone is not supported" if other else "is missing"
            do = "convert the tokenizer to tokenizer.json" if other else "download incomplete? Fetch the model again"
            raise ModelFileError(self.path, what, do)
        value = read_json(self.path)
        self._json = self.path.read_bytes()
        self.token_ids = _token_ids(self.path, value)
        config_path = directory / "tokenizer_config.json"
        self._config_value = read_json(config_path) if config_path.exists() else {}
        self._config = JsonObject(config_path, self._config_value)

    def check(self, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        """Raise ModelFileError when a token or an end token has no row in the model's embedding."""
        highest = max(self.token_ids.values(), default=-1)
        if highest >= vocab_size:
            raise ModelFileError(
                self.path, f"has token id {highest}, the model has {vocab_size} tokens", "use files of one model"
            )
        outside = [token_id for token_id in eos_token_ids if token_id >= vocab_size]
        if outside:
            raise ModelFileError(
                self._directory,
                f"end token id {outside[0]} is outside the model's {vocab_size} tokens",
                "use files of one model",
            )

    def files(self, eos_token_ids: tuple[int, ...], vocab_size: int) -> TokenizerFiles:
        """Everything in one value; `vocab_size` is the model's, often padded beyond the tokenizer's. Raises ModelFileError for a special token that is not in the vocabulary."""
        bos, eos = self._special("bos_token"), self._special("eos_token")
        texts = {token_id: text for text, token_id in self.token_ids.items()}
        if eos is None and eos_token_ids:
            eos = texts.get(eos_token_ids[0])
        return TokenizerFiles(
            tokenizer_json=self._json,
            chat_template=self._chat_template(),
            bos_token=bos,
            eos_token=eos,
            bos_token_id=None if bos is None else self.token_ids[bos],
            eos_token_ids=eos_token_ids,
            add_bos_token=bool(self._config.flag("add_bos_token")) and bos is not None,
            vocab_size=vocab_size,
        )

    def _special(self, key: str) -> str | None:
        value = self._config_value.get(key)
        text = value.get("content") if isinstance(value, dict) else value
        if text is None:
            return None
        if not isinstance(text, str) or text not in self.token_ids:
            raise self._config.refuse(key, "it is not in the vocabulary", "use files of one model")
        return text

    def _chat_template(self) -> str | None:
        """chat_template.jinja, else tokenizer_config.json's; of several named ones `default`."""
        path = self._directory / "chat_template.jinja"
        if path.exists():
            try:
                if path.stat().st_size > MAX_JSON_BYTES:
                    raise ModelFileError(path, "too large for a chat template")
                return path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ModelFileError(path, f"cannot be read ({error})", "fetch the file again") from None
        value = self._config_value.get("chat_template")
        if value is None or isinstance(value, str):
            return value
        return self._named_template(value)

    def _named_template(self, value: Any) -> str:
        entries = value if isinstance(value, list) else []
        named = {
            entry["name"]: entry["template"]
            for entry in entries
            if isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)
        }
        if not named or len(named) != len(entries):
            raise self._config.wrong("chat_template", "a template or a list of named templates")
        if "default" not in named and len(named) > 1:
            raise self._config.refuse(
                "chat_template", f"none of {', '.join(sorted(named))} is called 'default'", "name one so"
            )
        template: str = named["default"] if "default" in named else next(iter(named.values()))
        return template


def _token_ids(path: Path, value: Mapping[str, Any]) -> dict[str, int]:
    """Text to id of all tokens of a tokenizer.json, added ones included."""
    model = value.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, list):
        raise ModelFileError(path, "a unigram tokenizer, which is not supported (BPE is)", "use another model")
    added = value.get("added_tokens") or []
    if not isinstance(vocabulary, dict) or not isinstance(added, list):
        raise ModelFileError(path, "has no vocabulary under 'model.vocab'", "download incomplete? Fetch it again")
    try:
        ids = vocabulary | {token["content"]: token["id"] for token in added}
    except (TypeError, KeyError):
        raise ModelFileError(path, "an entry of 'added_tokens' lacks 'content' or 'id'") from None
    wrong = next((text for text, token_id in ids.items() if type(token_id) is not int or token_id < 0), None)
    if wrong is not None:
        raise ModelFileError(path, f"token {wrong!r} has id {ids[wrong]!r}, a number from 0 was expected")
    return ids
