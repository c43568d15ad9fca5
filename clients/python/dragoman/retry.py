"""When a failed request is sent again, resumed or given up, and after how long. Pure: no clock, no sleep."""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass

from dragoman.errors import DragomanError
from dragoman.v1 import error_pb2

_TENTHS = 10
# Value of TRANSPORT in the metadata of an error made here, when nobody listens at the address.
REFUSED = "connection refused"

# The agent is gone, or gave the request up, and another may go on at the last cursor.
_RESUMABLE = frozenset(
    {
        error_pb2.ERROR_REASON_AGENT_LOST,
        error_pb2.ERROR_REASON_DEVICE_FAULT,
        error_pb2.ERROR_REASON_AGENT_DRAINING,
        error_pb2.ERROR_REASON_CREDIT_TIMEOUT,
    }
)
_LOST = frozenset({error_pb2.ERROR_REASON_AGENT_LOST, error_pb2.ERROR_REASON_DEVICE_FAULT})


class Step(enum.Enum):
    """What to do about a failure."""

    GIVE_UP = "give up"
    ASK_AGAIN = "ask again"  # it was refused: same request, new ticket
    RESUME = "resume"  # it may have been running: next attempt, from the last cursor


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How hard a client tries.

    A request of which nothing was delivered is asked for `max_attempts` times in all. One that was cut in the middle
    is worth more: it is pursued for `resume_patience_seconds` after the cut, through at most 3 resumes; for
    `refused_patience_seconds` only while every connection is refused, which is how a stopped server looks.
    Delays double from `base_seconds` up to `max_delay_seconds`, each shortened at random by up to a half; a delay that
    the server named is the least. `budget` limits the retries of one client: each costs 1, each success gives back a
    tenth, so that many failing requests do not become a storm.
    """

    max_attempts: int = 4
    base_seconds: float = 0.1
    max_delay_seconds: float = 5.0
    resume_patience_seconds: float = 30.0
    refused_patience_seconds: float = 5.0
    budget: float = 50.0

    def __post_init__(self) -> None:
        if self.max_attempts < 1 or min(self.base_seconds, self.max_delay_seconds, self.budget) < 0:
            raise ValueError("RetryPolicy: max_attempts is at least 1, and no delay or budget is negative")

    def delay(self, num_failures: int, error: DragomanError | None, rng: random.Random) -> float:
        """Seconds to wait after the failure number `num_failures`, from 1 on. `error` None: nobody named a delay."""
        longest = min(self.base_seconds * 2.0 ** min(num_failures - 1, 30), self.max_delay_seconds)
        return max(longest * rng.uniform(0.5, 1.0), (error.retry_delay if error is not None else None) or 0.0)


class RetryBudget:
    """What is left of `RetryPolicy.budget`. Owned by one client."""

    def __init__(self, capacity: float) -> None:
        # In tenths: ten successes must make one retry exactly.
        self._capacity = self._left = round(capacity * _TENTHS)

    def spend(self) -> bool:
        """Pays for one retry; False when there is nothing left for it."""
        if self._left < _TENTHS:
            return False
        self._left -= _TENTHS
        return True

    def succeeded(self) -> None:
        """Gives a tenth of a retry back."""
        self._left = min(self._capacity, self._left + 1)


def may_pass(error: DragomanError, *, resuming: bool) -> bool:
    """Whether a refusal may be another answer later or at another agent.

    A resume can reach the agent it was cut from before that agent has noticed the cut: the request is still under way there.
    """
    return error.retryable or (resuming and error.reason == error_pb2.ERROR_REASON_DUPLICATE_REQUEST)


def may_resume(error: DragomanError) -> bool:
    """Whether another agent may go on where a running stream ended with `error`."""
    return error.reason in _RESUMABLE


def step_after(error: DragomanError, *, accepted: bool, resuming: bool = False) -> Step:
    """What the reason of a failure asks for. `accepted`: the agent had started the request (on this attempt)."""
    if accepted:
        return Step.RESUME if may_resume(error) else Step.GIVE_UP
    if error.reason in _LOST:
        return Step.RESUME
    return Step.ASK_AGAIN if may_pass(error, resuming=resuming) else Step.GIVE_UP
