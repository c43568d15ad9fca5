"""TelemetryService and PrefetchService over the wire."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from google.protobuf import duration_pb2

from dragoman.errors import from_rpc_error
from dragoman.v1 import agent_pb2, error_pb2, prefetch_service_pb2
from dragoman.v1 import telemetry_service_pb2 as pb


async def test_metrics_come_at_once_and_again_filtered_by_name(clients: Any) -> None:
    request = pb.StreamMetricsRequest(
        interval=duration_pb2.Duration(nanos=20_000_000), name_prefixes=["dragoman_build"]
    )
    call = clients.telemetry.StreamMetrics(request)
    for _ in range(2):
        samples = (await asyncio.wait_for(call.read(), 5)).samples
        assert [sample.name for sample in samples] == ["dragoman_build_info"]
        assert samples[0].gauge == 1 and samples[0].labels["version"]
    call.cancel()


async def test_load_is_shown_for_each_agent(clients: Any, join: Any) -> None:
    agent = await join("agent-a")
    agent.load = agent_pb2.AgentLoad(running_requests=2)
    await asyncio.sleep(0.15)
    call = clients.telemetry.WatchLoad(pb.WatchLoadRequest())
    (sample,) = (await asyncio.wait_for(call.read(), 5)).agents
    assert (sample.agent_id, sample.state) == ("agent-a", agent_pb2.AGENT_STATE_SERVING)
    assert sample.load.running_requests == 2 and sample.load.HasField("age")
    call.cancel()


async def test_a_trace_is_refused_with_where_to_ask(clients: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await clients.telemetry.CaptureTrace(pb.CaptureTraceRequest()).read()
    error = from_rpc_error(raised.value)
    assert error.grpc_code is grpc.StatusCode.UNIMPLEMENTED and "ask an agent" in error.message


async def test_an_interval_of_nothing_is_refused(clients: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await clients.telemetry.WatchLoad(pb.WatchLoadRequest(interval=duration_pb2.Duration())).read()
    assert from_rpc_error(raised.value).reason == error_pb2.ERROR_REASON_INVALID_REQUEST


async def test_a_hint_is_turned_down_with_the_true_reason(clients: Any, join: Any, server: Any) -> None:
    async def hint(model: str, hashes: list[int]) -> str:
        request = prefetch_service_pb2.HintPrefixRequest(model=model, block_hashes=hashes)
        answer = await clients.prefetch.HintPrefix(request, timeout=5)
        assert not answer.accepted
        return answer.reason

    assert "no live agent serves" in await hint("tiny", [1])
    await join("agent-a")
    await join("agent-bb")
    assert "no block hashes" in await hint("tiny", [])
    assert "nothing to fetch" in await hint("tiny", [1, 2])
    server.cell.apply_kv_events(server.cell.fleet.get("agent-a"), 1, [1, 2], (), snapshot=True)
    assert "on their device only" in await hint("tiny", [1, 2])
    server.cell.apply_kv_events(server.cell.fleet.get("agent-bb"), 1, [1, 2], (), snapshot=True)
    assert "holds the whole prefix" in await hint("tiny", [1, 2])
