"""F14: a disk that is full for logs and caches: serving goes on, one metric says so, and the log tells of it afterwards."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.cell import Cell, CellProcess, metric_sum, wait_until
from tests.faults.checks import check_streams, settle
from tests.faults.conftest import FULL, Figures
from tests.faults.drive import disturb, figures_of
from tests.faults.full_disk import Disk, small_disk
from tests.faults.injection import Injection

from dragoman import AsyncClient
from dragoman_agent.model.embedded import default_cache_dir, embedded_target

NUM_STREAMS = 32 if FULL else 8
NUM_TOKENS = 300
SPEED = ("--null-speed", "10", "--log-level", "info", "--drain-notice", "0")
PROMPTS = [f"stream {index}" for index in range(NUM_STREAMS)]
LOST = "dragoman_log_records_lost_total"
TOLD = "log records before this one were lost: No space left on device"
FIRST_UNKNOWN_XID, NUM_XIDS = 5000, 130  # only noted in the log, and many enough to fill its last page

Logged = tuple[Cell, Disk, dict[str, Injection]]


@pytest.fixture
def logged(tmp_path: Path) -> Iterator[Logged]:
    """A cell whose agents write their logs to a small disk."""
    with small_disk(tmp_path / "disk") as disk:
        cell = Cell()
        injections = {f"agent-{index}": Injection(tmp_path / str(index)) for index in range(2)}
        try:
            for agent_id, injection in injections.items():
                log = disk.path / agent_id
                cell.start_agent(agent_id, *SPEED, environ=injection.environ, log=log, wait=False)
            for agent_id in injections:
                cell.wait_agent(agent_id)
            cell.start_gateway()
            yield cell, disk, injections
        finally:
            cell.close()


async def test_f14_no_room_for_logs(logged: Logged, figures: Figures, num_runs: int) -> None:
    cell, disk, _ = logged
    for run in range(num_runs):
        await fill_once(logged, run, figures)
    disk.fill()
    leaving = cell.agents["agent-1"].popen
    leaving.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(leaving.wait, 20) == 0, "the agent ended badly for want of room for its log"


async def fill_once(logged: Logged, number: int, figures: Figures) -> None:
    cell, disk, injections = logged
    before = cell.footprint()
    lost = {agent_id: cell.agent_metric(agent_id, LOST) for agent_id in injections}
    xids = range(FIRST_UNKNOWN_XID, FIRST_UNKNOWN_XID + (number + 1) * NUM_XIDS)
    told_before = cell.agents["agent-0"].log_text().count(TOLD)

    async def fill(_: str) -> None:
        await asyncio.to_thread(disk.fill)
        for agent_id, injection in injections.items():
            injection.report_xids(*xids)
            await asyncio.to_thread(
                wait_until,
                lambda name=agent_id: cell.agent_metric(name, LOST) > lost[name],
                "a record is lost and counted",
            )

    run = await disturb(cell, "both", PROMPTS, NUM_TOKENS, fill, is_noticed=False)
    figures.add("F14", f"both-{NUM_STREAMS}", **figures_of(run))
    check_streams(run.streams, run.expected)
    assert run.num_resumed == 0, "a stream was moved for a log"
    disk.empty()
    for injection in injections.values():
        injection.report_xids(*xids, xids.stop, xids.stop + 1)
    log = cell.agents["agent-0"].log_text
    await asyncio.to_thread(wait_until, lambda: log().count(TOLD) == told_before + 1, "the log tells of what it lacks")
    settle(cell, before)


@pytest.mark.skipif(not FULL, reason="measures the CPU anew and compiles for it: make faults")
async def test_f14_no_room_for_caches(tmp_path: Path) -> None:
    """An agent that can keep neither profile nor compiled kernels nor times serves all the same, and says what it misses."""
    model = embedded_target(default_cache_dir(os.environ))
    if not model.exists():
        pytest.skip(f"the embedded model is not at {model}; run `dragoman models fetch embedded`")
    with small_disk(tmp_path / "disk", "64k") as disk:
        disk.fill()
        agent = CellProcess(
            "dragoman_agent.main", "--device", "cpu", "--model", str(model), "--open", "--port", "0",
            "--metrics-port", "0", "--cache-dir", str(disk.path),
        )  # fmt: skip
        try:
            serving = agent.wait_for("serving")
            agent.wait_for("ready")
            async with AsyncClient(agent=serving["grpc"]) as client:
                answer = await client.complete("Hello", max_output_tokens=8, ignore_eos=True)
            assert answer.usage.output_tokens == 8
            assert "the profile cannot be cached" in agent.log_text()
            assert metric_sum(serving["metrics"], LOST) == 0
            assert sorted(path.name for path in disk.path.rglob("*") if path.is_file()) == ["filler"], (
                "half a file is left"
            )
        finally:
            agent.close()
