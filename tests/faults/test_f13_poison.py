"""F13: a prompt that kills the engine takes two agents with it and no third, by the gateway."""

from __future__ import annotations

import asyncio

import httpx
import psutil
from tests.faults.conftest import Figures
from tests.gateway.stack import Stack, running_stack

from dragoman import AsyncClient

POISON = "the prompt that kills"


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


async def test_f13_by_the_gateway(figures: Figures, num_runs: int) -> None:
    for _ in range(num_runs):
        with running_stack([("--null-speed", "3")] * 3) as stack:
            await poison_once(stack, figures)


async def poison_once(stack: Stack, figures: Figures) -> None:
    async with AsyncClient(stack.controller_address) as client, httpx.AsyncClient(base_url=stack.url) as http:
        killing = asyncio.create_task(kill_engines_that_run(client, stack))
        body = {"prompt": POISON, "max_tokens": 20_000, "ignore_eos": True}
        reply = await http.post("/v1/completions", json=body, timeout=60)
        killing.cancel()
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "prompt_quarantined")
        await the_last(client)
        figures.add("F13", "gateway", agents_lost=len(stack.agents) - 1, agents_left=1)
        reply = await http.post("/v1/completions", json={"prompt": "another", "max_tokens": 5}, timeout=20)
        assert reply.status_code == 200
