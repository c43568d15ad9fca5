"""Chained hashes of a prompt's full units of 64 tokens: how clients, controller and agents name a prefix.

h0 = SHA-256(model digest, adapter, cache salt); h_i = SHA-256(h_(i-1), 64 ids as little-endian uint32).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

UNIT_TOKENS = 64
_TRANSFER_LABEL = b"dragoman kv transfer v1"
_UNIT = struct.Struct(f"<{UNIT_TOKENS}I")


def root_hash(model_digest: bytes, adapter: str = "", cache_salt: str = "") -> bytes:
    """h0, 32 bytes. Each part is preceded by its length, so that no two triples collide by concatenation."""
    digest = hashlib.sha256()
    for part in (model_digest, adapter.encode(), cache_salt.encode()):
        digest.update(struct.pack("<I", len(part)))
        digest.update(part)
    return digest.digest()


def next_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The hash, 32 bytes, of `token_ids` after `parent`."""
    if len(token_ids) == UNIT_TOKENS:
        return hashlib.sha256(parent + _UNIT.pack(*token_ids)).digest()
    return hashlib.sha256(parent + struct.pack(f"<{len(token_ids)}I", *token_ids)).digest()


def prefix_hashes(root: bytes, token_ids: Sequence[int]) -> list[bytes]:
    """The hashes of all full units, first unit first, 32 bytes each."""
    hashes = []
    parent = root
    for start in range(0, len(token_ids) - UNIT_TOKENS + 1, UNIT_TOKENS):
        parent = next_hash(parent, token_ids[start : start + UNIT_TOKENS])
        hashes.append(parent)
    return hashes


def wire_hash(full: bytes) -> int:
    """The form on the wire: the first 8 bytes read as little-endian (fixed64)."""
    return int.from_bytes(full[:8], "little")


def prompt_digest_of_text(text: str) -> bytes:
    """SHA-256 of the prompt sent as text."""
    return hashlib.sha256(text.encode()).digest()


def prompt_digest_of_ids(token_ids: Sequence[int]) -> bytes:
    """SHA-256 of the prompt sent as ids: little-endian uint32."""
    return hashlib.sha256(struct.pack(f"<{len(token_ids)}I", *token_ids)).digest()


def transfer_digest(unit_hashes: Sequence[int]) -> bytes:
    """What a ticket binds of a transfer of KV blocks: SHA-256 of a label and the wire hashes of the units.

    The label keeps it apart from every prompt's digest.
    """
    return hashlib.sha256(_TRANSFER_LABEL + struct.pack(f"<{len(unit_hashes)}Q", *unit_hashes)).digest()


def prompt_digest_of_inputs(digests: Sequence[bytes]) -> bytes:
    """What a ticket binds of an embedding request: the digest of its one input, or SHA-256 over those of several."""
    return digests[0] if len(digests) == 1 else hashlib.sha256(b"".join(digests)).digest()
