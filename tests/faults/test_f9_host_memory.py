"""F9: the host runs out of memory, and the kernel kills an agent's engine; that agent alone is lost, and no stream with it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from benchmarks.cell import Cell, CellProcess, running_cell
from tests.faults.checks import check_streams, settle
from tests.faults.conftest import FULL, Figures
from tests.faults.drive import disturb, figures_of
from tests.faults.memory_group import memory_group

NUM_STREAMS = 32 if FULL else 8
NUM_TOKENS = 800  # the kernel takes its time
SPEED = ("--null-speed", "10")
PROMPTS = [f"stream {index}" for index in range(NUM_STREAMS)]
LIMIT_BYTES = 256 << 20
# Takes what is left of the group, and keeps it.
HOG = f"kept = bytearray(b'x') * {2 * LIMIT_BYTES}"


@pytest.fixture(scope="module")
def cell() -> Iterator[Cell]:
    with running_cell(SPEED, SPEED) as made:
        yield made


async def run_out(cell: Cell, agent_id: str) -> None:
    await asyncio.to_thread(exhaust, cell.agents[agent_id])


def exhaust(agent: CellProcess) -> None:
    """The agent and a process without end share a limit; the kernel is told to prefer the engine when it kills."""
    with memory_group(f"dragoman-f9-{os.getpid()}") as group:
        family = agent.family()
        for process in family:
            group.add(process.pid)
        Path(f"/proc/{family[-1].pid}/oom_score_adj").write_text("1000")
        group.limit(LIMIT_BYTES)
        hog = subprocess.Popen([sys.executable, "-c", f"import sys; sys.stdin.read(); {HOG}"], stdin=subprocess.PIPE)
        assert hog.stdin is not None
        group.add(hog.pid)
        hog.stdin.close()
        try:
            agent.popen.wait(20)
            assert group.num_killed > 0, "nobody was killed for want of memory"
        finally:
            hog.kill()
            hog.wait()


@pytest.mark.parametrize("via", ["gateway", "client"])
async def test_f9_only_the_agent_without_memory_dies(cell: Cell, via: str, figures: Figures, num_runs: int) -> None:
    with memory_group(f"dragoman-f9-try-{os.getpid()}"):
        pass  # skips by name before anything is measured
    for _ in range(num_runs):
        before = cell.footprint()
        run = await disturb(cell, via, PROMPTS, NUM_TOKENS, partial(run_out, cell))
        assert cell.agents[run.agent_id].popen.returncode not in (0, None)
        others = [process for name, process in cell.agents.items() if name != run.agent_id]
        assert all(process.popen.poll() is None for process in [*others, cell.controller])
        figures.add("F9", f"{via}-{NUM_STREAMS}", **figures_of(run))
        check_streams(run.streams, run.expected)
        assert run.num_resumed >= len(run.victims) > 0
        cell.remove_agent(run.agent_id)
        cell.start_agent(run.agent_id, *SPEED)
        cell.wait_serving(2)
        settle(cell, before)
