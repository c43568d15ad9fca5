"""Drives a cell through one fault: undisturbed run, disturbed run, and the moment at which the controller noticed."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx
from benchmarks.cell import Cell
from benchmarks.streams import Stream, read_client, read_gateway, until_flowing
from tests.faults.checks import num_duplicated, num_lost, stalls

from dragoman import AsyncClient, RetryPolicy
from dragoman.tls import open_channel
from dragoman.v1 import agent_pb2, fleet_service_pb2, fleet_service_pb2_grpc

Expected = dict[str, list[int]]


class Readers:
    """Reads streams either way; one client stands for many, so its retry budget is that of many."""

    def __init__(self, client: AsyncClient, http: httpx.AsyncClient) -> None:
        self.client = client
        self.http = http

    async def follow(self, via: str, streams: list[Stream], num_tokens: int) -> None:
        """Read all to their ends. `via`: gateway, client, or both in turn."""
        readers = []
        for index, stream in enumerate(streams):
            if via == "gateway" or (via == "both" and index % 2):
                readers.append(read_gateway(self.http, stream, num_tokens))
            else:
                readers.append(read_client(self.client, stream, num_tokens))
        await asyncio.gather(*readers)


@asynccontextmanager
async def readers_of(cell: Cell) -> AsyncIterator[Readers]:
    """Readers for a cell."""
    limits = httpx.Limits(max_connections=4096, max_keepalive_connections=64)
    async with (
        AsyncClient(
            cell.controller_address, credentials=cell.credentials, retry=RetryPolicy(budget=10_000.0)
        ) as client,
        httpx.AsyncClient(base_url=cell.url, limits=limits) as http,
    ):
        yield Readers(client, http)


@dataclass(frozen=True, slots=True)
class Change:
    """An agent's state as the controller told it."""

    time: float
    agent_id: str
    state: int


class FleetWatch:
    """Every change of state that the controller tells, with the time it came."""

    def __init__(self) -> None:
        self.changes: list[Change] = []

    async def run(self, cell: Cell) -> None:
        """Follow until cancelled."""
        async with open_channel(cell.controller_address, cell.credentials) as channel:
            call = fleet_service_pb2_grpc.FleetServiceStub(channel).WatchFleet(fleet_service_pb2.WatchFleetRequest())
            async for update in call:
                now = time.monotonic()
                self.changes += [Change(now, m.agent.agent_id, m.state) for m in update.changed]
                self.changes += [
                    Change(now, gone, agent_pb2.AGENT_STATE_UNSPECIFIED) for gone in update.removed_agent_ids
                ]

    def noticed(self, agent_id: str, since: float) -> float:
        """Seconds from `since` until the agent was no longer called serving. Raises AssertionError when it never was."""
        for change in self.changes:
            left = change.state != agent_pb2.AGENT_STATE_SERVING
            if change.agent_id == agent_id and change.time >= since and left:
                return change.time - since
        raise AssertionError(f"the controller never noticed that {agent_id} was gone: {self.changes}")


@dataclass(slots=True)
class Run:
    """A disturbed run and what it is compared with."""

    expected: Expected
    streams: list[Stream]
    victims: list[Stream]  # those that ran on the agent the fault hit
    agent_id: str
    detect_seconds: float
    num_resumed: float  # as the gateway and the client library count


async def undisturbed(readers: Readers, via: str, prompts: list[str], num_tokens: int) -> Expected:
    """The outputs without a fault."""
    calm = [Stream(prompt) for prompt in prompts]
    await readers.follow(via, calm, num_tokens)
    for stream in calm:
        assert not stream.error and len(stream.token_ids) == num_tokens, (stream.prompt, stream.error)
    return {stream.prompt: stream.token_ids for stream in calm}


async def disturb(
    cell: Cell,
    via: str,
    prompts: list[str],
    num_tokens: int,
    fault: Callable[[str], Awaitable[float | None]],
    *,
    is_noticed: bool = True,
) -> Run:
    """Run the prompts twice, the second time with `fault(agent_id)` on the agent with most streams.

    A fault that is long in the making returns when it began to act, by time.monotonic(); else it is when it was called.
    `is_noticed`: the controller must see the agent leave; where it need not, `detect_seconds` is not a number.
    """
    watch = FleetWatch()
    before = cell.gateway_metric("dragoman_resumes_total", result="ok")
    async with readers_of(cell) as readers:
        expected = await undisturbed(readers, via, prompts, num_tokens)
        watching = asyncio.create_task(watch.run(cell))
        streams = [Stream(prompt) for prompt in prompts]
        reading = asyncio.create_task(readers.follow(via, streams, num_tokens))
        try:
            await until_flowing(streams, num_tokens // 20)
            agent_id = max(cell.agents, key=lambda name: sum(stream.agent_id == name for stream in streams))
            victims = [s for s in streams if s.agent_id == agent_id and len(s.token_ids) < num_tokens]
            assert victims, "no stream was under way when the fault was made"
            fault_time = time.monotonic()
            fault_time = await fault(agent_id) or fault_time
            await reading
        finally:
            reading.cancel()
            watching.cancel()
            await asyncio.gather(reading, watching, return_exceptions=True)
    by_gateway = cell.gateway_metric("dragoman_resumes_total", result="ok") - before
    num_resumed = by_gateway + sum(stream.num_resumes for stream in streams)
    detect_seconds = watch.noticed(agent_id, fault_time) if is_noticed else math.nan
    return Run(expected, streams, victims, agent_id, detect_seconds, num_resumed)


def figures_of(run: Run) -> dict[str, float]:
    """The published figures of a disturbed run."""
    return {
        "in_flight": len(run.victims),
        "lost": num_lost(run.streams, run.expected),
        "duplicated": num_duplicated(run.streams, run.expected),
        "resumed": run.num_resumed,
        **stalls(run.victims),
        "detect_seconds": run.detect_seconds,
    }
