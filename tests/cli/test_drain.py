"""`dragoman drain` on real agents under load: what runs is finished or handed over, nothing is lost, and it can be taken back."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from tests.gateway.stack import Stack, running_stack

from dragoman import AsyncClient
from dragoman.v1 import agent_pb2
from dragoman.v1.fleet_service_pb2 import FleetMember

NUM_STREAMS, NUM_TOKENS = 8, 1500


@pytest.fixture
def stack() -> Iterator[Stack]:
    agents = [("--null-speed", "2", "--drain-notice", "0.1")] * 2
    with running_stack(agents) as made:
        yield made


async def drain(stack: Stack, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "dragoman_cli.main", "drain", *arguments]
    return await asyncio.to_thread(
        subprocess.run, [*command, "--controller", stack.controller_address], capture_output=True, text=True, timeout=30
    )


async def read(client: AsyncClient, index: int) -> tuple[list[int], int]:
    stream = client.generate(f"prompt {index}", max_output_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    result = await stream.result()
    return list(result.choices[0].token_ids), result.num_resumes


async def test_what_still_runs_is_handed_over_and_nothing_is_lost(stack: Stack) -> None:
    async with AsyncClient(stack.controller_address) as client:
        calm = await asyncio.gather(*(read(client, index) for index in range(NUM_STREAMS)))
        await until(client, lambda now: not any(member.load.running_requests for member in now))
        running = [asyncio.create_task(read(client, index)) for index in range(NUM_STREAMS)]
        await until(client, lambda now: sum(member.load.running_requests for member in now) == NUM_STREAMS)
        reports = [report async for report in client.drain("agent-0", grace_seconds=0.3)]
        assert reports[-1].drained and not reports[0].drained
        seconds = [stream.predicted_remaining.ToTimedelta().total_seconds() for stream in reports[0].streams]
        assert 1 < max(seconds) < 60
        moved = await asyncio.gather(*running)
        assert [tokens for tokens, _ in moved] == [tokens for tokens, _ in calm]
        assert sum(resumes for _, resumes in moved) in range(1, len(seconds) + 1)
        assert await asyncio.to_thread(stack.agents[0].child.wait, 10) == 0
        assert [member.agent.agent_id for member in await client.agents()] == ["agent-1"]
        assert (await read(client, 1))[0] == calm[1][0]


async def test_a_drain_is_taken_back(stack: Stack) -> None:
    async with AsyncClient(stack.controller_address) as client:
        streams = [
            client.generate(f"prompt {i}", max_output_tokens=20_000, ignore_eos=True) for i in range(NUM_STREAMS)
        ]
        running = [asyncio.create_task(stream.result()) for stream in streams]
        await until(client, lambda now: all(member.load.running_requests for member in now))
        watching = asyncio.create_task(drain(stack, "agent-0", "--json"))
        await until(client, lambda now: "draining" in states(now))
        undone = await drain(stack, "agent-0", "--undo")
        assert (undone.returncode, undone.stdout) == (0, "agent-0 takes requests again\n"), undone.stderr
        watched = await watching
        assert "was taken back" in watched.stderr
        report = json.loads(watched.stdout.splitlines()[0])
        assert not report["drained"] and any(one["seconds"] > 1 for one in report["streams"])
        assert states(await client.agents()) == ["serving", "serving"]
        assert not any(task.done() for task in running) and not any(stream.num_resumes for stream in streams)
        again = await drain(stack, "agent-0", "--undo")
        assert again.returncode == 0, "undoing what is not under way changes nothing"
        missing = await drain(stack, "agent-9")
        assert missing.returncode != 0 and "members are 'agent-0', 'agent-1'" in missing.stderr
        assert stack.agents[0].child.poll() is None
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def until(client: AsyncClient, condition: Callable[[list[FleetMember]], bool]) -> None:
    for _ in range(500):
        if condition(await client.agents()):
            return
        await asyncio.sleep(0.02)
    raise AssertionError(await client.agents())


def states(members: list[FleetMember]) -> list[str]:
    names = [agent_pb2.AgentState.Name(member.state) for member in members]
    return [name.removeprefix("AGENT_STATE_").lower() for name in names]
