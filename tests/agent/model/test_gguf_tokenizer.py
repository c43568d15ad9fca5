"""Tokenizers from GGUF metadata: what the file says about special tokens is what the text library does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dragoman_agent.model.errors import ModelFileError
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


@pytest.fixture(scope="module")
def pieces() -> dict[str, Any]:
    """llama.cpp's answers for a vocabulary of scored pieces."""
    value: dict[str, Any] = json.loads(
        (Path(__file__).parents[2] / "golden" / "llamacpp_sentencepiece.json").read_text()
    )
    return value


def piece_tokenizer(make_model: MakeModel, pieces: dict[str, Any], **metadata: Any) -> TextTokenizer:
    keys: dict[str, Any] = {"model": "llama", "pre": None, "merges": None, "unknown_token_id": 0, "bos_token_id": 1}
    keys |= {"eos_token_id": 2, "tokens": pieces["tokens"], "token_type": pieces["token_types"]}
    return tokenizer(make_model, **keys | {"scores": pieces["scores"]} | metadata)


def test_scored_pieces_give_the_ids_of_llama_cpp(make_model: MakeModel, pieces: dict[str, Any]) -> None:
    built = piece_tokenizer(make_model, pieces)
    assert len(pieces["tokenization"]) == 202
    for entry in pieces["tokenization"]:
        plain = built.encode(entry["text"], add_special_tokens=False)
        assert plain == entry["plain"], entry["text"]
        assert built.decode(plain) == entry["text"]
        assert built.encode(entry["text"], add_special_tokens=False, parse_special=True) == entry["parsed"]


def test_scored_pieces_add_a_bos_unless_the_file_says_no(make_model: MakeModel, pieces: dict[str, Any]) -> None:
    assert piece_tokenizer(make_model, pieces).encode("a")[0] == 1
    assert piece_tokenizer(make_model, pieces, add_bos_token=False).encode("a")[0] != 1


def test_without_a_space_in_front(make_model: MakeModel, pieces: dict[str, Any]) -> None:
    built = piece_tokenizer(make_model, pieces, add_space_prefix=False, add_bos_token=False)
    assert built.decode(built.encode(" the sea")) == " the sea"
    assert built.encode(" the sea") == piece_tokenizer(make_model, pieces, add_bos_token=False).encode("the sea")


def test_scores_must_match_the_tokens(make_model: MakeModel, pieces: dict[str, Any]) -> None:
    with pytest.raises(ModelFileError, match=r"958 tokens but 1 scores"):
        piece_tokenizer(make_model, pieces, scores=[0.0])
