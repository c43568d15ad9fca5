"""One request on its way: what the client, the agent and the tally know of it."""

from __future__ import annotations

from enum import IntEnum

from dragoman.pursuit import Pursuit
from dragoman_controller.granted import Granted


class End(IntEnum):
    """How a request ended."""

    UNFINISHED = 0
    FINISHED = 1
    REFUSED = 2
    """The controller or every agent refused it until its client gave up."""
    LOST = 3
    """It was cut more often than a stream is resumed."""


class Stream:
    """One request and its present run. Token counts; times in virtual seconds."""

    __slots__ = (
        "accepted_at", "agent_tokens", "arrived_at", "attempt", "cached_tokens", "delivered", "end",
        "end_step", "first_at", "granted", "jti", "number", "order", "origin", "output_tokens", "prefix",
        "prefix_tokens", "priority", "prompt_tokens", "pursuit", "queued", "run_first_at", "started", "tenant", "uncomputed",
        "units",
    )  # fmt: skip

    def __init__(
        self,
        number: int,
        arrived_at: float,
        tenant: int,
        priority: int,
        prompt_tokens: int,
        output_tokens: int,
        prefix: int,
        prefix_tokens: int,
        units: tuple[int, ...],
    ) -> None:
        self.number, self.arrived_at, self.tenant, self.priority = number, arrived_at, tenant, priority
        self.prompt_tokens, self.output_tokens = prompt_tokens, output_tokens
        self.prefix, self.prefix_tokens, self.units = prefix, prefix_tokens, units
        # The client's side.
        self.end = End.UNFINISHED
        self.attempt = 0
        self.delivered = 0
        """Output tokens that the client had before the present run."""
        self.pursuit: Pursuit | None = None
        """What went wrong with it so far; made when something does."""
        self.first_at = -1.0
        self.origin: tuple[str, int] | None = None
        self.granted: Granted | None = None
        self.queued = False
        # The agent's side, of the present run.
        self.jti = b""
        self.accepted_at = 0.0
        self.run_first_at = -1.0
        self.agent_tokens = 0
        """Output tokens of this run, before the last time it was preempted."""
        self.cached_tokens = 0
        self.uncomputed = 0
        self.started = False
        self.end_step = 0
        self.order = 0

    @property
    def context_tokens(self) -> int:
        """Tokens to be in the context before the next output token: prompt, and what was generated."""
        return self.prompt_tokens + self.delivered + self.agent_tokens

    @property
    def tokens_to_come(self) -> int:
        """Output tokens still to be generated, when it is not in decode."""
        return self.output_tokens - self.delivered - self.agent_tokens
