"""KV tiers of agents as processes: kill -9 in the middle of writes, a restart, and what the metrics then say."""

from __future__ import annotations

import random
import signal
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import grpc
from tests.agent.conftest import AgentProcess

from dragoman.channel import channel_options
from dragoman.v1 import generation_service_pb2_grpc
from dragoman.v1.generation_service_pb2 import GenerateRequest, SamplingParameters, StopCriteria
from dragoman.v1.tokens_pb2 import TokenIds

StartAgent = Callable[..., AgentProcess]
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


async def test_a_directory_in_use_is_refused_in_one_line(start_agent: StartAgent, tmp_path: Path) -> None:
    flags = ("--kv-disk-dir", str(tmp_path), "--kv-disk-bytes", "100000000")
    start_agent(*flags)
    second = start_agent(*flags, ready=False)
    assert second.wait_exit(30) != 0
    log = "".join(second.log)
    assert "give each agent a --kv-disk-dir of its own" in log and "Traceback" not in log
