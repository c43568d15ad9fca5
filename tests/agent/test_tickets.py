from __future__ import annotations

import hashlib
import hmac
import struct

import pytest

from dragoman.errors import DragomanError
from dragoman.v1 import (
    admission_service_pb2,
    embedding_service_pb2,
    generation_service_pb2,
    ticket_pb2,
    tokens_pb2,
)
from dragoman_agent.tickets import (
    Presented,
    TicketVerifier,
    check_choices,
    check_prompt_tokens,
    presented_embed,
    presented_generate,
)

KEY, OTHER_KEY = bytes(range(32)), bytes(range(1, 33))
EPOCH = 0xABCDEF0123456789
MODEL = hashlib.sha256(b"model").digest()
PROMPT = hashlib.sha256("héllo".encode()).digest()


AS_SENT = Presented(PROMPT)


class Clock:
    def __init__(self) -> None:
        self.ms = 1_000_000

    def __call__(self) -> int:
        return self.ms


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def verifier(clock: Clock) -> TicketVerifier:
    made = TicketVerifier("agent-1", EPOCH, MODEL, clock)
    made.set_keys("controller", {7: KEY})
    return made


def claims(**changes: object) -> ticket_pb2.TicketClaims:
    fields: dict[str, object] = {
        "version": 1,
        "key_id": 7,
        "jti": b"0123456789abcdef",
        "agent_id": "agent-1",
        "epoch": EPOCH,
        "tenant": "acme",
        "model_digest": MODEL[:16],
        "prompt_digest": PROMPT,
        "max_prompt_tokens": 10,
        "max_output_tokens": 20,
        "max_choices": 2,
        "priority": admission_service_pb2.PRIORITY_BATCH,
        "deadline_budget_ms": 1500,
        "not_after_ms": 1_010_000,
    }
    return ticket_pb2.TicketClaims(**{**fields, **changes})  # type: ignore[arg-type]


def sign(body: ticket_pb2.TicketClaims, key: bytes = KEY) -> bytes:
    """HMAC-SHA256 written out from its definition (RFC 2104): independent of the code under test."""
    data = body.SerializeToString()
    padded = key.ljust(64, b"\0")
    inner = hashlib.sha256(bytes(b ^ 0x36 for b in padded) + data).digest()
    mac = hashlib.sha256(bytes(b ^ 0x5C for b in padded) + inner).digest()
    return ticket_pb2.SignedTicket(claims=data, mac=mac).SerializeToString()


def refusal(verifier: TicketVerifier, token: bytes, presented: Presented = AS_SENT) -> str:
    with pytest.raises(DragomanError) as caught:
        verifier.verify(token, presented)
    return caught.value.reason_name


def test_good_ticket_grants_its_claims(verifier: TicketVerifier) -> None:
    grant = verifier.verify(sign(claims()), Presented(PROMPT))
    assert (grant.tenant, grant.max_prompt_tokens, grant.max_output_tokens) == ("acme", 10, 20)
    assert (grant.max_choices, grant.deadline_seconds) == (2, 1.5)
    assert grant.priority == admission_service_pb2.PRIORITY_BATCH


def test_ticket_is_under_200_bytes() -> None:
    assert len(sign(claims(agent_id="a" * 32, tenant="t" * 16))) < 200


@pytest.mark.parametrize(
    ("token", "reason"),
    [
        (b"", "ticket_required"),
        (b"\xff\xff\xff", "ticket_invalid"),
        (b"x" * 5000, "ticket_invalid"),
        (ticket_pb2.SignedTicket(claims=b"", mac=b"").SerializeToString() or b"\x12\x00", "ticket_invalid"),
        (sign(claims(), OTHER_KEY), "ticket_invalid"),
        (sign(claims(key_id=8)), "ticket_invalid"),
        (sign(claims(jti=b"short")), "ticket_invalid"),
        (sign(claims(version=2)), "ticket_invalid"),
        (sign(claims(agent_id="agent-2")), "ticket_wrong_agent"),
        (sign(claims(epoch=EPOCH + 1)), "ticket_wrong_agent"),
        (sign(claims(not_after_ms=999_999)), "ticket_expired"),
        (sign(claims(model_digest=b"\0" * 16)), "ticket_mismatch"),
        (sign(claims(model_digest=MODEL)), "ticket_mismatch"),
        (sign(claims(prompt_digest=b"\0" * 32)), "ticket_mismatch"),
        (sign(claims(prompt_digest=b"")), "ticket_mismatch"),
        (sign(claims(resume=ticket_pb2.ResumeClaim(attempt=1))), "ticket_mismatch"),
    ],
)
def test_each_wrong_way_has_its_reason(verifier: TicketVerifier, token: bytes, reason: str) -> None:
    assert refusal(verifier, token) == reason


def test_every_flipped_bit_of_a_ticket_is_noticed(verifier: TicketVerifier) -> None:
    good = sign(claims())
    for position in range(len(good)):
        for bit in (0, 3, 7):
            altered = bytearray(good)
            altered[position] ^= 1 << bit
            assert refusal(verifier, bytes(altered)) in ("ticket_invalid", "ticket_wrong_agent"), position


def test_a_ticket_of_the_agents_earlier_life_may_be_replaced(verifier: TicketVerifier) -> None:
    # Signed with the key of that life, which this one does not have.
    assert refusal(verifier, sign(claims(epoch=EPOCH + 1), OTHER_KEY)) == "ticket_wrong_agent"
    assert refusal(verifier, sign(claims(agent_id="agent-2"), OTHER_KEY)) == "ticket_wrong_agent"
    assert refusal(verifier, sign(claims(), OTHER_KEY)) == "ticket_invalid"


def test_order_of_checks_tells_a_forger_nothing(verifier: TicketVerifier) -> None:
    wrong_in_every_way = claims(agent_id="x", epoch=1, not_after_ms=0, prompt_digest=b"", version=9)
    assert refusal(verifier, sign(wrong_in_every_way, OTHER_KEY)) == "ticket_invalid"
    assert refusal(verifier, sign(claims(agent_id="x", not_after_ms=0))) == "ticket_wrong_agent"
    assert refusal(verifier, sign(claims(not_after_ms=0, prompt_digest=b""))) == "ticket_expired"


def test_replay_is_refused_within_and_after_the_window(verifier: TicketVerifier, clock: Clock) -> None:
    token = sign(claims())
    grant = verifier.verify(token, Presented(PROMPT))
    verifier.consume(grant)
    assert refusal(verifier, token) == "ticket_replayed"
    with pytest.raises(DragomanError) as caught:
        verifier.consume(grant)
    assert caught.value.reason_name == "ticket_replayed"
    clock.ms += 60_000
    assert refusal(verifier, token) == "ticket_replayed"
    clock.ms += 600_000
    verifier.consume(verifier_grant(verifier, clock))
    assert refusal(verifier, token) == "ticket_expired"


def verifier_grant(verifier: TicketVerifier, clock: Clock) -> object:
    token = sign(claims(jti=b"fedcba9876543210", not_after_ms=clock.ms + 10))
    return verifier.verify(token, Presented(PROMPT))


def test_verify_consumes_nothing(verifier: TicketVerifier) -> None:
    token = sign(claims())
    verifier.verify(token, Presented(PROMPT))
    verifier.verify(token, Presented(PROMPT))


def test_last_millisecond_counts(verifier: TicketVerifier, clock: Clock) -> None:
    clock.ms = 1_010_000
    verifier.verify(sign(claims()), Presented(PROMPT))
    clock.ms += 1
    assert refusal(verifier, sign(claims())) == "ticket_expired"


def test_rotated_and_foreign_keys_live_side_by_side(verifier: TicketVerifier) -> None:
    verifier.set_keys("controller", {8: OTHER_KEY, 7: KEY})
    verifier.set_keys("second", {7: OTHER_KEY})
    verifier.verify(sign(claims()), Presented(PROMPT))
    verifier.verify(sign(claims(), OTHER_KEY), Presented(PROMPT))
    verifier.verify(sign(claims(key_id=8), OTHER_KEY), Presented(PROMPT))
    verifier.set_keys("controller", {8: OTHER_KEY})
    assert refusal(verifier, sign(claims())) == "ticket_invalid"
    with pytest.raises(ValueError, match="31 bytes"):
        verifier.set_keys("controller", {9: b"x" * 31})


def test_revoked_ticket_is_refused(verifier: TicketVerifier) -> None:
    verifier.revoke(b"0123456789abcdef")
    assert refusal(verifier, sign(claims())) == "ticket_invalid"


def test_resume_claim_must_be_the_request(verifier: TicketVerifier) -> None:
    claim = ticket_pb2.ResumeClaim(origin_epoch=5, attempt=2, from_cursor=9)
    token = sign(claims(resume=claim))
    verifier.verify(token, Presented(PROMPT, (5, 2, 9)))
    for wrong in (None, (5, 2, 8), (5, 1, 9), (6, 2, 9)):
        assert refusal(verifier, token, Presented(PROMPT, wrong)) == "ticket_mismatch"


def test_prompt_longer_than_admitted(verifier: TicketVerifier) -> None:
    grant = verifier.verify(sign(claims()), Presented(PROMPT))
    check_prompt_tokens(grant, 10)
    with pytest.raises(DragomanError, match="11 tokens, the ticket allows 10"):
        check_prompt_tokens(grant, 11)


def test_more_choices_than_admitted(verifier: TicketVerifier) -> None:
    grant = verifier.verify(sign(claims()), Presented(PROMPT))
    check_choices(grant, 2)
    with pytest.raises(DragomanError, match="3 choices, the ticket allows 2") as caught:
        check_choices(grant, 3)
    assert (caught.value.reason_name, caught.value.metadata["claim"]) == ("ticket_mismatch", "max_choices")


def test_a_ticket_of_an_older_controller_does_not_bind_the_choices(verifier: TicketVerifier) -> None:
    older = claims()
    older.ClearField("max_choices")
    check_choices(verifier.verify(sign(older), Presented(PROMPT)), 128)


def test_presented_prompt_is_hashed_as_sent() -> None:
    text = generation_service_pb2.GenerateRequest(text="héllo")
    assert presented_generate(text).prompt_digest == PROMPT
    ids = generation_service_pb2.GenerateRequest(token_ids=tokens_pb2.TokenIds(ids=[1, 70000]))
    assert presented_generate(ids).prompt_digest == hashlib.sha256(struct.pack("<2I", 1, 70000)).digest()
    resumed = generation_service_pb2.GenerateRequest(text="x")
    resumed.resume.attempt = 1
    resumed.resume.origin_epoch = 3
    resumed.resume.choices.add(choice_index=0, token_ids=tokens_pb2.TokenIds(ids=[1, 2]))
    resumed.resume.choices.add(choice_index=1, token_ids=tokens_pb2.TokenIds(ids=[3]))
    assert presented_generate(resumed).resume == (3, 1, 3)


def test_presented_inputs_of_an_embedding() -> None:
    def item(text: str) -> embedding_service_pb2.EmbedInput:
        return embedding_service_pb2.EmbedInput(text=text)

    one = embedding_service_pb2.EmbedRequest(inputs=[item("héllo")])
    assert presented_embed(one).prompt_digest == PROMPT
    two = embedding_service_pb2.EmbedRequest(inputs=[item("héllo"), item("héllo")])
    assert presented_embed(two).prompt_digest == hashlib.sha256(PROMPT + PROMPT).digest()


def test_mac_comparison_takes_no_shortcut(monkeypatch: pytest.MonkeyPatch, verifier: TicketVerifier) -> None:
    compared: list[int] = []
    genuine = hmac.compare_digest

    def spy(a: bytes, b: bytes) -> bool:
        compared.append(len(a))
        return genuine(a, b)

    monkeypatch.setattr(hmac, "compare_digest", spy)
    refusal(verifier, sign(claims(), OTHER_KEY))
    assert compared == [32]
