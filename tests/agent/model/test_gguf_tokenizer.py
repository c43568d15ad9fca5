"""Tokenizers from GGUF metadata: what the file says about special tokens is what the text library does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dragoman_agent.model.gguf import GgufFile
from dragoman_agent.model.gguf_tokenizer import PRE_TOKENIZERS, tokenizer_files_from_gguf
from dragoman_text import TextTokenizer

MakeModel = Callable[..., Path]


def tokenizer(make_model: MakeModel, **metadata: Any) -> TextTokenizer:
    keys = {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    return TextTokenizer.from_files(tokenizer_files_from_gguf(GgufFile(make_model(metadata=keys))))


def test_control_tokens_are_special_and_user_defined_ones_are_text(make_model: MakeModel) -> None:
    built = tokenizer(make_model)
    assert built.special_ids == {256, 257, 258}
    assert built.encode("<tool><|im_end|>", parse_special=False)[:1] == [259]
    assert built.encode("<tool><|im_end|>", parse_special=True) == [259, 258]
    assert built.decode([259, 258]) == "<tool>"


def test_merges_are_used(make_model: MakeModel) -> None:
    assert tokenizer(make_model).encode("hell") == [260, 261]


@pytest.mark.parametrize(
    ("metadata", "ids"),
    [
        ({}, [64]),
        ({"add_bos_token": True}, [257, 64]),
        ({"add_bos_token": False, "pre": "llama-bpe"}, [64]),
        ({"pre": "llama-bpe"}, [257, 64]),
        ({"add_bos_token": True, "bos_token_id": None}, [64]),
        ({"add_eos_token": True}, [64, 258]),
        ({"add_bos_token": True, "add_eos_token": True}, [257, 64, 258]),
    ],
)
def test_what_is_added_around_a_text(make_model: MakeModel, metadata: dict[str, Any], ids: list[int]) -> None:
    built = tokenizer(make_model, **metadata)
    text = "".join(built.decode([64]))
    assert built.encode(text, add_special_tokens=True) == ids
    assert built.encode(text, add_special_tokens=False) == [64]


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_every_pre_tokenizer_builds(make_model: MakeModel, name: str) -> None:
    built = tokenizer(make_model, pre=name)
    text = "It's 12345 naïve  tests,\n\n\tof\r\n½ 漢字 🙂!!!"
    assert built.decode(built.encode(text, add_special_tokens=False)) == text
