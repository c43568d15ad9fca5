"""What a client is given: tickets, where they lead, and the promise."""

from __future__ import annotations

from typing import NamedTuple

from dragoman_controller.quote import Quote
from dragoman_controller.tickets import Minted


class Destination:
    """Where tickets for one life of an agent lead."""

    __slots__ = ("agent_id", "data_address", "epoch", "message_fields")

    def __init__(self, agent_id: str, epoch: int, data_address: str) -> None:
        self.agent_id, self.epoch, self.data_address = agent_id, epoch, data_address
        self.message_fields = b""
        """The same as the fields of a message, kept by who writes answers."""


class Ticket(NamedTuple):
    """One ticket as handed to a client; `usable_seconds` from now."""

    minted: Minted
    destination: Destination
    usable_seconds: float
    expected_cached_tokens: int

    @property
    def agent_id(self) -> str:
        """The agent that it is for."""
        return self.destination.agent_id

    @property
    def epoch(self) -> int:
        """The life of that agent."""
        return self.destination.epoch

    @property
    def token(self) -> bytes:
        """What the client shows the agent."""
        return self.minted.token

    @property
    def jti(self) -> bytes:
        """The id of the ticket."""
        return self.minted.jti


class Granted(NamedTuple):
    """Admission: the ticket, maybe a second one for another agent, and the promise."""

    ticket: Ticket
    fallback: Ticket | None
    quote: Quote
    usable_until: float

    def aged(self, now: float) -> Granted:
        """The same grant given out again later."""
        left = max(self.usable_until - now, 0.0)
        fallback = self.fallback._replace(usable_seconds=left) if self.fallback else None
        return self._replace(ticket=self.ticket._replace(usable_seconds=left), fallback=fallback)
