"""F6: connections that are reset, fall silent, are slow or lose segments: the stall has a bound, and nothing is lost or doubled."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from benchmarks.cell import Cell
from tests.faults.checks import check_streams, settle, stalls
from tests.faults.conftest import FULL, Figures
from tests.faults.drive import disturb, figures_of
from tests.faults.proxy import Proxy, proxies

NUM_STREAMS = 32 if FULL else 8
NUM_TOKENS = 300
SPEED = ("--null-speed", "10")
PROMPTS = [f"stream {index}" for index in range(NUM_STREAMS)]
VIAS = ("gateway", "client") if FULL else ("client",)
# A silent peer is noticed by keepalive in 4.5 + 2 s of the last data; then comes a resume, and the machine's own delay.
SILENT_STALL_SECONDS = 9.5
RESET_STALL_SECONDS = 2.0
SLOW_STALL_SECONDS = 3.0

Proxied = tuple[Cell, dict[str, Proxy]]


@pytest.fixture(scope="module")
def proxied() -> Iterator[Proxied]:
    """A cell whose agents are dialled through relays."""
    with proxies(2) as made:
        cell = Cell()
        relays = {f"agent-{index}": proxy for index, proxy in enumerate(made)}
        try:
            for agent_id, proxy in relays.items():
                cell.start_agent(agent_id, *SPEED, "--advertise", proxy.address, wait=False)
            for agent_id, proxy in relays.items():
                cell.wait_agent(agent_id)
                proxy.target = cell.agent_address[agent_id]
            cell.start_gateway()
            yield cell, relays
        finally:
            cell.close()


@pytest.mark.parametrize("via", VIAS)
async def test_f6_reset_connections(proxied: Proxied, via: str, figures: Figures, num_runs: int) -> None:
    cell, relays = proxied

    async def reset(agent_id: str) -> None:
        relays[agent_id].reset()

    for _ in range(num_runs):
        before, num_reset = cell.footprint(), sum(proxy.num_reset for proxy in relays.values())
        run = await disturb(cell, via, PROMPTS, NUM_TOKENS, reset, is_noticed=False)
        assert sum(proxy.num_reset for proxy in relays.values()) > num_reset, "there was no connection to reset"
        figures.add("F6", f"reset-{via}-{NUM_STREAMS}", **figures_of(run))
        check_streams(run.streams, run.expected)
        assert run.num_resumed >= len(run.victims) > 0
        assert stalls(run.victims)["stall_p99"] <= RESET_STALL_SECONDS
        settle(cell, before)


@pytest.mark.skipif(not FULL, reason="takes long: make faults")
@pytest.mark.parametrize("via", VIAS)
async def test_f6_half_open_connections(proxied: Proxied, via: str, figures: Figures, num_runs: int) -> None:
    """The agent goes on to be heard by the controller; only its streams fall silent."""
    cell, relays = proxied

    async def fall_silent(agent_id: str) -> None:
        relays[agent_id].fall_silent()

    for _ in range(num_runs):
        before = cell.footprint()
        try:
            run = await disturb(cell, via, PROMPTS, NUM_TOKENS, fall_silent, is_noticed=False)
        finally:
            for proxy in relays.values():
                proxy.speak()
        figures.add("F6", f"half-open-{via}-{NUM_STREAMS}", **figures_of(run))
        check_streams(run.streams, run.expected)
        assert run.num_resumed >= len(run.victims) > 0
        stall = stalls(run.victims)["stall_p50"]
        assert stall > 1.0, "the streams did not fall silent"
        assert stalls(run.victims)["stall_p99"] <= SILENT_STALL_SECONDS
        settle(cell, before)


@pytest.mark.skipif(not FULL, reason="takes long: make faults")
@pytest.mark.parametrize("via", VIAS)
async def test_f6_a_slow_network_that_loses_is_only_slow(
    proxied: Proxied, via: str, figures: Figures, num_runs: int
) -> None:
    """50 ms each way and 1 % of the segments, as a resend after the timeout: no stream is given up for it."""
    cell, relays = proxied

    async def slow_down(_: str) -> None:
        for proxy in relays.values():
            proxy.delay_seconds, proxy.loss_share = 0.05, 0.01

    for _ in range(num_runs):
        before = cell.footprint()
        num_lost = sum(proxy.num_lost for proxy in relays.values())
        try:
            run = await disturb(cell, via, PROMPTS, NUM_TOKENS, slow_down, is_noticed=False)
        finally:
            for proxy in relays.values():
                proxy.delay_seconds = proxy.loss_share = 0.0
        assert sum(proxy.num_lost for proxy in relays.values()) > num_lost, "no segment was lost"
        figures.add("F6", f"delay-loss-{via}-{NUM_STREAMS}", **figures_of(run))
        check_streams(run.streams, run.expected)
        assert run.num_resumed == 0, "a slow stream was moved"
        assert stalls(run.victims)["stall_p99"] <= SLOW_STALL_SECONDS
        settle(cell, before)
