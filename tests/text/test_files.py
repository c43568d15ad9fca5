"""Tokenizer files survive their journey and say when they did not."""

from __future__ import annotations

import dataclasses
import json

import pytest

from dragoman_text import TokenizerFiles, TokenizerFilesError, byte_tokenizer_files

FULL = TokenizerFiles(b'{"a": "\xc3\xa9"}', "{{ messages }}", "<s>", "</s>", 1, (2, 7), True, 9)


@pytest.mark.parametrize("files", [FULL, byte_tokenizer_files(), TokenizerFiles(b"{}")])
@pytest.mark.parametrize("chunk_bytes", [1, 100, 1 << 20])
def test_chunks_joined_are_the_same_files(files: TokenizerFiles, chunk_bytes: int) -> None:
    chunks = list(files.to_chunks(chunk_bytes))
    assert all(0 < len(chunk) <= chunk_bytes for chunk in chunks)
    again = TokenizerFiles.from_chunks(chunks)
    assert again == files
    assert again.digest == files.digest


def test_every_field_changes_the_digest() -> None:
    changes = {
        "tokenizer_json": b"{}",
        "chat_template": None,
        "bos_token": "<b>",
        "eos_token": "<e>",
        "bos_token_id": 3,
        "eos_token_ids": (2,),
        "add_bos_token": False,
        "vocab_size": 10,
    }
    assert changes.keys() == {field.name for field in dataclasses.fields(FULL)}
    digests = {dataclasses.replace(FULL, **{name: value}).digest for name, value in changes.items()}
    assert len(digests) == len(changes)
    assert FULL.digest not in digests


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"eos_token_ids": [2]}, "does not match its digest"),
        ({"digest": "00"}, "does not match its digest"),
        ({"tokenizer_json": None}, "'tokenizer_json' is missing"),
        ({"eos_token_ids": [True]}, "integers only"),
        ({"bos_token_id": True}, "'bos_token_id' is bool"),
        ({"vocab_size": 1 << 40}, "'vocab_size' is 1099511627776, 1 to 16777216 are possible"),
        ({"chat_template": 5}, "'chat_template' is int"),
        ({"colour": "red"}, "unknown field 'colour'"),
    ],
)
def test_altered_files_are_refused(change: dict[str, object], message: str) -> None:
    value = json.loads(FULL.to_json()) | change
    with pytest.raises(TokenizerFilesError, match=message):
        TokenizerFiles.from_json(json.dumps(value).encode())


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"\xff", b"[" * 100_000])
def test_what_is_not_a_json_object_is_refused(data: bytes) -> None:
    with pytest.raises(TokenizerFilesError):
        TokenizerFiles.from_json(data)


def test_a_cut_stream_is_refused() -> None:
    chunks = list(FULL.to_chunks(50))
    with pytest.raises(TokenizerFilesError):
        TokenizerFiles.from_chunks(chunks[:-1])
