"""What is generated for the other languages is what the catalogue says, and the vectors are what the formulas say."""

from __future__ import annotations

import hashlib
import json
import struct

from clients.conformance.gen_errors import CLIENTS, outputs
from clients.conformance.language import load_languages

from dragoman.prefix_hash import (
    prefix_hashes,
    prompt_digest_of_ids,
    prompt_digest_of_inputs,
    prompt_digest_of_text,
    root_hash,
    wire_hash,
)

VECTORS = json.loads((CLIENTS / "conformance/hashes.json").read_text())


def test_generated_tables_are_fresh() -> None:
    for path, text in outputs().items():
        assert path.read_text() == text, (
            f"{path.relative_to(CLIENTS)} is stale: run python -m clients.conformance.gen_errors"
        )


def test_prompt_digests() -> None:
    for vector in VECTORS["prompt_digests"]:
        if "text" in vector:
            assert prompt_digest_of_text(vector["text"]).hex() == vector["digest"]
        elif "token_ids" in vector:
            assert prompt_digest_of_ids(vector["token_ids"]).hex() == vector["digest"]
        else:
            digests = [bytes.fromhex(digest) for digest in vector["digests"]]
            assert prompt_digest_of_inputs(digests).hex() == vector["digest"]


def test_prefix_hashes_by_the_formula_written_out() -> None:
    """h0 = SHA-256 over (length, bytes) of three parts; h_i = SHA-256(h_(i-1), 64 ids as little-endian uint32)."""
    for vector in VECTORS["prefix_hashes"]:
        digest, ids = bytes.fromhex(vector["model_digest"]), _ids(vector)
        parts = (digest, vector["adapter"].encode(), vector["cache_salt"].encode())
        parent = hashlib.sha256(b"".join(struct.pack("<I", len(part)) + part for part in parts)).digest()
        assert parent.hex() == vector["root"]
        wire = []
        for start in range(0, len(ids) // 64 * 64, 64):
            parent = hashlib.sha256(parent + struct.pack("<64I", *ids[start : start + 64])).digest()
            wire.append(int.from_bytes(parent[:8], "little"))
        assert [str(number) for number in wire] == vector["wire"]
        ours = prefix_hashes(root_hash(digest, vector["adapter"], vector["cache_salt"]), ids)
        assert [wire_hash(full) for full in ours] == wire


def _ids(vector: dict[str, object]) -> list[int]:
    first, step, count = vector["first"], vector["step"], vector["count"]
    assert isinstance(first, int) and isinstance(step, int) and isinstance(count, int)
    return [(first + step * index) % 2**32 for index in range(count)]


def test_the_folder_of_each_language_exists() -> None:
    languages = load_languages()
    assert "python" in languages
    for language in languages.values():
        assert language.folder.is_dir(), language.name
