"""F1: an agent is killed with streams on it, over the gateway and straight from the client library."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
from benchmarks.cell import Cell, running_cell
from tests.faults.checks import check_streams, settle
from tests.faults.conftest import FULL, Figures
from tests.faults.drive import disturb, figures_of

NUM_STREAMS = 64 if FULL else 8
NUM_TOKENS = 400 if FULL else 200
SPEED = ("--null-speed", "10")
PROMPTS = [f"stream {index}" for index in range(NUM_STREAMS)]


@pytest.fixture(scope="module")
def cell() -> Iterator[Cell]:
    with running_cell(SPEED, SPEED) as made:
        yield made


async def kill(cell: Cell, agent_id: str) -> None:
    cell.agents[agent_id].kill_family()


@pytest.mark.parametrize("via", ["gateway", "client"])
async def test_no_stream_is_lost_with_its_agent(cell: Cell, via: str, figures: Figures, num_runs: int) -> None:
    for _ in range(num_runs):
        before = cell.footprint()
        run = await disturb(cell, via, PROMPTS, NUM_TOKENS, partial(kill, cell))
        assert cell.agents[run.agent_id].popen.wait(5) == -9, "the agent was not killed"
        figures.add("F1", f"{via}-{NUM_STREAMS}", **figures_of(run))
        check_streams(run.streams, run.expected)
        assert run.num_resumed >= len(run.victims) > 0
        assert run.detect_seconds < 1.0
        cell.remove_agent(run.agent_id)
        cell.start_agent(run.agent_id, *SPEED)
        cell.wait_serving(2)
        settle(cell, before)
