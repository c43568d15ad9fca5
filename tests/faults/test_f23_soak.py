"""F23: load with one fault after another, drawn from a fixed seed; every stream of it holds exactly its tokens.

DRAGOMAN_FAULT_MINUTES=30 soaks longer, then with a fault each minute. In `make test` three faults come, seconds apart.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import psutil
import pytest
from benchmarks.cell import Cell, CellProcess
from benchmarks.soak import Sample, rss_slope
from benchmarks.streams import Stream
from tests.faults.checks import check_footprint, check_streams, num_duplicated, num_lost, stalls
from tests.faults.conftest import FULL, Figures
from tests.faults.drive import Readers, readers_of, undisturbed
from tests.faults.injection import Injection

SEED = 20260101
MINUTES = float(os.environ.get("DRAGOMAN_FAULT_MINUTES", "2" if FULL else "0"))
NUM_FAULTS = 3  # where there are no minutes to fill
INTERVAL_SECONDS = 60.0 if MINUTES >= 10 else 12.0 if FULL else 2.0
NUM_AGENTS, NUM_READERS = 3, 12
NUM_TOKENS = 200
SPEED = ("--null-speed", "10", "--drain-notice", "0.5")
PROMPTS = [f"soak {index} " + "and so on " * (index % 7) for index in range(24)]
SAMPLE_SECONDS = 1.0
MAX_SLOPE_BYTES = 2 << 20  # a minute, of the gateway, which lives through it all

Soaked = tuple[Cell, dict[str, Injection]]


@pytest.fixture
def soaked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Soaked]:
    cell = Cell()
    injections = {f"agent-{index}": Injection(tmp_path_factory.mktemp("agent")) for index in range(NUM_AGENTS)}
    try:
        for agent_id, injection in injections.items():
            cell.start_agent(agent_id, *SPEED, environ=injection.environ, wait=False)
        for agent_id in injections:
            cell.wait_agent(agent_id)
        cell.start_gateway()
        yield cell, injections
    finally:
        cell.close()


@contextmanager
def suspended(processes: list[psutil.Process]) -> Iterator[None]:
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            process.resume()


class Faults:
    """What can go wrong; each leaves the cell as it was. `made` counts them by name."""

    def __init__(self, soaked: Soaked, rng: random.Random) -> None:
        self._cell, self._injections = soaked
        self._rng = rng
        self.made: list[str] = []
        quick: list[Callable[[str], Awaitable[None]]] = [self.kill, self.run_out_of_memory, self.lose_controller]
        self._kinds = [*quick, self.drain, self.freeze, self.wedge, self.fall_off_the_bus] if FULL else quick
        self._order: list[Callable[[str], Awaitable[None]]] = []

    async def make_one(self) -> None:
        """Each kind comes once before one comes again."""
        if not self._order:
            self._order = self._rng.sample(self._kinds, len(self._kinds))
        fault, agent_id = self._order.pop(), self._rng.choice(sorted(self._cell.agents))
        self.made.append(f"{fault.__name__} {agent_id}")  # type: ignore[attr-defined]
        await fault(agent_id)
        await asyncio.to_thread(self._cell.wait_serving, NUM_AGENTS)

    async def kill(self, agent_id: str) -> None:
        """As F1."""
        self._cell.agents[agent_id].kill_family()
        await self._replace(agent_id, -9)

    async def run_out_of_memory(self, agent_id: str) -> None:
        """As F10."""
        self._injections[agent_id].run_out_of_memory()
        await self._replace(agent_id, 1)

    async def fall_off_the_bus(self, agent_id: str) -> None:
        """As F11."""
        self._injections[agent_id].report_xids(79)
        await self._replace(agent_id, 1)

    async def drain(self, agent_id: str) -> None:
        """As F18."""
        self._cell.agents[agent_id].popen.terminate()
        await self._replace(agent_id, 0)

    async def freeze(self, agent_id: str) -> None:
        """As F2."""
        with suspended(self._cell.agents[agent_id].family()):
            await asyncio.sleep(self._rng.uniform(1, 10))

    async def wedge(self, agent_id: str) -> None:
        """As F3."""
        with suspended(self._cell.agents[agent_id].family()[1:]):
            await asyncio.sleep(self._rng.uniform(1, 10))

    async def lose_controller(self, _: str) -> None:
        """As F4."""
        killed: CellProcess = self._cell.controller
        killed.signal(9)
        assert await asyncio.to_thread(killed.popen.wait, 10) == -9
        killed.close()
        await asyncio.to_thread(self._cell.start_controller)

    async def _replace(self, agent_id: str, code: int) -> None:
        """Wait for the end, which has this exit code, and start another."""
        assert await asyncio.to_thread(self._cell.agents[agent_id].popen.wait, 30) == code, (
            f"{agent_id} ended otherwise"
        )
        await asyncio.to_thread(self._cell.remove_agent, agent_id)
        self._injections[agent_id].report_xids()
        await asyncio.to_thread(
            lambda: self._cell.start_agent(agent_id, *SPEED, environ=self._injections[agent_id].environ)
        )


async def load(readers: Readers, number: int, done: list[Stream], ended: asyncio.Event) -> None:
    """One stream after another, by the gateway or the client."""
    rng = random.Random(f"{SEED} {number}")
    while not ended.is_set():
        stream = Stream(rng.choice(PROMPTS))
        await readers.follow(rng.choice(("gateway", "client")), [stream], NUM_TOKENS)
        done.append(stream)


def is_refused(stream: Stream) -> bool:
    """Whether it was never accepted, since the one controller was away; what was accepted must end well."""
    return not stream.token_ids and "no_agent" in stream.error


async def sample(cell: Cell, samples: list[Sample]) -> None:
    """Memory of the gateway."""
    assert cell.gateway is not None
    process = psutil.Process(cell.gateway.pid)
    while True:
        samples.append(Sample(time.monotonic(), process.memory_info().rss, process.num_fds()))
        await asyncio.sleep(SAMPLE_SECONDS)


async def test_f23_one_fault_after_another(soaked: Soaked, figures: Figures, num_runs: int) -> None:
    for run in range(num_runs):
        await soak_once(soaked, SEED + run, figures)


async def soak_once(soaked: Soaked, seed: int, figures: Figures) -> None:
    cell = soaked[0]
    faults = Faults(soaked, random.Random(seed))
    done: list[Stream] = []
    samples: list[Sample] = []
    ended = asyncio.Event()
    async with readers_of(cell) as readers:
        expected = await undisturbed(readers, "both", PROMPTS, NUM_TOKENS)
        before = cell.footprint()
        resumed_before = cell.gateway_metric("dragoman_resumes_total", result="ok")
        sampling = asyncio.create_task(sample(cell, samples))
        loads = [asyncio.create_task(load(readers, number, done, ended)) for number in range(NUM_READERS)]
        until = time.monotonic() + 60 * MINUTES
        try:
            while len(faults.made) < NUM_FAULTS or time.monotonic() < until:
                next_at = time.monotonic() + INTERVAL_SECONDS
                await faults.make_one()
                await asyncio.sleep(max(1.0, next_at - time.monotonic()))
        finally:
            ended.set()
            sampling.cancel()
            await asyncio.gather(sampling, *loads, return_exceptions=True)
    refused = [stream for stream in done if is_refused(stream)]
    assert not refused or any("lose_controller" in fault for fault in faults.made), refused[0].error
    done = [stream for stream in done if not is_refused(stream)]
    slope = rss_slope(samples) if MINUTES else 0.0
    by_gateway = cell.gateway_metric("dragoman_resumes_total", result="ok") - resumed_before
    num_resumed = by_gateway + sum(stream.num_resumes for stream in done)
    print(f"\n{len(faults.made)} faults: {', '.join(faults.made)}")
    figures.add(
        "F23", f"{len(faults.made)}-faults-{NUM_READERS}", in_flight=NUM_READERS, lost=num_lost(done, expected),
        duplicated=num_duplicated(done, expected), resumed=num_resumed, num_streams=len(done), refused=len(refused), rss_slope=slope,
        **stalls(done),
    )  # fmt: skip
    check_streams(done, expected)
    assert num_resumed > 0, "no fault has hit a stream"
    assert slope <= MAX_SLOPE_BYTES
    cell.quiesce()
    check_footprint(before, cell.footprint())
