"""How one generation is pursued through refusals and lost agents: the decisions of client and gateway. Pure: time is given."""

from __future__ import annotations

import random
from dataclasses import dataclass

from dragoman.controllers import TRANSPORT
from dragoman.errors import DragomanError
from dragoman.limits import MAX_RESUMES
from dragoman.retry import REFUSED, RetryPolicy, Step, may_resume, step_after
from dragoman.v1 import error_pb2


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do about a failure, and after how many seconds."""

    step: Step
    delay_seconds: float = 0.0


GIVE_UP = Decision(Step.GIVE_UP)


class Pursuit:
    """Owner of what has gone wrong with one generation so far. At most 3 resumes; see RetryPolicy for the patience.

    The first cut is answered at once. What fails after it, until tokens flow again, is answered after growing delays.
    """

    def __init__(
        self,
        policy: RetryPolicy,
        rng: random.Random,
        *,
        deadline: float | None = None,
        also_retried: frozenset[error_pb2.ErrorReason] = frozenset(),
        heeds_retry_delay: bool = True,
    ) -> None:
        """`deadline`: when the request is over anyway, by the clock of `now`. `also_retried`: refusals that may pass for this
        caller, whatever the catalogue says. `heeds_retry_delay`: whether a delay that a server names is the least.
        """
        self._policy = policy
        self._rng = rng
        self._deadline = deadline
        self._also_retried = also_retried
        self._heeds_retry_delay = heeds_retry_delay
        self.num_resumes = 0
        self.cut: DragomanError | None = None
        """What cut the stream, until it goes on."""
        self._was_started = False
        self._cut_at: float | None = None
        self._refused_since: float | None = None  # since when nobody listens any more
        self._num_failures = 0

    def started(self) -> None:
        """An agent accepted the request, for the first time or again."""
        self._was_started = True

    def flowed(self) -> None:
        """Tokens came: what went wrong before is over."""
        self._num_failures, self.cut, self._cut_at = 0, None, None

    def may_resume(self, error: Exception | None) -> bool:
        """Whether a running stream that ends with `error` is to be resumed."""
        return isinstance(error, DragomanError) and may_resume(error) and self.num_resumes < MAX_RESUMES

    def failed(self, error: DragomanError, *, accepted: bool, has_origin: bool, now: float) -> Decision:
        """Decides; a RESUME is counted. `accepted`: the agent had started the request on this attempt.

        `has_origin`: there is a stream to be continued; where there is none, a lost agent is answered by asking again.
        """
        step = step_after(error, accepted=accepted, resuming=self.num_resumes > 0)
        if step is Step.GIVE_UP and not accepted and error.reason in self._also_retried:
            step = Step.ASK_AGAIN
        if step is Step.RESUME and not has_origin:
            step = Step.ASK_AGAIN
        if step is Step.RESUME and self.num_resumes >= MAX_RESUMES:
            return GIVE_UP
        delay = self._delay_before(step, error, now)
        if delay is None:
            return GIVE_UP
        if step is Step.RESUME:
            self.num_resumes += 1
        return Decision(step, delay)

    def _delay_before(self, step: Step, error: DragomanError, now: float) -> float | None:
        """Seconds before the next try, or None when there is none."""
        if step is Step.GIVE_UP:
            return None
        refused = error.metadata.get(TRANSPORT) == REFUSED
        self._refused_since = (self._refused_since or now) if refused else None
        if self._was_started and self._cut_at is None:
            self.cut, self._cut_at = error, now
            return 0.0
        self._num_failures += 1
        policy = self._policy
        delay = policy.delay(self._num_failures, error if self._heeds_retry_delay else None, self._rng)
        if self._deadline is not None and now + delay >= self._deadline:
            return None
        if not self._was_started:
            return delay if self._num_failures < policy.max_attempts else None
        patience_left = (self._cut_at or now) + policy.resume_patience_seconds - now
        if self._refused_since is not None:
            patience_left = min(patience_left, self._refused_since + policy.refused_patience_seconds - now)
        return delay if delay <= patience_left else None
