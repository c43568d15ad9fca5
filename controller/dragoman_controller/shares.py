"""Fair shares of the places at the agents: who must leave the last ones free, and for how long a tenant counts."""

from __future__ import annotations

import math
from collections.abc import Callable

from dragoman_controller.placer import Placer
from dragoman_controller.policy import PolicyStore

# Places kept for tenants within their share while others want more than theirs: what chance alone makes the former ask for
# at once goes with the square root of the places; never more than an eighth of them.
RESERVED_ROOTS, MAX_RESERVED_SHARE = 2.0, 1 / 8
# A tenant has its share for so long after it asked last; more tenants at once than this are served and not counted.
TENANT_SECONDS = 30.0
MAX_NUM_TENANTS = 16_384
_COUNT_SECONDS = 0.5


class Shares:
    """Owns when each tenant asked last."""

    def __init__(self, placer: Placer, policy: PolicyStore, clock: Callable[[], float]) -> None:
        self._placer, self._policy, self._clock = placer, policy, clock
        self.asked_at: dict[str, float] = {}
        # As of a moment ago: the sum of the tenants' shares, and the most that one of them runs a share.
        self._num_shares, self._largest_use, self._counted_at = 0, 0.0, -math.inf

    def note(self, tenant: str, now: float) -> None:
        """A tenant asks."""
        if tenant in self.asked_at or len(self.asked_at) < MAX_NUM_TENANTS:
            self.asked_at[tenant] = now

    def must_leave_room(self, tenant: str, model: str) -> bool:
        """Whether only the places are left that are kept for tenants within their fair share of the running requests.

        Without them a tenant that floods the cell would have every place as it comes free, and all others would wait.
        """
        candidates = self._placer.candidates(model)
        if candidates is None:
            return False
        num_free, num_places = candidates.num_free, candidates.num_places
        if num_free > MAX_RESERVED_SHARE * num_places or num_free > num_reserved(num_places):
            return False
        self._count()
        if self._num_shares <= self._policy.current.tenant(tenant).share:
            return False  # nobody else asked lately
        share = self._policy.current.tenant(tenant).share
        # One that is over its share for a moment, and far below the largest, is not what the others suffer from.
        fair = max(candidates.num_places / self._num_shares, self._largest_use / 2)
        return self._placer.num_running(tenant) >= share * fair

    def _count(self) -> None:
        now = self._clock()
        if now - self._counted_at < _COUNT_SECONDS:
            return
        for name in [name for name, asked_at in self.asked_at.items() if now - asked_at > TENANT_SECONDS]:
            del self.asked_at[name]
        policy = self._policy.current
        shares = {name: policy.tenant(name).share for name in self.asked_at}
        self._counted_at, self._num_shares = now, sum(shares.values())
        self._largest_use = max((self._placer.num_running(name) / share for name, share in shares.items()), default=0.0)


def num_reserved(num_places: int) -> float:
    """Places that a tenant over its share leaves free for the others."""
    return min(MAX_RESERVED_SHARE * num_places, RESERVED_ROOTS * math.sqrt(num_places))
