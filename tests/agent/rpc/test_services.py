"""The services that say what an agent is and does, against a real one: hardware, telemetry, health."""

from __future__ import annotations

import asyncio
import json
import uuid
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tests.agent.conftest import AgentProcess
from tests.agent.rpc.refusals import error_of

from dragoman.channel import channel_options
from dragoman.v1 import (
    generation_service_pb2_grpc,
    hardware_service_pb2,
    hardware_service_pb2_grpc,
    telemetry_service_pb2,
    telemetry_service_pb2_grpc,
)
from dragoman.v1.generation_service_pb2 import GenerateRequest, StopCriteria


async def test_hardware_plan_and_decisions(channel: grpc.aio.Channel) -> None:
    stub = hardware_service_pb2_grpc.HardwareServiceStub(channel)
    hardware = await stub.GetHardware(hardware_service_pb2.GetHardwareRequest())
    assert hardware.profile.device.kind == "null"
    assert [candidate.chosen for candidate in hardware.candidates] == [True]
    plan = await stub.GetPlan(hardware_service_pb2.GetPlanRequest())
    assert plan.plan.model == "null" and len(plan.plan.digest) == 32
    watch = stub.WatchDecisions(hardware_service_pb2.WatchDecisionsRequest(subject="device"))
    assert (await watch.read()).decision.subject == "device"
    watch.cancel()
    ids = {decision.decision_id for decision in plan.decisions}
    assert all(field.decision_id in ids for field in plan.plan.fields)
    assert {"num_blocks", "page_size", "road"} <= {field.name for field in plan.plan.fields}
    limits = stub.WatchHardware(interval_request(hardware_service_pb2.WatchHardwareRequest(), 0.05))
    for _ in range(2):
        assert (await limits.read()).limits.free_memory_bytes > 0
    limits.cancel()


async def test_decisions_show_what_was_measured(paced_agent: AgentProcess) -> None:
    """The paced null device takes what its step model says, so what is measured must be near the prediction."""
    options = channel_options()
    async with grpc.aio.insecure_channel(paced_agent.address, options=options) as channel, asyncio.timeout(20):
        stub = hardware_service_pb2_grpc.HardwareServiceStub(channel)
        watch = stub.WatchDecisions(hardware_service_pb2.WatchDecisionsRequest())
        await generate(channel, max_tokens=40, text="long prompt " * 500)
        measured: dict[str, Any] = {}
        async for response in watch:
            if response.decision.HasField("measured"):
                measured[response.decision.subject] = response.decision
            if {"kv-blocks", "step-model", "prefill-rate"} <= measured.keys():
                break
        for subject in ("kv-blocks", "step-model", "prefill-rate"):
            assert measured[subject].measured == pytest.approx(measured[subject].predicted, rel=0.7), subject
        plan = await stub.GetPlan(hardware_service_pb2.GetPlanRequest())
        assert {d.subject for d in plan.decisions if d.HasField("measured")} >= measured.keys()
        telemetry = telemetry_service_pb2_grpc.TelemetryServiceStub(channel)
        request = telemetry_service_pb2.StreamMetricsRequest(name_prefixes=["dragoman_decision"])
        samples = (await telemetry.StreamMetrics(request).read()).samples
        shown = {s.labels["subject"] for s in samples if s.name == "dragoman_decision_measured"}
        assert shown >= measured.keys()


def interval_request(request: Any, seconds: float) -> Any:
    request.interval.FromNanoseconds(int(seconds * 1e9))
    return request


@pytest.mark.parametrize("seconds", [0, -1, 0.01, 100_000])
async def test_interval_that_is_none(channel: grpc.aio.Channel, seconds: float) -> None:
    hardware = hardware_service_pb2_grpc.HardwareServiceStub(channel)
    telemetry = telemetry_service_pb2_grpc.TelemetryServiceStub(channel)
    calls = [
        hardware.WatchHardware(interval_request(hardware_service_pb2.WatchHardwareRequest(), seconds)),
        telemetry.WatchLoad(interval_request(telemetry_service_pb2.WatchLoadRequest(), seconds)),
        telemetry.StreamMetrics(interval_request(telemetry_service_pb2.StreamMetricsRequest(), seconds)),
    ]
    for call in calls:
        assert (await error_of(call)).metadata["param"] == "interval"


async def generate(channel: grpc.aio.Channel, max_tokens: int = 5, text: str = "hello") -> None:
    stop = StopCriteria(max_output_tokens=max_tokens, ignore_eos=True)
    request = GenerateRequest(request_id=str(uuid.uuid4()), text=text, stop=stop)
    async for _ in generation_service_pb2_grpc.GenerationServiceStub(channel).Generate(request):
        pass


async def test_metrics_stream_is_the_registry(channel: grpc.aio.Channel) -> None:
    stub = telemetry_service_pb2_grpc.TelemetryServiceStub(channel)
    request = interval_request(telemetry_service_pb2.StreamMetricsRequest(name_prefixes=["dragoman_"]), 0.05)
    call = stub.StreamMetrics(request)

    def finished(response: telemetry_service_pb2.StreamMetricsResponse) -> float:
        return sum(
            s.counter
            for s in response.samples
            if s.name == "dragoman_requests_total" and s.labels["outcome"] == "finished"
        )

    before = finished(await call.read())
    await generate(channel)
    response = await call.read()
    while finished(response) == before:
        response = await call.read()
    assert finished(response) == before + 1
    ttft = next(s for s in response.samples if s.name == "dragoman_time_to_first_token_seconds")
    assert len(ttft.histogram.bucket_counts) == len(ttft.histogram.upper_bounds) + 1
    assert sum(ttft.histogram.bucket_counts) >= 1
    call.cancel()
    some = stub.StreamMetrics(telemetry_service_pb2.StreamMetricsRequest(name_prefixes=["dragoman_kv_blocks"]))
    assert {s.name for s in (await some.read()).samples} == {"dragoman_kv_blocks"}
    some.cancel()


async def test_trace_is_a_chrome_trace_of_the_steps(channel: grpc.aio.Channel) -> None:
    stub = telemetry_service_pb2_grpc.TelemetryServiceStub(channel)
    request = telemetry_service_pb2.CaptureTraceRequest()
    request.duration.FromMilliseconds(300)
    call = stub.CaptureTrace(request)

    async def load_it() -> None:
        await asyncio.sleep(0.1)
        await generate(channel, max_tokens=20)

    loading = asyncio.create_task(load_it())
    trace = json.loads(b"".join([part.chunk async for part in call]))
    await loading
    steps = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["tid"] == 1]
    assert sum(step["args"]["decode_tokens"] for step in steps) >= 19
    assert all(step["dur"] >= 0 and step["ts"] >= 0 for step in steps)
    assert {e["name"] for e in trace["traceEvents"] if e["ph"] == "C"} == {"sequences", "KV blocks"}


async def test_trace_requests_that_cannot_be(channel: grpc.aio.Channel) -> None:
    stub = telemetry_service_pb2_grpc.TelemetryServiceStub(channel)
    assert (await error_of(stub.CaptureTrace(telemetry_service_pb2.CaptureTraceRequest()))).metadata[
        "param"
    ] == "duration"
    long = telemetry_service_pb2.CaptureTraceRequest()
    long.duration.seconds = 61
    assert (await error_of(stub.CaptureTrace(long))).metadata["param"] == "duration"
    memory = telemetry_service_pb2.CaptureTraceRequest(kind=telemetry_service_pb2.TRACE_KIND_MEMORY)
    assert (await error_of(stub.CaptureTrace(memory))).reason_name == "unimplemented"


async def test_health_by_name(channel: grpc.aio.Channel) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    ready = (
        "", "readiness", "liveness", "dragoman.v1.GenerationService", "dragoman.v1.EmbeddingService",
        "dragoman.v1.KvTransferService",
    )  # fmt: skip
    always = ("dragoman.v1.TokenizerService", "dragoman.v1.HardwareService", "dragoman.v1.TelemetryService")
    for name in (*ready, *always):
        status = (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status
        assert status == health_pb2.HealthCheckResponse.SERVING, name
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Check(health_pb2.HealthCheckRequest(service="nobody"))
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND


async def test_reflection_lists_the_services(channel: grpc.aio.Channel) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    names = {service.name async for r in call for service in r.list_services_response.service}
    assert {"dragoman.v1.GenerationService", "dragoman.v1.KvTransferService", "grpc.health.v1.Health"} <= names


async def test_s13_pings_without_calls_are_no_flood(shared_agent: Any) -> None:
    options = [
        ("grpc.keepalive_time_ms", 1000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_time_between_pings_ms", 1000),
    ]
    async with grpc.aio.insecure_channel(shared_agent.address, options=options) as channel:
        await generate(channel)
        await asyncio.sleep(4.5)
        assert channel.get_state() is grpc.ChannelConnectivity.READY
        await generate(channel)
