"""F13: a prompt that kills the engine takes two agents with it and no third, by gateway and by client."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import psutil
import pytest
from tests.gateway.stack import Stack, running_stack

from dragoman import AsyncClient, DragomanError
from dragoman.v1 import error_pb2

POISON = "the prompt that kills"


@pytest.fixture
def stack() -> Iterator[Stack]:
    with running_stack([("--null-speed", "3")] * 3) as made:
        yield made


async def kill_engines_that_run(client: AsyncClient, stack: Stack) -> list[str]:
    """Stands for the fault in a kernel: kills the engine wherever a request runs; the agents it hit."""
    killed: list[str] = []
    while True:
        for sample in await client.load():
            if sample.load.running_requests and sample.agent_id not in killed:
                agent = stack.agents[int(sample.agent_id.removeprefix("agent-"))]
                (engine,) = psutil.Process(agent.child.pid).children()
                engine.kill()
                killed.append(sample.agent_id)
        await asyncio.sleep(0.02)
        if len(killed) > 2:
            return killed


async def the_last(client: AsyncClient) -> str:
    """The one agent that is left once the dying ones have gone."""
    for _ in range(200):
        agents = await client.agents()
        if len(agents) == 1:
            return agents[0].agent.agent_id
        await asyncio.sleep(0.02)
    raise AssertionError(f"{len(agents)} agents are left")


async def test_f13_by_the_client(stack: Stack) -> None:
    async with AsyncClient(stack.controller_address) as client:
        killing = asyncio.create_task(kill_engines_that_run(client, stack))
        with pytest.raises(DragomanError) as raised:
            await client.complete(POISON, max_output_tokens=20_000, ignore_eos=True)
        killing.cancel()
        assert raised.value.reason == error_pb2.ERROR_REASON_PROMPT_QUARANTINED
        assert "2 engines were lost" in raised.value.message
        with pytest.raises(DragomanError, match="2 engines were lost"):
            await client.complete(POISON, max_output_tokens=5)
        left = await the_last(client)
        assert (await client.complete("another prompt", max_output_tokens=5)).agent_id == left
