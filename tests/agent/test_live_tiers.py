"""KV tiers of agents as processes: kill -9 in the middle of writes, a restart, and what the metrics then say."""

from __future__ import annotations

import asyncio
import random
import signal
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import grpc
from benchmarks.cell import Cell, wait_until
from benchmarks.prefetch import Bench
from tests.agent.conftest import AgentProcess
from tests.faults.full_disk import small_disk

from dragoman.channel import channel_options
from dragoman.prefix_hash import prefix_hashes, root_hash, wire_hash
from dragoman.v1 import generation_service_pb2_grpc, prefetch_service_pb2, prefetch_service_pb2_grpc
from dragoman.v1.generation_service_pb2 import GenerateRequest, SamplingParameters, StopCriteria
from dragoman.v1.tokens_pb2 import TokenIds

StartAgent = Callable[..., AgentProcess]
HITS = "dragoman_kv_tier_hit_blocks_total"
PROMPT = random.Random(5).choices(range(32, 127), k=16_000)


async def generate(agent: AgentProcess) -> tuple[list[int], int]:
    """The tokens after PROMPT, and how many of its own were cached."""
    request = GenerateRequest(
        request_id="r",
        token_ids=TokenIds(ids=PROMPT),
        stop=StopCriteria(max_output_tokens=8),
        sampling=SamplingParameters(temperature=0.0),
    )
    tokens: list[int] = []
    async with grpc.aio.insecure_channel(agent.address, options=channel_options()) as channel:
        async for response in generation_service_pb2_grpc.GenerationServiceStub(channel).Generate(request):
            tokens.extend(response.delta.token_ids)
            if response.HasField("finished"):
                return tokens, response.finished.usage.cached_tokens
    raise AssertionError("the stream ended without its end")


def wait_for(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def num_files(folder: Path) -> int:
    """Whole blocks on disk."""
    return len(list(folder.glob("kv/*.kvblock")))


def metric(agent: AgentProcess, name: str) -> float:
    with urllib.request.urlopen(f"http://{agent.metrics_address}/metrics", timeout=5) as reply:
        lines = reply.read().decode().splitlines()
    return next((float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name)), 0.0)


async def test_a_killed_agents_blocks_serve_the_next(start_agent: StartAgent, tmp_path: Path) -> None:
    flags = ("--kv-disk-dir", str(tmp_path / "kv"), "--kv-disk-bytes", "100000000")
    first = start_agent(*flags)
    expected, cached = await generate(first)
    assert cached == 0
    wait_for(lambda: num_files(tmp_path) >= 20)
    engine = first.engine
    for process in (engine, first.process):
        process.send_signal(signal.SIGKILL)
    engine.wait(10)
    num_written = num_files(tmp_path)
    assert num_written < 249, "it was killed in the middle"
    second = start_agent(*flags)
    tokens, cached = await generate(second)
    assert tokens == expected and cached == num_written * 64, "parents were written first, so all of it is a prefix"
    wait_for(lambda: metric(second, 'dragoman_kv_tier_hit_blocks_total{tier="disk"}') == num_written)
    assert metric(second, 'dragoman_kv_tier_bytes_total{direction="in",tier="disk"}') == num_written * 64 * 12
    third = start_agent(*flags, ready=False)
    assert third.wait_exit(30) != 0
    log = "".join(third.log)
    assert "give each agent a --kv-disk-dir of its own" in log and "Traceback" not in log


async def test_a_disk_that_is_full_turns_the_tier_off_and_nothing_else(start_agent: StartAgent, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        agent = start_agent("--kv-disk-dir", str(disk.path / "kv"), "--kv-disk-bytes", "100000000")
        disk.fill()
        tokens, _ = await generate(agent)
        wait_for(lambda: any("the disk tier of KV blocks is off" in line for line in agent.log))
        again, cached = await generate(agent)
        assert again == tokens and cached > 0, "the device's own cache serves on"
        assert sum("KV blocks is off" in line for line in agent.log) == 1
        assert metric(agent, 'dragoman_kv_tier_blocks{state="held",tier="disk"}') == 0


async def test_a_hint_brings_up_what_a_restarted_agent_has_on_disk(tmp_path: Path) -> None:
    flags = ("--kv-disk-dir", str(tmp_path / "kv"), "--kv-disk-bytes", "100000000", "--drain-notice", "0")
    prompt = PROMPT[:4100]
    cell = Cell()
    try:
        await asyncio.to_thread(cell.start_agent, "agent-0", *flags)
        async with grpc.aio.insecure_channel(cell.controller_address, options=channel_options()) as channel:
            bench = Bench(channel, "", 0)
            await bench.wait_for_agents(1)
            await bench.run(prompt, 4)
            await asyncio.to_thread(wait_until, lambda: num_files(tmp_path) == 64, "all of it is on disk")
            await asyncio.to_thread(cell.remove_agent, "agent-0")
            await asyncio.to_thread(cell.start_agent, "agent-0", *flags)
            await bench.wait_for_agents(1)
            hashes = prefix_hashes(root_hash(bench.digest), prompt)
            request = prefetch_service_pb2.HintPrefixRequest(
                model=bench.model, block_hashes=[wire_hash(one) for one in hashes]
            )
            stub = prefetch_service_pb2_grpc.PrefetchServiceStub(channel)
            while not (answer := await stub.HintPrefix(request)).accepted:
                assert "no live agent" in answer.reason, answer.reason  # its events are on their way
                await asyncio.sleep(0.05)
            await asyncio.to_thread(
                wait_until, lambda: cell.agent_metric("agent-0", HITS) == 64, "the blocks are on the device"
            )
            _, finished = await bench.run(prompt, 4)
            assert finished.usage.cached_tokens == 4096
            await asyncio.to_thread(
                wait_until, lambda: cell.controller_metric("dragoman_hints_total", outcome="used") == 1, "it was used"
            )
            await bench.close()
    finally:
        await asyncio.to_thread(cell.close)
