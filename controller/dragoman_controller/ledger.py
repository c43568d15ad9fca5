"""What was granted and has not ended: the debit that each grant puts on its agent until a beat or an outcome replaces it."""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

from dragoman_controller.fleet import Load
from dragoman_controller.intervals import Lengths, Ratios, lengths_of
from dragoman_controller.quote import NO_FEATURES, Features
from dragoman_controller.tuples import new

# A ticket needs this long to reach its agent and show up in the load; counting it twice for so long does no harm.
TRAVEL_SECONDS = 0.05
# Past its first-use window by this much, a ticket that was never heard of was not used.
EXPIRY_MARGIN_SECONDS = 1.0


@dataclass(slots=True, eq=False)
class Grant:
    """One granted request. `ttft_seconds` and `tpot_seconds` are the predictions it was placed by, made of `features`."""

    jti: bytes
    key: tuple[str, str, int]
    tenant: str
    model: str
    agent_id: str
    epoch: int
    granted_at: float
    usable_until: float
    num_slots: int
    uncached_tokens: int
    prompt_tokens: int
    output_tokens: int
    ttft_seconds: float
    tpot_seconds: float
    fallback_jti: bytes | None = None
    prompt_bytes: int = 0
    """Of a prompt whose tokens the client did not know."""
    features: Features = NO_FEATURES
    prefill_seconds: float = 0.0
    """As expected of its agent, in a step of its own."""
    shared_seconds: float = 0.0
    """What it adds to a step of prompts that is run anyway: its tokens at the rate of prefill, without what a step takes at least."""
    charged_seconds: float = 0.0
    """Which of the two its agent was debited with."""
    waits_for_slot: bool = False
    promised: Ratios | None = None
    """The ratios of its quote."""
    ended: bool = False
    is_recent: bool = True

    @property
    def lengths(self) -> Lengths:
        """As it was quoted."""
        return lengths_of(self.uncached_tokens, self.output_tokens)

    def finish_seconds(self, output_tokens: int) -> float:
        """Predicted seconds from acceptance to the last of so many tokens."""
        return self.ttft_seconds + max(output_tokens - 1, 0) * self.tpot_seconds


class Debit(NamedTuple):
    """What one agent has in front of it: its own report plus the grants the report cannot know yet."""

    num_requests: int
    pending_prefill_tokens: int
    context_tokens: int
    num_contexts: int
    busy_until: float
    """When the prompt tokens in front will have been computed, as expected of the agent."""

    @property
    def mean_context_tokens(self) -> float:
        """Mean context of the sequences, in tokens."""
        return self.context_tokens / self.num_contexts if self.num_contexts else 0.0


@dataclass(slots=True)
class _Account:
    """The open grants of one life of one agent."""

    open: dict[bytes, Grant] = field(default_factory=dict)
    recent: deque[Grant] = field(default_factory=deque)
    num_open_slots: int = 0
    # Sums over `recent`, kept along so that a debit costs the same however many grants there are.
    recent_slots: int = 0
    recent_uncached: int = 0
    recent_context: int = 0
    sampled_at: float = -math.inf
    busy_until: float = -math.inf

    def count(self, grant: Grant, sign: int) -> None:
        self.recent_slots += sign * grant.num_slots
        self.recent_uncached += sign * grant.uncached_tokens
        self.recent_context += sign * grant.prompt_tokens * grant.num_slots

    def queue_up(self, grant: Grant) -> None:
        """Its prefill begins when those before it have ended, or at once.

        Prompts that wait share a step. One that finds more in front than the step under way joins those that wait for it to
        end: where a step takes long however few tokens it has, as on a GPU, each would else count as a step more.
        """
        begun, granted_at, alone = self.busy_until, grant.granted_at, grant.prefill_seconds
        shared = grant.shared_seconds
        if begun <= granted_at:
            begun = granted_at
        charged = shared if shared < alone < begun - granted_at else alone
        grant.charged_seconds = charged
        self.busy_until = begun + charged

    def settle(self, before: float) -> None:
        """Forgets what was granted before the report knew of it."""
        while self.recent and (self.recent[0].ended or self.recent[0].granted_at < before):
            grant = self.recent.popleft()
            grant.is_recent = False
            if not grant.ended:
                self.count(grant, -1)


class Ledger:
    """Owns the open grants, by ticket id and by agent."""

    def __init__(self) -> None:
        self._by_jti: dict[bytes, Grant] = {}
        self._accounts: dict[tuple[str, int], _Account] = {}
        self._running: Counter[str] = Counter()

    def __len__(self) -> int:
        return sum(len(account.open) for account in self._accounts.values())

    def add(self, grant: Grant) -> None:
        """Debits an agent."""
        life = grant.agent_id, grant.epoch
        account = self._accounts.get(life)
        if account is None:
            account = self._accounts[life] = _Account()
        jti, num_slots = grant.jti, grant.num_slots
        account.open[jti] = grant
        account.recent.append(grant)
        account.count(grant, 1)
        account.queue_up(grant)
        account.num_open_slots += num_slots
        self._running[grant.tenant] += 1
        self._by_jti[jti] = grant
        if grant.fallback_jti is not None:
            self._by_jti[grant.fallback_jti] = grant

    def end(self, jti: bytes) -> Grant | None:
        """Undoes the debit of a ticket, be it the first or the fallback; None when it is not open."""
        grant = self._by_jti.get(jti)
        if grant is not None:
            self._close(grant)
        return grant

    def find(self, jti: bytes) -> Grant | None:
        """The open grant of a ticket."""
        return self._by_jti.get(jti)

    def open_grants(self, agent_id: str, epoch: int) -> list[Grant]:
        """Open grants of one life of an agent, the oldest first."""
        account = self._accounts.get((agent_id, epoch))
        return list(account.open.values()) if account else []

    def num_open(self, agent_id: str, epoch: int) -> int:
        """Number of open grants of one life of an agent."""
        account = self._accounts.get((agent_id, epoch))
        return len(account.open) if account else 0

    def num_running(self, tenant: str) -> int:
        """Open grants of a tenant."""
        return self._running[tenant]

    def drop_life(self, agent_id: str, epoch: int) -> list[Grant]:
        """Closes every grant of a life that is over; returns them."""
        grants = self.open_grants(agent_id, epoch)
        for grant in grants:
            self._close(grant)
        self._accounts.pop((agent_id, epoch), None)
        return grants

    def sweep(self, agent_id: str, epoch: int, load: Load, now: float) -> list[Grant]:
        """Closes grants whose ticket ran out unused; returns them.

        An expired ticket without an outcome is either running or was never used. The agent's own count tells how
        many run; of what is open beyond it the oldest are taken for unused.
        """
        account = self._accounts.get((agent_id, epoch))
        if account is None or len(account.open) <= load.num_requests:
            return []
        # Grants are kept in the order in which their tickets run out.
        expired = list(
            takewhile(lambda grant: grant.usable_until + EXPIRY_MARGIN_SECONDS <= now, account.open.values())
        )
        surplus = expired[: max(len(expired) - load.num_requests, 0)]
        for grant in surplus:
            self._close(grant)
        return surplus

    def debit(self, agent_id: str, epoch: int, load: Load, sampled_at: float, pending_seconds: float = 0.0) -> Debit:
        """What is in front of an agent, by its report of `sampled_at` and by what was granted since.

        `pending_seconds`: what the pending prefill of the report takes from then on.
        """
        account = self._accounts.get((agent_id, epoch))
        if account is None:
            return Debit(
                load.num_requests,
                load.pending_prefill_tokens,
                load.running_context_tokens,
                load.running_requests,
                sampled_at + pending_seconds,
            )
        recent, before = account.recent, sampled_at - TRAVEL_SECONDS
        if recent and (recent[0].ended or recent[0].granted_at < before):
            account.settle(before)
        if sampled_at != account.sampled_at:
            # A new report: what it knows of is in its pending tokens. Those granted since are few.
            account.sampled_at, account.busy_until = sampled_at, sampled_at + pending_seconds
            for grant in recent:
                if not grant.ended:
                    account.queue_up(grant)
        num_requests = load.waiting_requests + load.running_requests + account.recent_slots
        num_slots = account.num_open_slots
        return new(
            Debit,
            (
                num_requests if num_requests > num_slots else num_slots,
                load.pending_prefill_tokens + account.recent_uncached,
                load.running_context_tokens + account.recent_context,
                load.running_requests + account.recent_slots,
                account.busy_until,
            ),
        )

    def _close(self, grant: Grant) -> None:
        grant.ended = True
        account = self._accounts[grant.agent_id, grant.epoch]
        if grant.is_recent:
            account.count(grant, -1)
            account.busy_until -= grant.charged_seconds
        del account.open[grant.jti]
        account.num_open_slots -= grant.num_slots
        self._running[grant.tenant] -= 1
        if not self._running[grant.tenant]:
            del self._running[grant.tenant]
        del self._by_jti[grant.jti]
        if grant.fallback_jti is not None:
            self._by_jti.pop(grant.fallback_jti, None)
