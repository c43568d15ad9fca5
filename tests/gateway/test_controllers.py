"""Several controllers of one cell: gateway and client go on when the one they ask dies, drains, or never was there."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator

import httpx
import pytest
from tests.gateway.stack import Process, start_agent, start_controller, start_gateway, wait_until_ready

from dragoman import AsyncClient, RetryPolicy
from dragoman.v1 import agent_pb2

DEAD = "127.0.0.1:1"
BODY = {"prompt": "x", "max_tokens": 3, "ignore_eos": True}


class Cell:
    """Two controllers, an agent that was told of the first only, and a gateway that knows both."""

    def __init__(self) -> None:
        (self.one, first), (self.two, second) = start_controller(), start_controller()
        self.addresses = first, second
        self.agent = start_agent(f"{first},{second}", "--agent-id", "a")
        self.agent.wait_for("ready")
        self.gateway, self.url = start_gateway(f"{DEAD},{first},{second}")
        wait_until_ready(self.url)

    @property
    def processes(self) -> list[Process]:
        return [self.gateway, self.agent, self.one, self.two]


@pytest.fixture
def cell() -> Iterator[Cell]:
    made = Cell()
    yield made
    for process in made.processes:
        process.ask_to_stop()
    for process in made.processes:
        process.stop()


def ask(cell: Cell) -> httpx.Response:
    return httpx.post(f"{cell.url}/v1/completions", json=BODY, timeout=20)


def test_a_killed_controller_costs_no_request(cell: Cell) -> None:
    assert ask(cell).status_code == 200
    cell.one.child.kill()
    cell.one.child.wait()
    began = time.monotonic()
    for _ in range(5):
        assert ask(cell).status_code == 200
    assert time.monotonic() - began < 5
    # The cell does not need the first one ever again: another gateway, that tries it first.
    gateway, url = start_gateway(",".join(cell.addresses))
    try:
        wait_until_ready(url)
        assert httpx.post(f"{url}/v1/completions", json=BODY, timeout=20).status_code == 200
    finally:
        gateway.stop()


def test_a_draining_controller_sends_nobody_away(cell: Cell) -> None:
    assert ask(cell).status_code == 200
    cell.one.ask_to_stop(signal.SIGTERM)
    for _ in range(10):
        assert ask(cell).status_code == 200
    assert cell.one.child.wait(10) == 0
    assert ask(cell).status_code == 200


async def test_two_controllers_that_grant_one_slot_are_set_right_by_the_agent() -> None:
    (one, first), (two, second) = start_controller(), start_controller()
    agent = start_agent(
        f"{first},{second}", "--max-num-seqs", "1", "--max-num-waiting", "0", "--null-speed", "1", "--agent-id", "a"
    )
    try:
        agent.wait_for("ready")
        retry = RetryPolicy(max_attempts=40)  # one slot is fought over by twelve
        async with AsyncClient(first, retry=retry) as left, AsyncClient(second, retry=retry) as right:
            for client in (left, right):
                for _ in range(100):
                    if [member.state for member in await client.agents()] == [agent_pb2.AGENT_STATE_SERVING]:
                        break
                    await asyncio.sleep(0.05)
            asked = [client.complete("x", max_output_tokens=30, ignore_eos=True) for client in (left, right) * 6]
            results = await asyncio.gather(*asked)
            assert [result.usage.output_tokens for result in results] == [30] * 12
            assert not any(result.num_resumes for result in results)
            await asyncio.sleep(0.5)
            for client in (left, right):
                (member,) = await client.agents()
                assert (member.granted_requests, member.load.running_requests) == (0, 0)
    finally:
        for process in (agent, one, two):
            process.ask_to_stop()
        for process in (agent, one, two):
            process.stop()


async def test_the_client_asks_the_next_controller(cell: Cell) -> None:
    first, second = cell.addresses
    async with AsyncClient(f"{DEAD}, {first},{second}") as client:
        assert (await client.complete("x", max_output_tokens=3)).usage.output_tokens == 3
        cell.one.child.kill()
        await asyncio.to_thread(cell.one.child.wait)
        assert (await client.complete("x", max_output_tokens=3)).usage.output_tokens == 3
        assert [member.agent.agent_id for member in await client.agents()] == ["a"]
        assert (await client.quote("x", max_output_tokens=3)).agent_id == "a"
    async with AsyncClient(f"{DEAD},127.0.0.1:2") as client:
        with pytest.raises(Exception, match="cannot reach the controller"):
            await client.agents()
