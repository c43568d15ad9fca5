"""Checks admission tickets: the agent's side of what the controller grants. Standard library and protobuf only."""

from __future__ import annotations

import hmac
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from dragoman.errors import DragomanError
from dragoman.limits import TICKET_JTI_BYTES, TICKET_KEY_BYTES, TICKET_MODEL_DIGEST_BYTES, TICKET_VERSION
from dragoman.prefix_hash import prompt_digest_of_ids, prompt_digest_of_inputs, prompt_digest_of_text
from dragoman.v1 import embedding_service_pb2, error_pb2, generation_service_pb2, ticket_pb2

MAX_TICKET_BYTES = 4096
# A ticket may wait 10 s for its first use; the used ones are remembered well past that.
USED_WINDOW_MS = 120_000

MonotonicMs = Callable[[], int]


@dataclass(frozen=True, slots=True)
class Grant:
    """What a request may do: the claims of its ticket, or no limits on an open agent."""

    jti: bytes = b""
    tenant: str = ""
    priority: int = 0  # dragoman.v1.Priority
    max_prompt_tokens: int | None = None
    max_output_tokens: int | None = None  # a choice
    max_choices: int = 0  # 0 is not checked: an open agent, or a ticket of a controller that does not set it
    deadline_seconds: float | None = None
    not_after_ms: int = 0
    resume: tuple[int, int, int] | None = None  # origin epoch, attempt, from cursor
    prompt_digest: bytes = b""


OPEN_GRANT = Grant()


@dataclass(frozen=True, slots=True)
class Presented:
    """What arrived beside the ticket and must be what the ticket was granted for."""

    prompt_digest: bytes  # 32 bytes
    resume: tuple[int, int, int] | None = None  # origin epoch, attempt, delivered tokens over all choices


def presented_generate(request: generation_service_pb2.GenerateRequest) -> Presented:
    """The facts of a generation that its ticket binds."""
    digest = (
        prompt_digest_of_text(request.text)
        if request.WhichOneof("prompt") == "text"
        else prompt_digest_of_ids(request.token_ids.ids)
    )
    if not request.HasField("resume"):
        return Presented(digest)
    delivered = sum(len(choice.token_ids.ids) for choice in request.resume.choices)
    return Presented(digest, (request.resume.origin_epoch, request.resume.attempt, delivered))


def presented_embed(request: embedding_service_pb2.EmbedRequest) -> Presented:
    """The facts of an embedding that its ticket binds."""
    digests = [
        prompt_digest_of_ids(item.token_ids.ids)
        if item.WhichOneof("input") == "token_ids"
        else prompt_digest_of_text(item.text)
        for item in request.inputs
    ]
    return Presented(prompt_digest_of_inputs(digests))


class TicketVerifier:
    """Verifies tickets for one life of one agent, and remembers the used ones.

    Keys come from the controllers at registration; several controllers and rotated keys live side by side by key id.
    """

    def __init__(self, agent_id: str, epoch: int, model_digest: bytes, monotonic_ms: MonotonicMs) -> None:
        """`monotonic_ms` is the clock reported in heartbeats; tickets expire by it, never by wall-clock time."""
        self._agent_id = agent_id
        self._epoch = epoch
        self._model_digest = model_digest[:TICKET_MODEL_DIGEST_BYTES]
        self._monotonic_ms = monotonic_ms
        self._keys: dict[str, dict[int, bytes]] = {}
        self._used: OrderedDict[bytes, int] = OrderedDict()
        self._revoked: OrderedDict[bytes, int] = OrderedDict()

    def set_keys(self, source: str, keys: Mapping[int, bytes]) -> None:
        """Replace the keys one controller gave (`source` is its address). Raises ValueError for a key of wrong length."""
        for key_id, key in keys.items():
            if len(key) != TICKET_KEY_BYTES:
                raise ValueError(f"ticket key {key_id} has {len(key)} bytes, {TICKET_KEY_BYTES} are needed")
        self._keys[source] = dict(keys)

    def verify(self, token: bytes, presented: Presented) -> Grant:
        """The grant of a ticket. Nothing is consumed; call `consume` when the request is accepted.

        The order of checks: present, well-formed, signed, version, agent and epoch, used before, expired, bound request.
        Signature first, so that an unsigned ticket learns no more than whose it says it is. Raises DragomanError.
        """
        if not token:
            raise _refusal("REQUIRED", "this agent takes requests with a ticket only; acquire one from the controller")
        claims = self._authentic_claims(token)
        if claims.version != TICKET_VERSION:
            raise _refusal(
                "INVALID", f"the ticket has version {claims.version}, this agent reads {TICKET_VERSION}; update it"
            )
        self._check_addressee(claims)
        self._check_unused(claims.jti)
        if self._monotonic_ms() > claims.not_after_ms:
            late = (self._monotonic_ms() - claims.not_after_ms) / 1000
            raise _refusal(
                "EXPIRED", f"the ticket was not used in time, it ran out {late:.1f} s ago; acquire a new one"
            )
        self._check_bound(claims, presented)
        return _grant(claims)

    def consume(self, grant: Grant) -> None:
        """Mark the ticket as used. Raises DragomanError when another request used it since `verify`."""
        if not grant.jti:
            return
        self._check_unused(grant.jti)
        now = self._monotonic_ms()
        _forget_old(self._used, now)
        self._used[grant.jti] = max(now, grant.not_after_ms) + USED_WINDOW_MS

    def revoke(self, jti: bytes) -> None:
        """Refuse this ticket from now on."""
        now = self._monotonic_ms()
        _forget_old(self._revoked, now)
        self._revoked[jti] = now + USED_WINDOW_MS

    def _authentic_claims(self, token: bytes) -> ticket_pb2.TicketClaims:
        malformed = _refusal("INVALID", "the ticket is not one; send the token exactly as the controller gave it")
        if len(token) > MAX_TICKET_BYTES:
            raise malformed
        signed, claims = ticket_pb2.SignedTicket(), ticket_pb2.TicketClaims()
        try:
            signed.ParseFromString(token)
            claims.ParseFromString(signed.claims)
        except DecodeError:
            raise malformed from None
        if not self._signed_by_known_key(claims.key_id, signed.claims, signed.mac):
            # Keys are derived from agent and epoch: a genuine ticket for another life of this agent fails here too, and its
            # holder should acquire a new one instead of giving up.
            if claims.version == TICKET_VERSION and len(claims.jti) == TICKET_JTI_BYTES:
                self._check_addressee(claims)
            raise _refusal(
                "INVALID", "the ticket was altered or signed with a key this agent does not know; acquire a new one"
            )
        if len(claims.jti) != TICKET_JTI_BYTES:
            raise malformed
        return claims

    def _check_addressee(self, claims: ticket_pb2.TicketClaims) -> None:
        if claims.agent_id != self._agent_id:
            raise _refusal(
                "WRONG_AGENT",
                f"the ticket is for agent {claims.agent_id!r}, this is {self._agent_id!r}; acquire a new one",
            )
        if claims.epoch != self._epoch:
            raise _refusal("WRONG_AGENT", "the ticket is for an earlier life of this agent; acquire a new one")

    def _signed_by_known_key(self, key_id: int, claims: bytes, mac: bytes) -> bool:
        """Two controllers may use one key id for different cell keys, so every key with the id is tried."""
        candidates: Iterable[bytes] = [keys[key_id] for keys in self._keys.values() if key_id in keys]
        genuine = False
        for key in candidates:
            genuine |= hmac.compare_digest(hmac.digest(key, claims, "sha256"), mac)
        return genuine

    def _check_unused(self, jti: bytes) -> None:
        if jti in self._used:
            raise _refusal(
                "REPLAYED",
                "the ticket was used before; acquire one for each attempt, and give each request an id of its own",
            )
        if jti in self._revoked:
            raise _refusal("INVALID", "the ticket was revoked by the controller; do not send this request again")

    def _check_bound(self, claims: ticket_pb2.TicketClaims, presented: Presented) -> None:
        if not hmac.compare_digest(claims.model_digest, self._model_digest):
            raise _mismatch("model", "the ticket is for other weights than this agent serves; acquire a new one")
        if not hmac.compare_digest(claims.prompt_digest, presented.prompt_digest):
            raise _mismatch(
                "prompt", "the prompt is not the one the ticket was granted for; send exactly what was admitted"
            )
        claimed = _resume_of(claims)
        if claimed != presented.resume:
            raise _mismatch(
                "resume", f"the ticket says {_resume_text(claimed)}, the request {_resume_text(presented.resume)}"
            )


def check_prompt_tokens(grant: Grant, prompt_tokens: int) -> None:
    """Raises DragomanError when the prompt turned out longer than was admitted."""
    if grant.max_prompt_tokens is not None and prompt_tokens > grant.max_prompt_tokens:
        raise _mismatch(
            "prompt_tokens",
            f"the prompt has {prompt_tokens} tokens, the ticket allows {grant.max_prompt_tokens}; acquire one that fits",
        )


def check_output_tokens(grant: Grant, output_tokens: int) -> None:
    """Raises DragomanError when more output is asked for than was admitted: fewer tokens would be given silently."""
    if grant.max_output_tokens and output_tokens > grant.max_output_tokens:
        raise _mismatch(
            "max_output_tokens",
            f"the request asks for {output_tokens} output tokens, the ticket allows {grant.max_output_tokens}; "
            "ask the controller for as many as the agent",
        )


def check_choices(grant: Grant, num_choices: int) -> None:
    """Raises DragomanError when more choices are asked for than were admitted: the controller counts on their slots."""
    if grant.max_choices and num_choices > grant.max_choices:
        raise _mismatch(
            "max_choices",
            f"the request asks for {num_choices} choices, the ticket allows {grant.max_choices}; "
            "ask the controller for as many as the agent",
        )


def _grant(claims: ticket_pb2.TicketClaims) -> Grant:
    budget = claims.deadline_budget_ms
    return Grant(
        jti=claims.jti,
        tenant=claims.tenant,
        priority=claims.priority,
        max_prompt_tokens=claims.max_prompt_tokens,
        max_output_tokens=claims.max_output_tokens,
        max_choices=claims.max_choices,
        deadline_seconds=budget / 1000 if budget else None,
        not_after_ms=claims.not_after_ms,
        resume=_resume_of(claims),
        prompt_digest=claims.prompt_digest,
    )


def _resume_of(claims: ticket_pb2.TicketClaims) -> tuple[int, int, int] | None:
    if not claims.HasField("resume"):
        return None
    return claims.resume.origin_epoch, claims.resume.attempt, claims.resume.from_cursor


def _resume_text(resume: tuple[int, int, int] | None) -> str:
    if resume is None:
        return "a new stream"
    return f"attempt {resume[1]} from cursor {resume[2]} of a stream of epoch {resume[0]:016x}"


def _forget_old(remembered: OrderedDict[bytes, int], now: int) -> None:
    while remembered and next(iter(remembered.values())) < now:
        remembered.popitem(last=False)


def _refusal(kind: str, message: str) -> DragomanError:
    return DragomanError(getattr(error_pb2, f"ERROR_REASON_TICKET_{kind}"), message)


def _mismatch(claim: str, message: str) -> DragomanError:
    error = _refusal("MISMATCH", message)
    error.metadata["claim"] = claim
    return error
