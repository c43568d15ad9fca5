"""Tickets as minted here, against an independent HKDF and HMAC and against the agent's own verifier."""

from __future__ import annotations

import hashlib
import hmac
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.errors import DragomanError
from dragoman.limits import MAX_AGENT_ID_BYTES, MAX_NUM_CHOICES
from dragoman.v1 import error_pb2, ticket_pb2
from dragoman_agent.tickets import Presented, TicketVerifier
from dragoman_controller.tickets import (
    MAX_TICKET_BYTES,
    Bearer,
    CellKey,
    Claims,
    Minted,
    RequestPart,
    TicketMinter,
    derive_key,
    read_cell_keys,
)

SECRET = bytes(range(32))
EPOCH = 0xFEDC_BA98_7654_3210
NOW_MS = 1_000_000


def hkdf_sha256(secret: bytes, salt: bytes, info: bytes, length: int) -> bytes:
    """RFC 5869, written from its text."""
    pseudorandom_key = hmac.new(salt or bytes(32), secret, hashlib.sha256).digest()
    block, output = b"", b""
    for counter in range(1, 256):
        if len(output) >= length:
            break
        block = hmac.new(pseudorandom_key, block + info + bytes([counter]), hashlib.sha256).digest()
        output += block
    return output[:length]


# RFC 5869, appendix A.1 to A.3: secret, salt, info, output.
RFC_5869 = [
    (
        b"\x0b" * 22,
        bytes(range(13)),
        bytes(range(0xF0, 0xFA)),
        "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865",
    ),
    (
        bytes(range(0x50)),
        bytes(range(0x60, 0xB0)),
        bytes(range(0xB0, 0x100)),
        "b11e398dc80327a1c8e7f78c596a49344f012eda2d4efad8a050cc4c19afa97c59045a99cac7827271cb41c65e590e09da3275600c2f09b83"
        "67793a9aca3db71cc30c58179ec3e87c14c01d5c1f3434f1d87",
    ),
    (
        b"\x0b" * 22,
        b"",
        b"",
        "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8",
    ),
]


@pytest.mark.parametrize(("secret", "salt", "info", "expected"), RFC_5869)
def test_hkdf_gives_the_vectors_of_rfc_5869(secret: bytes, salt: bytes, info: bytes, expected: str) -> None:
    output = bytes.fromhex(expected)
    assert hkdf_sha256(secret, salt, info, len(output)) == output
    library = HKDF(algorithm=SHA256(), length=len(output), salt=salt or None, info=info)
    assert library.derive(secret) == output


def test_the_derived_key_is_hkdf_over_agent_and_epoch() -> None:
    info = b"dragoman ticket v1" + struct.pack("<Q", EPOCH) + b"agent-a"
    assert derive_key(SECRET, "agent-a", EPOCH) == hkdf_sha256(SECRET, b"", info, 32)
    others = {
        derive_key(SECRET, "agent-b", EPOCH),
        derive_key(SECRET, "agent-a", EPOCH + 1),
        derive_key(b"x" * 32, "agent-a", EPOCH),
    }
    assert len(others | {derive_key(SECRET, "agent-a", EPOCH)}) == 4


def minted(mint: TicketMinter, confirmed: tuple[int, ...] | None = None, **fields: Any) -> Minted:
    """A good ticket but for what is given."""
    bearer = Bearer(fields.pop("agent_id", "agent-a"), EPOCH, b"d" * 32)
    not_after_ms = fields.pop("not_after_ms", NOW_MS + 10_000)
    tenant = fields.pop("tenant", "team")
    claims = Claims(b"p" * 32, max_prompt_tokens=100, max_output_tokens=50, max_choices=1, priority=2)._replace(
        **fields
    )
    return mint.mint(bearer, RequestPart(lambda: claims), tenant, not_after_ms, confirmed)


def minter(*keys: CellKey) -> TicketMinter:
    return TicketMinter(keys or (CellKey(7, SECRET),))


def verifier(mint: TicketMinter, now_ms: int = NOW_MS, agent_id: str = "agent-a", epoch: int = EPOCH) -> TicketVerifier:
    checks = TicketVerifier(agent_id, epoch, b"d" * 32, lambda: now_ms)
    checks.set_keys("controller", dict(mint.agent_keys(agent_id, epoch)))
    return checks


PRESENTED = Presented(b"p" * 32)


def reason_of(checks: TicketVerifier, token: bytes, presented: Presented = PRESENTED) -> int:
    with pytest.raises(DragomanError) as raised:
        checks.verify(token, presented)
    return raised.value.reason


def test_the_mac_is_hmac_over_the_claims_as_sent() -> None:
    token = minted(minter()).token
    signed = ticket_pb2.SignedTicket.FromString(token)
    key = derive_key(SECRET, "agent-a", EPOCH)
    assert signed.mac == hmac.new(key, signed.claims, hashlib.sha256).digest()


def test_the_agent_accepts_what_was_minted_and_reads_the_same_claims() -> None:
    mint = minter()
    ticket = minted(mint, deadline_budget_ms=2500, resume=(5, 1, 17), max_choices=3)
    grant = verifier(mint).verify(ticket.token, Presented(b"p" * 32, (5, 1, 17)))
    assert (grant.jti, grant.tenant, grant.priority) == (ticket.jti, "team", 2)
    assert (grant.max_prompt_tokens, grant.max_output_tokens, grant.deadline_seconds) == (100, 50, 2.5)
    assert (grant.resume, grant.max_choices) == ((5, 1, 17), 3)


def test_the_agent_refuses_tickets_that_are_wrong_in_any_way() -> None:
    mint = minter()
    good = minted(mint).token
    checks = verifier(mint)
    assert reason_of(checks, b"") == error_pb2.ERROR_REASON_TICKET_REQUIRED
    assert reason_of(checks, b"\xff" * 40) == error_pb2.ERROR_REASON_TICKET_INVALID
    assert reason_of(checks, minted(minter(CellKey(7, b"x" * 32))).token) == error_pb2.ERROR_REASON_TICKET_INVALID
    assert reason_of(checks, minted(minter(CellKey(8, SECRET))).token) == error_pb2.ERROR_REASON_TICKET_INVALID
    # A stolen agent's key signs for that agent only.
    other = ticket_pb2.SignedTicket.FromString(minted(mint, agent_id="agent-b").token)
    own = ticket_pb2.SignedTicket.FromString(good)
    forged = ticket_pb2.SignedTicket(
        claims=own.claims, mac=hmac.digest(derive_key(SECRET, "agent-b", EPOCH), own.claims, "sha256")
    )
    assert reason_of(checks, forged.SerializeToString()) == error_pb2.ERROR_REASON_TICKET_INVALID
    assert reason_of(checks, other.SerializeToString()) == error_pb2.ERROR_REASON_TICKET_WRONG_AGENT
    late = verifier(mint, now_ms=NOW_MS + 10_001)
    assert reason_of(late, good) == error_pb2.ERROR_REASON_TICKET_EXPIRED
    restarted = verifier(mint, epoch=EPOCH + 1)
    assert reason_of(restarted, good) == error_pb2.ERROR_REASON_TICKET_WRONG_AGENT
    assert reason_of(checks, good, Presented(b"q" * 32)) == error_pb2.ERROR_REASON_TICKET_MISMATCH
    assert reason_of(checks, good, Presented(b"p" * 32, (1, 1, 1))) == error_pb2.ERROR_REASON_TICKET_MISMATCH
    checks.consume(checks.verify(good, PRESENTED))
    assert reason_of(checks, good) == error_pb2.ERROR_REASON_TICKET_REPLAYED


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_no_single_altered_byte_passes(data: st.DataObject) -> None:
    mint = minter()
    token = bytearray(minted(mint).token)
    index = data.draw(st.integers(0, len(token) - 1))
    token[index] ^= data.draw(st.integers(1, 255))
    # A byte of the agent's id or epoch makes it look like another's ticket, and that is what is said.
    refused = (error_pb2.ERROR_REASON_TICKET_INVALID, error_pb2.ERROR_REASON_TICKET_WRONG_AGENT)
    assert reason_of(verifier(mint), bytes(token)) in refused
    with pytest.raises(DragomanError):
        mint.open(bytes(token))


@given(
    agent_id=st.text(st.characters(codec="ascii", min_codepoint=33), min_size=1, max_size=MAX_AGENT_ID_BYTES),
    tenant=st.text(max_size=60),
    deadline_ms=st.integers(0, (1 << 28) - 1),
    is_resume=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_tickets_stay_under_200_bytes(agent_id: str, tenant: str, deadline_ms: int, is_resume: bool) -> None:
    mint = minter(CellKey((1 << 14) - 1, SECRET))
    resume = ((1 << 64) - 1, 3, (1 << 21) - 1) if is_resume else None
    token = minted(
        mint,
        agent_id=agent_id,
        tenant=tenant,
        deadline_budget_ms=deadline_ms,
        max_prompt_tokens=(1 << 21) - 1,
        max_output_tokens=(1 << 21) - 1,
        max_choices=MAX_NUM_CHOICES,
        resume=resume,
        not_after_ms=(1 << 42) - 1,
    ).token
    assert len(token) <= MAX_TICKET_BYTES + max(0, len(agent_id) - 28)
    claimed = mint.open(token).tenant
    assert claimed == tenant or (claimed.startswith("#") and len(claimed) >= 8)


def test_one_minter_gives_each_agent_and_request_its_own_claims() -> None:
    mint = minter()
    plain = minted(mint)
    resumed = minted(mint, resume=(9, 2, 33), tenant="", prompt_digest=b"q" * 32, max_output_tokens=0, max_choices=4)
    other = minted(mint, agent_id="agent-b", deadline_budget_ms=7)
    again = minted(mint)
    for ticket, expected in (
        (plain, ("agent-a", "team", b"p" * 32, 50, 1, 0, False)),
        (resumed, ("agent-a", "", b"q" * 32, 0, 4, 0, True)),
        (other, ("agent-b", "team", b"p" * 32, 50, 1, 7, False)),
        (again, ("agent-a", "team", b"p" * 32, 50, 1, 0, False)),
    ):
        said = mint.open(ticket.token)
        assert said.jti == ticket.jti and said.model_digest == b"d" * 16 and said.not_after_ms == NOW_MS + 10_000
        assert expected == (
            said.agent_id,
            said.tenant,
            said.prompt_digest,
            said.max_output_tokens,
            said.max_choices,
            said.deadline_budget_ms,
            said.HasField("resume"),
        )


def test_each_ticket_has_its_own_id() -> None:
    mint = minter()
    assert len({minted(mint).jti for _ in range(100)}) == 100


def test_rotation_signs_with_the_old_key_until_the_agent_confirms_the_new_one() -> None:
    old, new = CellKey(1, SECRET), CellKey(2, b"n" * 32)
    mint = minter(old)
    checks = verifier(mint)
    before = minted(mint, (1,)).token
    mint.rotate((new, old))
    between = minted(mint, (1,)).token
    checks.verify(before, PRESENTED)
    checks.verify(between, PRESENTED)
    after = minted(mint, (2, 1)).token
    assert reason_of(checks, after) == error_pb2.ERROR_REASON_TICKET_INVALID
    checks.set_keys("controller", dict(mint.agent_keys("agent-a", EPOCH)))
    for token in (before, between, after):
        checks.verify(token, PRESENTED)
    assert ticket_pb2.TicketClaims.FromString(ticket_pb2.SignedTicket.FromString(after).claims).key_id == 2


def test_key_files_are_read_newest_first_and_errors_name_the_line(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# newest first\n2 {'ab' * 32}\n\n1 {'cd' * 32}\n")
    assert read_cell_keys(path) == (CellKey(2, b"\xab" * 32), CellKey(1, b"\xcd" * 32))
    for text, expected in (
        (f"1 {'ab' * 31}\n", ":1: expected a key id"),
        (f"2 {'ab' * 32}\n0 {'ab' * 32}\n", ":2: expected a key id"),
        (f"2 {'ab' * 32}\n2 {'cd' * 32}\n", ":2: key id 2 is there twice"),
        ("# none\n", "holds no key"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=expected):
            read_cell_keys(path)


def test_no_message_is_filled_in_from_request_to_request() -> None:
    """One that is takes memory for each field that is set, and gives it back with its own end alone: 40 bytes a request, for ever."""
    modules = {name: module for name, module in sys.modules.items() if name.startswith("dragoman_controller")}
    assert "dragoman_controller.tickets" in modules
    kept = [
        f"{name}.{key}"
        for name, module in modules.items()
        for key, value in vars(module).items()
        if isinstance(value, Message)
    ]
    assert kept == []
