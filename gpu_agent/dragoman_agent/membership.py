"""Which controllers the agent is a member at: those it was given, those a DNS name stands for, those it hears of."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence

from dragoman.address import host_port
from dragoman.v1 import agent_pb2, agent_registry_service_pb2
from dragoman_agent.registration import AgentPart, ControllerLink

logger = logging.getLogger(__name__)

DNS_PREFIX = "dns:"
RESOLVE_SECONDS = 10.0
MAX_NUM_LINKS = 64

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


async def resolve_name(host: str, port: int) -> Sequence[str]:
    """Every address of a name, as host:port. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return sorted({host_port(str(address[0]), port) for *_, address in found})


class Membership:
    """Owns the links. A controller that is away is tried again; one that no list names any more is forgotten.

    `dns:HOST:PORT` stands for every address of the name, looked up again and again.
    """

    def __init__(self, addresses: Sequence[str], part: AgentPart, resolve: Resolve = resolve_name) -> None:
        self._part = part
        self._resolve = resolve
        self._given = tuple(address for address in addresses if not address.startswith(DNS_PREFIX))
        self._names = tuple(address for address in addresses if address.startswith(DNS_PREFIX))
        self._links: dict[str, ControllerLink] = {}
        self._resolved: set[str] = set()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def addresses(self) -> list[str]:
        """Where links go."""
        return list(self._links)

    def start(self) -> None:
        """Dial all."""
        for address in self._given:
            self._add(address)
        self._tasks = [asyncio.create_task(self._follow_name(name)) for name in self._names]

    def report(self, outcome: agent_registry_service_pb2.RequestOutcome) -> None:
        """Tell every controller; the one that minted the ticket knows it. The loss of the engine is told at once."""
        for link in self._links.values():
            link.outcomes.append(outcome)
            if outcome.engine_lost:
                link.hurry()

    def describe_again(self) -> None:
        """Tell every controller what the agent now says of itself."""
        for link in self._links.values():
            link.describe_again()

    async def close(self) -> None:
        """Leave all."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, *(link.close() for link in self._links.values()), return_exceptions=True)

    def _add(self, address: str) -> None:
        if address in self._links or len(self._links) >= MAX_NUM_LINKS:
            return
        link = ControllerLink(address, self._part, self._is_other, self._heard)
        self._links[address] = link
        link.start()

    def _is_other(self, link: ControllerLink) -> bool:
        """Whether no other link leads to the same controller: one by another name would only double the beats."""
        return not any(
            other is not link and other.is_registered and other.controller_id == link.controller_id
            for other in self._links.values()
        )

    def _heard(self, link: ControllerLink, controllers: Sequence[agent_pb2.Controller]) -> None:
        """A controller tells who the others are."""
        known = {one.controller_id for one in self._links.values() if one.is_registered}
        for controller in controllers:
            if controller.controller_id not in known:
                self._add(controller.address)
        listed = {controller.address for controller in controllers}
        for address, other in list(self._links.items()):
            if address not in listed and self._is_learned(address) and not other.is_registered:
                self._drop(address)

    def _is_learned(self, address: str) -> bool:
        return address not in self._given and address not in self._resolved

    def _drop(self, address: str) -> None:
        logger.info("controller %s is no longer one of the cell", address)
        self._links.pop(address).abandon()

    async def _follow_name(self, name: str) -> None:
        host, _, port = name.removeprefix(DNS_PREFIX).rpartition(":")
        last_problem = ""
        while True:
            try:
                found = set(await self._resolve(host.strip("[]"), int(port)))
            except OSError as error:
                if str(error) != last_problem:
                    last_problem = str(error)
                    logger.warning("controllers %s: the name cannot be looked up (%s); trying again", name, error)
            else:
                last_problem = ""
                gone, self._resolved = self._resolved - found, found
                for address in sorted(found):
                    self._add(address)
                for address in gone:
                    if address in self._links and not self._links[address].is_registered:
                        self._drop(address)
            await asyncio.sleep(RESOLVE_SECONDS if self._resolved else 1.0)
