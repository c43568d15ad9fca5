"""F5: an agent in a network namespace is cut off, both ways and one way, under mutual TLS as between hosts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import grpc
import pytest
from benchmarks.cell import Cell
from tests.controller.authority import Authority
from tests.faults.checks import check_streams, settle, stalls
from tests.faults.conftest import FULL, Figures
from tests.faults.drive import disturb, figures_of
from tests.faults.namespace import Cut, Namespace, namespaces

NUM_STREAMS = 32 if FULL else 8
NUM_TOKENS = 300
SPEED = ("--null-speed", "10")
PROMPTS = [f"stream {index}" for index in range(NUM_STREAMS)]
# 3, 7 and 15 of the design, and the machine's own delay
NOTICED_SECONDS, RESUMED_SECONDS, FREED_SECONDS = 4.5, 8.5, 15.0
AGENTS = ("agent-0", "agent-1")

Parted = tuple[Cell, dict[str, Namespace]]


@pytest.fixture(scope="module")
def parted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parted]:
    """A cell whose agents are in a namespace each."""
    folder = tmp_path_factory.mktemp("tls")
    authority = Authority.named("cell")
    with namespaces(len(AGENTS)) as (ours, made):
        certificate, key = authority.issue("client")
        credentials = grpc.ssl_channel_credentials(authority.certificate, key, certificate)
        tls = ["--tls-client-ca" if flag == "--tls-ca" else flag for flag in authority.write(folder / "c", ours)]
        cell = Cell(controller=("--host", ours, *tls), credentials=credentials)
        places = dict(zip(AGENTS, made, strict=True))
        try:
            for agent_id, place in places.items():
                flags = (*SPEED, "--host", place.there, *authority.write(folder / agent_id, agent_id))
                cell.start_agent(agent_id, *flags, prefix=place.prefix, wait=False)
            for agent_id in AGENTS:
                cell.wait_agent(agent_id)
            cell.start_gateway(*authority.write(folder / "gateway", "gateway"))
            yield cell, places
        finally:
            for place in made:
                place.heal()
            cell.close()


@pytest.mark.parametrize("how", ["both ways", "to it", "from it"])
async def test_f5_a_cut_is_noticed_resumed_and_freed(parted: Parted, how: Cut, figures: Figures, num_runs: int) -> None:
    for _ in range(num_runs):
        await part(*parted, how, figures)


async def part(cell: Cell, places: dict[str, Namespace], how: Cut, figures: Figures) -> None:
    before = cell.footprint()
    in_use: list[float] = []
    cut_at = 0.0

    def blocks_in_use(agent_id: str) -> float:
        """Read from inside, where the agent can still be asked."""
        name, address = "dragoman_kv_blocks", cell.metrics_address(agent_id)
        place = places[agent_id]
        return place.metric(address, f'{name}{{state="total"}}') - place.metric(address, f'{name}{{state="free"}}')

    async def cut(agent_id: str) -> float:
        nonlocal cut_at
        in_use.append(await asyncio.to_thread(blocks_in_use, agent_id))
        cut_at = time.monotonic()
        await asyncio.to_thread(places[agent_id].cut, how)
        return cut_at

    try:
        run = await disturb(cell, "both", PROMPTS, NUM_TOKENS, cut)
        assert in_use[0] > 0, "nothing ran on the agent that was cut off"
        while left := await asyncio.to_thread(blocks_in_use, run.agent_id):
            assert time.monotonic() - cut_at < 2 * FREED_SECONDS, f"the run that was cut off goes on: {left} blocks"
            await asyncio.sleep(0.2)
        freed = time.monotonic() - cut_at
    finally:
        for place in places.values():
            place.heal()
    figures.add("F5", f"{how.replace(' ', '-')}-{NUM_STREAMS}", freed_seconds=freed, **figures_of(run))
    check_streams(run.streams, run.expected)
    assert run.num_resumed >= len(run.victims) > 0
    assert run.detect_seconds <= NOTICED_SECONDS
    assert stalls(run.victims)["stall_p99"] <= RESUMED_SECONDS
    assert freed <= FREED_SECONDS
    cell.wait_serving(2)
    settle(cell, before)
