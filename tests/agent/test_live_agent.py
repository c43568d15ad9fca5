"""Agents as processes with a fake NVML: a fault cordons or ends one, a throttle re-plans one for everybody who watches."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.agent.conftest import AgentProcess
from tests.fakes.nvml import FakeNvml

from dragoman.channel import channel_options
from dragoman.errors import DragomanError, from_rpc_error
from dragoman.v1 import (
    error_pb2,
    fleet_service_pb2,
    fleet_service_pb2_grpc,
    generation_service_pb2_grpc,
    hardware_service_pb2,
    hardware_service_pb2_grpc,
)
from dragoman.v1.generation_service_pb2 import GenerateRequest, GenerateResponse, StopCriteria

StartAgent = Callable[..., AgentProcess]
ROOT = Path(__file__).parents[2]


class Nvml:
    """The fake that an agent process reads."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "nvml.json"
        self.change()

    def change(self, **state: Any) -> None:
        """From now on the GPU shows this, and its defaults for the rest."""
        part = self._file.with_suffix(".part")
        part.write_text(json.dumps(state))
        part.rename(self._file)

    @property
    def environ(self) -> dict[str, str]:
        return {
            "DRAGOMAN_NVML_MODULE": "tests.fakes.nvml",
            "FAKE_NVML_STATE": str(self._file),
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", "")))),
        }


@pytest.fixture
def nvml(tmp_path: Path) -> Nvml:
    return Nvml(tmp_path)


def connect(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=channel_options())


def generate(channel: grpc.aio.Channel, name: str, tokens: int) -> Any:
    request = GenerateRequest(request_id=name, text="hello", stop=StopCriteria(max_output_tokens=tokens))
    return generation_service_pb2_grpc.GenerationServiceStub(channel).Generate(request)


async def watch(channel: grpc.aio.Channel) -> AsyncIterator[Any]:
    stub = hardware_service_pb2_grpc.HardwareServiceStub(channel)
    async for response in stub.WatchHardware(hardware_service_pb2.WatchHardwareRequest()):
        yield response.limits


async def event_with(channel: grpc.aio.Channel, words: str) -> str:
    """The first event that has these words."""
    async with asyncio.timeout(30):
        async for limits in watch(channel):
            if words in limits.event:
                return str(limits.event)
    raise AssertionError("the watch ended")


async def readiness(channel: grpc.aio.Channel) -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    return int((await stub.Check(health_pb2.HealthCheckRequest(service="readiness"))).status)


def metrics_of(agent: AgentProcess) -> str:
    with urllib.request.urlopen(f"http://{agent.metrics_address}/metrics", timeout=10) as page:
        return str(page.read().decode())


async def test_f11_a_double_bit_error_cordons_and_what_runs_ends_well(start_agent: StartAgent, nvml: Nvml) -> None:
    agent = start_agent("--null-speed", "20", environ=nvml.environ)
    async with connect(agent.address) as channel:
        stream = aiter(generate(channel, "under-way", 200))
        last: GenerateResponse = await anext(stream)
        told = asyncio.create_task(event_with(channel, "cordon"))
        await asyncio.sleep(0.2)
        nvml.change(xids=[48])
        assert "Xid 48" in await told
        assert "Xid 48" in (await asyncio.to_thread(agent.wait_for, "cordoned"))["message"]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(generate(channel, "new", 2)))
        error: DragomanError = from_rpc_error(caught.value)
        assert error.reason == error_pb2.ERROR_REASON_AGENT_DRAINING and "Xid 48" in error.message
        assert "nvidia-smi" in error.message, "the message says what to do"
        deadline = time.monotonic() + 10
        while await readiness(channel) != health_pb2.HealthCheckResponse.NOT_SERVING:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
        async for response in stream:
            last = response
        assert last.WhichOneof("event") == "finished", "what ran before has ended well"
    assert 'dragoman_device_faults_total{xid="48"} 1' in await asyncio.to_thread(metrics_of, agent)
    assert agent.process.poll() is None


async def test_f11_a_gpu_off_the_bus_ends_every_stream_and_the_agent_within_seconds(
    start_agent: StartAgent, nvml: Nvml
) -> None:
    agent = start_agent("--null-speed", "20", environ=nvml.environ)
    async with connect(agent.address) as channel:
        stream = generate(channel, "cut", 5000)
        last: GenerateResponse | None = None
        async for response in stream:
            if last is None:
                nvml.change(xids=[79])
            last = response
    assert last is not None
    assert last.WhichOneof("event") == "failed"
    assert (
        last.failed.error.reason == error_pb2.ERROR_REASON_DEVICE_FAULT
        and "fallen off the bus" in last.failed.error.message
    )
    assert "resume" in last.failed.error.message
    assert await asyncio.to_thread(agent.wait_exit, 10) == 1
    assert any("fallen off the bus" in event.get("message", "") for event in [agent.wait_for("fatal")])


class Controller:
    """A controller to register with."""

    def __init__(self) -> None:
        command = [sys.executable, "-P", "-m", "dragoman_controller.main", "--announce", "--port", "0"]
        self.process = subprocess.Popen(
            [*command, "--metrics-port", "0", "--log-level", "error"], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.address = str(json.loads(self.process.stdout.readline())["grpc"])

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(10)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def controller() -> Iterator[Controller]:
    started = Controller()
    yield started
    started.close()


async def prefill_rate(controller: Controller, wanted: Callable[[float], bool]) -> float:
    """The rate in the step model that the controller has of its one agent, once it is `wanted`."""
    async with asyncio.timeout(20), connect(controller.address) as channel:
        stub = fleet_service_pb2_grpc.FleetServiceStub(channel)
        async for change in stub.WatchFleet(fleet_service_pb2.WatchFleetRequest()):
            for member in change.changed:
                rate = member.agent.models[0].step_model.prefill_tokens_per_second
                if wanted(rate):
                    return float(rate)
    raise AssertionError("the watch ended")


async def test_a_throttle_replans_and_everybody_hears_of_it(
    start_agent: StartAgent, nvml: Nvml, controller: Controller, embedded_model_path: Path
) -> None:
    agent = start_agent("--controllers", controller.address, open=False, device="cpu", environ=nvml.environ)
    rate = await prefill_rate(controller, lambda rate: rate > 0)
    async with connect(agent.address) as channel:
        stub = hardware_service_pb2_grpc.HardwareServiceStub(channel)
        before = (await stub.GetPlan(hardware_service_pb2.GetPlanRequest())).plan
        told = asyncio.create_task(event_with(channel, "hw-thermal-slowdown"))
        await asyncio.sleep(1.5)  # the clock at work must have been seen
        nvml.change(sm_mhz=495, reasons=FakeNvml.HW_THERMAL)
        assert "495 MHz" in await told
        now = await stub.GetPlan(hardware_service_pb2.GetPlanRequest())
        assert now.plan.step_model.prefill_tokens_per_second == pytest.approx(rate / 4, rel=1e-3)
        assert now.plan.digest != before.digest, "a smaller step is another plan"
        assert [d.subject for d in now.decisions].count("replan") == 1
        assert await prefill_rate(controller, lambda known: known < rate / 2) == pytest.approx(rate / 4, rel=1e-3)
        told = asyncio.create_task(event_with(channel, "to 100%"))
        nvml.change()
        await told
        after = (await stub.GetPlan(hardware_service_pb2.GetPlanRequest())).plan
        assert after.digest == before.digest
    assert 'dragoman_live_events_total{quantity="clock"} 2' in await asyncio.to_thread(metrics_of, agent)
