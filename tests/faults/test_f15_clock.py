"""F15: wall clocks an hour apart, and clocks that jump by an hour under load: tickets, leases and streams do not notice.

A library that is preloaded shifts the wall clock of one process for all that runs in it, gRPC's core included.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.cell import Cell
from benchmarks.streams import Stream
from tests.faults.checks import check_streams, num_duplicated, settle
from tests.faults.conftest import FULL, Figures
from tests.faults.drive import disturb, figures_of, readers_of
from tests.needs import need

from dragoman.v1 import agent_pb2

NUM_STREAMS = 32 if FULL else 8
NUM_TOKENS = 300
SPEED = ("--null-speed", "10", "--log-level", "warning")
PROMPTS = [f"stream {index}" for index in range(NUM_STREAMS)]
HOUR = 3600


class Clock:
    """The wall clock of some processes."""

    def __init__(self, library: Path, file: Path, shift: int) -> None:
        self._file = file
        file.write_bytes(bytes(8))
        self.environ = {"LD_PRELOAD": str(library), "CLOCK_SHIFT": str(file)}
        self.shift(shift)

    def shift(self, seconds: int) -> None:
        """From now on it is off by this."""
        descriptor = os.open(self._file, os.O_WRONLY)
        os.pwrite(descriptor, seconds.to_bytes(8, "little", signed=True), 0)
        os.close(descriptor)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("clock") / "clock_shim.so"
    source = Path(__file__).with_name("clock_shim.c")
    subprocess.run(
        [need("cc"), "-shared", "-fPIC", "-O2", "-o", str(made), str(source), "-ldl"], check=True, timeout=60
    )
    return made


@pytest.fixture(scope="module")
def clocks(library: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Clock]:
    """Of the controller, an hour ahead, and of two agents, one an hour behind."""
    folder = tmp_path_factory.mktemp("clocks")
    return [Clock(library, folder / str(index), shift) for index, shift in enumerate((HOUR, -HOUR, 0))]


@pytest.fixture(scope="module")
def cell(clocks: list[Clock]) -> Iterator[Cell]:
    made = Cell(clocks[0].environ)
    try:
        for index, clock in enumerate(clocks[1:]):
            made.start_agent(f"agent-{index}", *SPEED, environ=clock.environ, wait=False)
        for agent_id in list(made.agents):
            made.wait_agent(agent_id)
        made.start_gateway()
        yield made
    finally:
        made.close()


def test_the_clock_of_the_process_is_shifted_and_its_monotonic_one_is_not(clocks: list[Clock]) -> None:
    code = "import time; print(time.time(), time.monotonic())"
    shown = subprocess.check_output(
        [sys.executable, "-c", code], env={**os.environ, **clocks[1].environ}, text=True, timeout=30
    )
    wall, monotonic = map(float, shown.split())
    assert abs(wall - (time.time() - HOUR)) < 30 and abs(monotonic - time.monotonic()) < 30


async def test_f15_clocks_apart_and_clocks_that_jump(
    cell: Cell, clocks: list[Clock], figures: Figures, num_runs: int
) -> None:
    """Jumps ahead and back by hours, of the agent with most streams and of the controller, which hold the others' leases."""
    for process in [cell.controller, *cell.agents.values()]:
        for member in process.family():
            assert any("clock_shim" in mapped.path for mapped in member.memory_maps()), (
                f"{process.name} has another clock"
            )
    jumps = iter([2 * HOUR, -2 * HOUR] * num_runs)

    async def jump(agent_id: str) -> None:
        shift = next(jumps)
        clocks[1 + int(agent_id[-1])].shift(shift)
        clocks[0].shift(-shift)

    for _ in range(2 * num_runs if FULL else 1):
        before = cell.footprint()
        run = await disturb(cell, "both", PROMPTS, NUM_TOKENS, jump, is_noticed=False)
        figures.add("F15", f"both-{NUM_STREAMS}", **figures_of(run))
        check_streams(run.streams, run.expected)
        assert run.num_resumed == 0, "a stream was moved for nothing"
        async with readers_of(cell) as readers:
            after = [Stream(prompt) for prompt in PROMPTS]
            await readers.follow("both", after, NUM_TOKENS)
            check_streams(after, run.expected)
            assert num_duplicated(after, run.expected) == 0
            states = {agent.agent.agent_id: agent.state for agent in await readers.client.agents()}
        assert set(states.values()) == {agent_pb2.AGENT_STATE_SERVING} and len(states) == 2
        settle(cell, before)
    expired = sum(cell.agent_metric(agent_id, "dragoman_tickets_total", result="expired") for agent_id in cell.agents)
    assert expired == 0, "a ticket was held against a wall clock"
