"""Mints tickets: claims signed with HMAC-SHA256 under HKDF-SHA256(cell key, agent id, epoch).

An agent gets only its own derived key, so a stolen agent can mint only for itself.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets
import struct
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from dragoman.errors import DragomanError
from dragoman.limits import TICKET_JTI_BYTES, TICKET_KEY_BYTES, TICKET_VERSION
from dragoman.v1 import error_pb2, ticket_pb2

# Holds for agent ids up to 28 bytes; a longer id makes the ticket longer by as much.
MAX_TICKET_BYTES = 199
_USUAL_AGENT_ID_BYTES = 28
USABLE_SECONDS = 10.0
_INFO_PREFIX = b"dragoman ticket v1"
_MAX_RANDOM_KEY_ID = 1 << 14
_KEY_LINE = re.compile(r"(?P<key_id>\d+)\s+(?P<key>[0-9a-fA-F]{64})")


@dataclass(frozen=True, slots=True)
class CellKey:
    """A secret of the whole cell, never sent; `key_id` names it in tickets."""

    key_id: int
    secret: bytes

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
    keys: list[CellKey] = []
    for number, raw in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        match = _KEY_LINE.fullmatch(line)
        key_id = int(match["key_id"]) if match else 0
        if match is None or not 0 < key_id < 1 << 32:
            raise ValueError(f"{path}:{number}: expected a key id over 0 and 64 hexadecimal digits, such as '1 9f86…'")
        if any(key.key_id == key_id for key in keys):
            raise ValueError(f"{path}:{number}: key id {key_id} is there twice, give each key its own")
        keys.append(CellKey(key_id, bytes.fromhex(match["key"])))
    if not keys:
        raise ValueError(f"{path} holds no key: write a line 'KEY_ID 64_HEX_DIGITS', the newest key first")
    return tuple(keys)


@dataclass(frozen=True, slots=True)
class Claims:
    """What a ticket says, but for version, key id and jti. `not_after_ms` is in the agent's monotonic clock."""

    agent_id: str
    epoch: int
    tenant: str
    model_digest: bytes
    prompt_digest: bytes
    max_prompt_tokens: int
    max_output_tokens: int
    priority: int
    not_after_ms: int
    deadline_budget_ms: int = 0
    resume: tuple[int, int, int] | None = None
    """Origin epoch, attempt, from cursor."""


@dataclass(frozen=True, slots=True)
class Minted:
    """A ticket: its bytes and the id its outcome will be reported under."""

    token: bytes
    jti: bytes


class TicketMinter:
    """Owns the cell keys. Signs with the newest key that the agent has confirmed, so that a rotation drops nothing."""

    def __init__(self, keys: tuple[CellKey, ...]) -> None:
        if not keys:
            raise ValueError("a minter needs at least one cell key")
        self._keys = keys
        self._derived: dict[tuple[int, str, int], bytes] = {}

    @property
    def key_ids(self) -> tuple[int, ...]:
        """Ids of the keys, the newest first."""
        return tuple(key.key_id for key in self._keys)

    def rotate(self, keys: tuple[CellKey, ...]) -> None:
        """Takes new keys, the newest first. Keys that are gone no longer verify anything here."""
        if not keys:
            raise ValueError("a rotation needs at least one cell key")
        self._keys = keys
        self._derived.clear()

    def agent_keys(self, agent_id: str, epoch: int) -> tuple[tuple[int, bytes], ...]:
        """Key id and derived key of each cell key for one life of an agent, the newest first."""
        return tuple((key.key_id, self._derive(key, agent_id, epoch)) for key in self._keys)

    def forget(self, agent_id: str, epoch: int) -> None:
        """Drops the derived keys of a life that is over."""
        for key in self._keys:
            self._derived.pop((key.key_id, agent_id, epoch), None)

    def mint(self, claims: Claims, confirmed_key_ids: tuple[int, ...] | None = None) -> Minted:
        """A ticket of under 200 bytes, see MAX_TICKET_BYTES. `confirmed_key_ids`: keys the agent holds; None means all."""
        key = self._signing_key(confirmed_key_ids)
        jti = secrets.token_bytes(TICKET_JTI_BYTES)
        message = ticket_pb2.TicketClaims(
            version=TICKET_VERSION,
            key_id=key.key_id,
            jti=jti,
            agent_id=claims.agent_id,
            epoch=claims.epoch,
            model_digest=claims.model_digest[:16],
            prompt_digest=claims.prompt_digest,
            max_prompt_tokens=claims.max_prompt_tokens,
            max_output_tokens=claims.max_output_tokens,
            priority=claims.priority,  # type: ignore[arg-type]
            deadline_budget_ms=claims.deadline_budget_ms,
            not_after_ms=claims.not_after_ms,
        )
        if claims.resume is not None:
            message.resume.origin_epoch, message.resume.attempt, message.resume.from_cursor = claims.resume
        limit = MAX_TICKET_BYTES + max(0, len(claims.agent_id.encode()) - _USUAL_AGENT_ID_BYTES)
        if claims.tenant:
            message.tenant = _fit_tenant(claims.tenant, limit - _signed_size(message.ByteSize()) - 2)
        body = message.SerializeToString()
        mac = hmac.digest(self._derive(key, claims.agent_id, claims.epoch), body, "sha256")
        token = ticket_pb2.SignedTicket(claims=body, mac=mac).SerializeToString()
        if len(token) > limit:
            raise AssertionError(f"a ticket of {len(token)} bytes for agent {claims.agent_id!r}")
        return Minted(token, jti)

    def open(self, token: bytes) -> ticket_pb2.TicketClaims:
        """The claims of one of our own tickets. Raises TICKET_INVALID when it is not one."""
        signed, claims = ticket_pb2.SignedTicket(), ticket_pb2.TicketClaims()
        try:
            signed.ParseFromString(token)
            claims.ParseFromString(signed.claims)
        except Exception as error:  # protobuf's DecodeError has no public base besides Exception
            raise _invalid_ticket("it cannot be read") from error
        key = next((key for key in self._keys if key.key_id == claims.key_id), None)
        if key is None:
            raise _invalid_ticket(f"its key id {claims.key_id} is unknown here")
        secret = derive_key(key.secret, claims.agent_id, claims.epoch)
        if not hmac.compare_digest(hmac.digest(secret, signed.claims, "sha256"), signed.mac):
            raise _invalid_ticket("its signature does not fit")
        return claims

    def _signing_key(self, confirmed: tuple[int, ...] | None) -> CellKey:
        if confirmed is not None:
            for key in self._keys:
                if key.key_id in confirmed:
                    return key
        return self._keys[0]

    def _derive(self, key: CellKey, agent_id: str, epoch: int) -> bytes:
        index = key.key_id, agent_id, epoch
        derived = self._derived.get(index)
        if derived is None:
            derived = self._derived[index] = derive_key(key.secret, agent_id, epoch)
        return derived


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
