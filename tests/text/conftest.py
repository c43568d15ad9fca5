"""Tokenizers for the tests of text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dragoman_agent.model.gguf_source import GgufSource
from dragoman_text import TextTokenizer, TokenizerFiles, byte_tokenizer_files


@pytest.fixture(scope="session")
def byte_files() -> TokenizerFiles:
    """The byte tokenizer's files."""
    return byte_tokenizer_files()


@pytest.fixture(scope="session")
def byte_tokenizer(byte_files: TokenizerFiles) -> TextTokenizer:
    """256 bytes and three control tokens."""
    return TextTokenizer.from_files(byte_files)


@pytest.fixture(scope="session")
def smol_files(embedded_model_path: Path) -> TokenizerFiles:
    """The embedded model's tokenizer files."""
    return GgufSource(embedded_model_path).tokenizer


@pytest.fixture(scope="session")
def smol_tokenizer(smol_files: TokenizerFiles) -> TextTokenizer:
    """The embedded model's tokenizer."""
    return TextTokenizer.from_files(smol_files)


@pytest.fixture(scope="session")
def sentencepiece_files() -> TokenizerFiles:
    """A small tokenizer of the other style: `▁` for a space, `<0xNN>` for bytes without a piece."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdehlowr", "▁a", "lo", "▁hello"]
    value = {
        "added_tokens": [
            {
                "id": token_id,
                "content": pieces[token_id],
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for token_id in (0, 1, 2)
        ],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ],
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": {piece: token_id for token_id, piece in enumerate(pieces)},
            "merges": [["▁", "a"], ["l", "o"]],
        },
    }
    return TokenizerFiles(
        json.dumps(value).encode(), None, "<s>", "</s>", bos_token_id=1, eos_token_ids=(2,), add_bos_token=True
    )
