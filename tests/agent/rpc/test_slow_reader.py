"""A reader that stops: a real engine and a real gRPC server in this process; only the engine's 60 s are not waited for."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from dragoman.channel import channel_options
from dragoman.errors import from_rpc_error
from dragoman.v1 import error_pb2, generation_service_pb2_grpc
from dragoman.v1.generation_service_pb2 import GenerateRequest, SamplingParameters, StopCriteria
from dragoman_agent.agent import Agent
from dragoman_agent.config import AgentSettings
from dragoman_agent.engine.messages import Failed
from dragoman_agent.rpc import streaming
from dragoman_agent.rpc.gate import Phase
from dragoman_agent.startup import prepare


@pytest.fixture
async def agent() -> Any:
    settings = AgentSettings(device="null", open=True, port=0, metrics_port=0)
    with prepare(settings) as prepared:
        made = Agent(settings, prepared)
        running = asyncio.create_task(made.run())
        try:
            await until_serving(made)
            yield made
        finally:
            made._finish(0)
            assert await running == 0


async def until_serving(agent: Agent) -> None:
    for _ in range(1500):
        if agent._gate.phase is Phase.SERVING:
            return
        await asyncio.sleep(0.02)
    raise AssertionError("the engine is not ready after 30 s")


async def test_call_of_a_lost_reader_is_ended(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "LAST_WRITE_SECONDS", 0.2)
    async with grpc.aio.insecure_channel(agent._grpc_address, options=channel_options()) as channel:
        # Log-probabilities make messages of half a kilobyte, so that the window is full after some hundred tokens.
        request = GenerateRequest(
            request_id="slow",
            text="x",
            stop=StopCriteria(max_output_tokens=30_000),
            sampling=SamplingParameters(num_logprobs=20),
        )
        call = generation_service_pb2_grpc.GenerationServiceStub(channel).Generate(request)
        await call.read()
        await until_stalled(agent)
        live = agent._engine.live["slow"]
        live.sink.deliver(Failed("slow", int(error_pb2.ERROR_REASON_CREDIT_TIMEOUT), "took nothing for 60 s"))
        await asyncio.sleep(0.5)
        assert agent._engine.live.get("slow") is None or agent._engine.live["slow"].cancelled
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async with asyncio.timeout(5):
                while await call.read() is not grpc.aio.EOF:
                    pass
        assert from_rpc_error(caught.value).reason_name == "credit_timeout"
        assert caught.value.code() == grpc.StatusCode.ABORTED


async def until_stalled(agent: Agent) -> None:
    """Until no token comes any more: the window is full and the credit used up."""
    seen, num_same = -1, 0
    while num_same < 4:
        await asyncio.sleep(0.3)
        now = agent._engine.live["slow"].num_emitted
        num_same = num_same + 1 if now == seen else 0
        seen = now
