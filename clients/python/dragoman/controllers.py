"""The controllers of a cell, any of which answers: one is asked until it fails, then the next."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from dragoman.address import address_problem
from dragoman.errors import DragomanError
from dragoman.v1 import error_pb2

R = TypeVar("R")

# Key in the metadata of an error that the transport made, not the server.
TRANSPORT = "transport"


class Controllers:
    """Owner of which controller is asked now. Everything of one client or gateway moves on together."""

    def __init__(self, addresses: str | Sequence[str]) -> None:
        """`addresses`: host:port each, in the order in which they are tried; a text may list several with commas.

        Raises ValueError when there is none, or one cannot be dialled as it is written.
        """
        parts = addresses.split(",") if isinstance(addresses, str) else addresses
        self.addresses = tuple(dict.fromkeys(part.strip() for part in parts if part.strip()))
        if not self.addresses:
            raise ValueError("the address of a controller is empty; give host:port, several with commas")
        for address in self.addresses:
            if problem := address_problem(address):
                raise ValueError(f"the address of a controller, {address!r}, {problem}")
        self._index = 0

    def __str__(self) -> str:
        return ", ".join(self.addresses)

    @property
    def current(self) -> str:
        """The one to ask."""
        return self.addresses[self._index]

    def failed(self, address: str) -> None:
        """`address` does not answer, or is shutting down. Late news of one that is no longer asked changes nothing."""
        if address == self.current:
            self._index = (self._index + 1) % len(self.addresses)

    async def ask(self, call: Callable[[str], Awaitable[R]]) -> R:
        """The answer of `call(address)`; a controller that is away or shutting down is passed over, each one once.

        Raises the DragomanError of the last.
        """
        for _ in self.addresses[1:]:
            address = self.current
            try:
                return await call(address)
            except DragomanError as error:
                if not is_away(error):
                    raise
                self.failed(address)
        return await call(self.current)


def is_away(error: DragomanError) -> bool:
    """Whether another controller may do better: this one cannot be reached, or is shutting down."""
    return TRANSPORT in error.metadata or error.reason == error_pb2.ERROR_REASON_AGENT_DRAINING
