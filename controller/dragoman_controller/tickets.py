"""Mints tickets: claims signed with HMAC-SHA256 under HKDF-SHA256(cell key, agent id, epoch).

An agent gets only its own derived key, so a stolen agent can mint only for itself.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import re
import secrets
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from google.protobuf.message import DecodeError

from dragoman.errors import DragomanError
from dragoman.limits import TICKET_JTI_BYTES, TICKET_KEY_BYTES, TICKET_MODEL_DIGEST_BYTES, TICKET_VERSION
from dragoman.v1 import error_pb2, ticket_pb2
from dragoman_controller.tuples import new
from dragoman_controller.wire import length_delimited, varint, varint_field

# Holds for agent ids up to 28 bytes; a longer id makes the ticket longer by as much.
MAX_TICKET_BYTES = 199
_USUAL_AGENT_ID_BYTES = 28
USABLE_SECONDS = 10.0
_INFO_PREFIX = b"dragoman ticket v1"
_MAX_RANDOM_KEY_ID = 1 << 14
_BLOCK_BYTES = 64
# Asking the system for random bytes takes as long for many ids as for one.
_NUM_IDS_DRAWN = 256
_JTI_FIELD = length_delimited(ticket_pb2.TicketClaims, "jti") + bytes([TICKET_JTI_BYTES])
_NOT_AFTER_FIELD = varint_field(ticket_pb2.TicketClaims, "not_after_ms")
_CLAIMS_FIELD = length_delimited(ticket_pb2.SignedTicket, "claims")
_MAC_FIELD = length_delimited(ticket_pb2.SignedTicket, "mac") + bytes([SHA256.digest_size])
_KEY_LINE = re.compile(r"(?P<key_id>\d+)\s+(?P<key>[0-9a-fA-F]{64})")


@dataclass(frozen=True, slots=True)
class CellKey:
    """A secret of the whole cell, never sent; `key_id` names it in tickets."""

    key_id: int
    secret: bytes = field(repr=False)

    @classmethod
    def random(cls) -> CellKey:
        """A key for one life of this controller. The random id keeps it apart from other controllers' keys."""
        return cls(1 + secrets.randbelow(_MAX_RANDOM_KEY_ID - 1), secrets.token_bytes(TICKET_KEY_BYTES))


def derive_key(cell_key: bytes, agent_id: str, epoch: int) -> bytes:
    """The key of one life of one agent, 32 bytes. HKDF: RFC 5869; salt empty, info = label, epoch, agent id."""
    info = _INFO_PREFIX + struct.pack("<Q", epoch) + agent_id.encode()
    return HKDF(algorithm=SHA256(), length=TICKET_KEY_BYTES, salt=None, info=info).derive(cell_key)


def read_cell_keys(path: Path) -> tuple[CellKey, ...]:
    """Keys of a file, the newest first: a line each, "KEY_ID 64_HEX_DIGITS". Raises ValueError naming the line."""
    return parse_cell_keys(path.read_text(encoding="utf-8"), str(path))


def parse_cell_keys(text: str, where: str) -> tuple[CellKey, ...]:
    """Keys of a text of such lines; `where` names it in errors. Raises ValueError naming the line, never its content."""
    keys: list[CellKey] = []
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        match = _KEY_LINE.fullmatch(line)
        key_id = int(match["key_id"]) if match else 0
        if match is None or not 0 < key_id < 1 << 32:
            raise ValueError(f"{where}:{number}: expected a key id over 0 and 64 hexadecimal digits, such as '1 9f86…'")
        if any(key.key_id == key_id for key in keys):
            raise ValueError(f"{where}:{number}: key id {key_id} is there twice, give each key its own")
        keys.append(CellKey(key_id, bytes.fromhex(match["key"])))
    if not keys:
        raise ValueError(f"{where} holds no key: write a line 'KEY_ID 64_HEX_DIGITS', the newest key first")
    return tuple(keys)


def write_cell_keys(keys: tuple[CellKey, ...]) -> str:
    """The text that `parse_cell_keys` reads."""
    return "".join(f"{key.key_id} {key.secret.hex()}\n" for key in keys)


class Bearer(NamedTuple):
    """Whom a ticket is for: one life of an agent, and the model it serves."""

    agent_id: str
    epoch: int
    model_digest: bytes


class Claims(NamedTuple):
    """What a ticket says of its request, but for the tenant; the same for the fallback where both agents have room."""

    prompt_digest: bytes
    max_prompt_tokens: int
    max_output_tokens: int
    max_choices: int
    """1 or more. Without a default: an agent does not check a ticket that leaves it out."""
    priority: int
    deadline_budget_ms: int = 0
    resume: tuple[int, int, int] | None = None
    """Origin epoch, attempt, from cursor."""


class Signer:
    """What every ticket for one life of an agent has in common: HMAC-SHA256 (RFC 2104) keyed once, and serialized claims."""

    __slots__ = ("_inner", "_outer", "claims", "max_ticket_bytes")

    def __init__(self, key: bytes, claims: bytes, max_ticket_bytes: int) -> None:
        """`key` is at most one block of SHA-256."""
        block = key.ljust(_BLOCK_BYTES, b"\0")
        self._inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in block))
        self._outer = hashlib.sha256(bytes(byte ^ 0x5C for byte in block))
        self.claims = claims
        self.max_ticket_bytes = max_ticket_bytes

    def mac(self, body: bytes) -> bytes:
        """As hmac.digest, which hashes the key anew each time and takes three times as long."""
        inner, outer = self._inner.copy(), self._outer.copy()
        inner.update(body)
        outer.update(inner.digest())
        return outer.digest()


class RequestPart:
    """What the tickets of one request have in common; serialized when the first of them is asked for, once."""

    __slots__ = ("_claims_of", "_request", "_serialized")

    def __init__(self, claims_of: Callable[..., Claims], *request: object) -> None:
        """`claims_of(*request)` are the claims; asked once, when they are needed."""
        self._claims_of, self._request = claims_of, request
        self._serialized = b""

    def serialized(self) -> bytes:
        """As fields of TicketClaims."""
        if not self._serialized:
            # A new message each time: one that is filled in again takes more memory for each field and gives none of it back.
            claims, part = self._claims_of(*self._request), ticket_pb2.TicketClaims()
            part.prompt_digest = claims.prompt_digest
            part.max_prompt_tokens, part.max_output_tokens = claims.max_prompt_tokens, claims.max_output_tokens
            part.max_choices = claims.max_choices
            part.priority = claims.priority  # type: ignore[assignment]
            part.deadline_budget_ms = claims.deadline_budget_ms
            if claims.resume is not None:
                resume = part.resume
                resume.origin_epoch, resume.attempt, resume.from_cursor = claims.resume
            self._serialized = part.SerializeToString()
        return self._serialized


class Minted(NamedTuple):
    """A ticket, and the id its outcome will be reported under. Written and signed when its bytes are asked for."""

    jti: bytes
    signer: Signer
    request_part: RequestPart
    tenant: str
    not_after_ms: int

    @property
    def token(self) -> bytes:
        """The bytes that the client gets, the same each time. A batch is signed and written when all of it is decided.

        The claims are put together from serialized parts: protobuf reads messages one after the other as one message
        with the fields of all.
        """
        signer = self.signer
        parts = signer.claims, self.request_part.serialized(), _JTI_FIELD, self.jti, _NOT_AFTER_FIELD
        claims = b"".join((*parts, varint(self.not_after_ms)))
        if self.tenant:
            tenant = _fit_tenant(self.tenant, signer.max_ticket_bytes - _signed_size(len(claims)) - 2)
            claims += ticket_pb2.TicketClaims(tenant=tenant).SerializeToString()
        token = b"".join((_CLAIMS_FIELD, varint(len(claims)), claims, _MAC_FIELD, signer.mac(claims)))
        if len(token) > signer.max_ticket_bytes:
            raise AssertionError(f"a ticket of {len(token)} bytes")
        return token


class TicketMinter:
    """Owns the cell keys. Signs with the newest key that the agent has confirmed, so that a rotation drops nothing."""

    def __init__(self, keys: tuple[CellKey, ...]) -> None:
        if not keys:
            raise ValueError("a minter needs at least one cell key")
        self._keys = keys
        self._signers: dict[Bearer, tuple[tuple[int, ...] | None, Signer]] = {}
        self._ids: list[bytes] = []

    @property
    def keys(self) -> tuple[CellKey, ...]:
        """The keys, the newest first. Secret."""
        return self._keys

    @property
    def key_ids(self) -> tuple[int, ...]:
        """Ids of the keys, the newest first."""
        return tuple(key.key_id for key in self._keys)

    def rotate(self, keys: tuple[CellKey, ...]) -> None:
        """Takes new keys, the newest first. Keys that are gone no longer verify anything here."""
        if not keys:
            raise ValueError("a rotation needs at least one cell key")
        self._keys = keys
        self._signers.clear()

    def agent_keys(self, agent_id: str, epoch: int) -> tuple[tuple[int, bytes], ...]:
        """Key id and derived key of each cell key for one life of an agent, the newest first."""
        return tuple((key.key_id, derive_key(key.secret, agent_id, epoch)) for key in self._keys)

    def forget(self, agent_id: str, epoch: int) -> None:
        """Drops the derived keys of a life that is over."""
        for bearer in [one for one in self._signers if one.agent_id == agent_id and one.epoch == epoch]:
            del self._signers[bearer]

    def mint(
        self,
        bearer: Bearer,
        request_part: RequestPart,
        tenant: str,
        not_after_ms: int,
        confirmed_key_ids: tuple[int, ...] | None = None,
    ) -> Minted:
        """A ticket of under 200 bytes, see MAX_TICKET_BYTES. `not_after_ms` is in the agent's monotonic clock.

        `confirmed_key_ids`: keys the agent holds; None means all.
        """
        known = self._signers.get(bearer)
        signer = known[1] if known is not None and known[0] == confirmed_key_ids else None
        if signer is None:
            signer = self._make_signer(bearer, confirmed_key_ids)
        if not self._ids:
            self._ids = _draw_ids()
        return new(Minted, (self._ids.pop(), signer, request_part, tenant, not_after_ms))

    def open(self, token: bytes) -> ticket_pb2.TicketClaims:
        """The claims of one of our own tickets. Raises TICKET_INVALID when it is not one."""
        signed, claims = ticket_pb2.SignedTicket(), ticket_pb2.TicketClaims()
        try:
            signed.ParseFromString(token)
            claims.ParseFromString(signed.claims)
        except DecodeError:
            raise _invalid_ticket("it cannot be read") from None
        key = next((key for key in self._keys if key.key_id == claims.key_id), None)
        if key is None:
            raise _invalid_ticket(f"its key id {claims.key_id} is unknown here")
        secret = derive_key(key.secret, claims.agent_id, claims.epoch)
        if not hmac.compare_digest(hmac.digest(secret, signed.claims, "sha256"), signed.mac):
            raise _invalid_ticket("its signature does not fit")
        return claims

    def _make_signer(self, bearer: Bearer, confirmed: tuple[int, ...] | None) -> Signer:
        key = self._keys[0]
        if confirmed is not None:
            key = next((one for one in self._keys if one.key_id in confirmed), key)
        part = ticket_pb2.TicketClaims(
            version=TICKET_VERSION,
            key_id=key.key_id,
            agent_id=bearer.agent_id,
            epoch=bearer.epoch,
            model_digest=bearer.model_digest[:TICKET_MODEL_DIGEST_BYTES],
        )
        limit = MAX_TICKET_BYTES + max(0, len(bearer.agent_id.encode()) - _USUAL_AGENT_ID_BYTES)
        secret = derive_key(key.secret, bearer.agent_id, bearer.epoch)
        signer = Signer(secret, part.SerializeToString(), limit)
        self._signers[bearer] = confirmed, signer
        return signer


def _draw_ids() -> list[bytes]:
    drawn = os.urandom(_NUM_IDS_DRAWN * TICKET_JTI_BYTES)
    return [drawn[start : start + TICKET_JTI_BYTES] for start in range(0, len(drawn), TICKET_JTI_BYTES)]


def _signed_size(claims_bytes: int) -> int:
    """Bytes of a SignedTicket around claims of 128 to 16383 bytes, the tenant's included."""
    return claims_bytes + 3 + 2 + SHA256.digest_size


def _fit_tenant(tenant: str, num_bytes: int) -> str:
    """The tenant, or "#" and a piece of its SHA-256 where it is too long for the ticket."""
    if len(tenant.encode()) <= num_bytes:
        return tenant
    digest = base64.urlsafe_b64encode(hashlib.sha256(tenant.encode()).digest()).decode()
    return ("#" + digest)[: min(num_bytes, 23)]


def _invalid_ticket(why: str) -> DragomanError:
    return DragomanError(
        error_pb2.ERROR_REASON_TICKET_INVALID, f"the ticket is not one of this controller: {why}; acquire a new one"
    )
