"""A controller under test, and agents that speak the real protocol to it."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import grpc
import pytest

from dragoman.channel import channel_options
from dragoman.step_model import StepModel
from dragoman.v1 import (
    admission_service_pb2_grpc,
    agent_pb2,
    agent_registry_service_pb2,
    agent_registry_service_pb2_grpc,
    fleet_service_pb2_grpc,
    policy_service_pb2_grpc,
    prefetch_service_pb2_grpc,
    telemetry_service_pb2_grpc,
)
from dragoman_controller.admission import Answer
from dragoman_controller.cell import Cell
from dragoman_controller.config import ControllerSettings
from dragoman_controller.fleet import AgentState, Load, Member
from dragoman_controller.policy import Policy
from dragoman_controller.quote import Judgement, Quote
from dragoman_controller.requests import AdmissionRequest, Priority
from dragoman_controller.rpc.convert import agent_spec
from dragoman_controller.server import ControllerServer
from dragoman_controller.tickets import CellKey

STEPS = StepModel(
    (1, 8, 64), (0, 1024, 8192), (0.002, 0.003, 0.01, 0.003, 0.006, 0.03, 0.01, 0.03, 0.2), 20_000.0, 0.004
)


def agent_message(
    agent_id: str = "agent-a",
    *,
    model: str = "tiny",
    max_running: int = 4,
    max_waiting: int = 2,
    max_context: int = 4096,
    steps: StepModel = STEPS,
    plan_digest: bytes = b"p" * 32,
    address: str = "",
) -> agent_pb2.Agent:
    """An agent as it registers."""
    return agent_pb2.Agent(
        agent_id=agent_id,
        data_address=address or f"127.0.0.1:{5000 + len(agent_id)}",
        version="0.1.0",
        models=[
            agent_pb2.ServedModel(
                model=model,
                model_digest=b"d" * 32,
                max_context_tokens=max_context,
                kv_block_tokens=16,
                kv_block_count=4096,
                max_running_requests=max_running,
                max_waiting_requests=max_waiting,
                step_model=steps.to_proto(),
                plan_digest=plan_digest,
            )
        ],
    )


@dataclass
class Clients:
    """Stubs of every service of one controller."""

    channel: grpc.aio.Channel
    admission: Any = field(init=False)
    registry: Any = field(init=False)
    fleet: Any = field(init=False)
    policy: Any = field(init=False)
    prefetch: Any = field(init=False)
    telemetry: Any = field(init=False)

    def __post_init__(self) -> None:
        self.admission = admission_service_pb2_grpc.AdmissionServiceStub(self.channel)
        self.registry = agent_registry_service_pb2_grpc.AgentRegistryServiceStub(self.channel)
        self.fleet = fleet_service_pb2_grpc.FleetServiceStub(self.channel)
        self.policy = policy_service_pb2_grpc.PolicyServiceStub(self.channel)
        self.prefetch = prefetch_service_pb2_grpc.PrefetchServiceStub(self.channel)
        self.telemetry = telemetry_service_pb2_grpc.TelemetryServiceStub(self.channel)


class ProtocolAgent:
    """Speaks the agent's side of the registry: registers, beats, reports. Holds no model."""

    def __init__(self, registry: Any, message: agent_pb2.Agent, beat_seconds: float = 0.05) -> None:
        self.registry = registry
        self.message = message
        self.epoch = secrets.randbits(63) | 1
        self.beat_seconds = beat_seconds
        self.state = agent_pb2.AGENT_STATE_SERVING
        self.load = agent_pb2.AgentLoad()
        self.outcomes: list[agent_registry_service_pb2.RequestOutcome] = []
        self.results: list[agent_registry_service_pb2.CommandResult] = []
        self.commands: list[agent_registry_service_pb2.Command] = []
        self.policy_revision = 0
        self.num_answers = 0
        self.registration: Any = None
        self._task: asyncio.Task[None] | None = None

    async def register(self) -> agent_registry_service_pb2.RegisterAgentResponse:
        self.registration = await self.registry.RegisterAgent(
            agent_registry_service_pb2.RegisterAgentRequest(
                agent=self.message, epoch=self.epoch, agent_monotonic_ms=self.monotonic_ms()
            ),
            timeout=5,
        )
        return self.registration

    async def join(self) -> ProtocolAgent:
        await self.register()
        before = self.num_answers
        self._task = asyncio.create_task(self._beat())
        await eventually(lambda: self.num_answers > before)
        return self

    @staticmethod
    def monotonic_ms() -> int:
        return time.monotonic_ns() // 1_000_000 + 7_000_000

    async def _beat(self) -> None:
        async def beats() -> AsyncIterator[agent_registry_service_pb2.HeartbeatRequest]:
            while True:
                outcomes, self.outcomes = self.outcomes, []
                results, self.results = self.results, []
                yield agent_registry_service_pb2.HeartbeatRequest(
                    lease_id=self.registration.lease_id,
                    epoch=self.epoch,
                    state=self.state,
                    load=self.load,
                    outcomes=outcomes,
                    command_results=results,
                    agent_monotonic_ms=self.monotonic_ms(),
                )
                await asyncio.sleep(self.beat_seconds)

        async for response in self.registry.Heartbeat(beats()):
            self.num_answers += 1
            self.policy_revision = response.policy_revision
            self.commands.extend(response.commands)

    async def hears_a_command(self) -> None:
        await eventually(lambda: self.commands)

    async def vanish(self) -> None:
        """Closes the stream without a word, as a killed process does."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None


async def eventually(condition: Callable[[], object], timeout: float = 5.0) -> None:
    """Waits until the condition holds; fails when it does not in time."""
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        await asyncio.sleep(0.01)


@pytest.fixture
async def server() -> AsyncIterator[ControllerServer]:
    """A listening controller."""
    controller = ControllerServer(ControllerSettings(port=0, metrics_port=0))
    await controller.start()
    yield controller
    await controller.stop()


@pytest.fixture
async def clients(server: ControllerServer) -> AsyncIterator[Clients]:
    """Stubs of the controller under test."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options=channel_options()) as channel:
        yield Clients(channel)


JoinAgent = Callable[..., Awaitable[ProtocolAgent]]


@pytest.fixture
async def join(clients: Clients) -> AsyncIterator[JoinAgent]:
    """Lets agents join the controller under test."""
    agents: list[ProtocolAgent] = []

    async def join_one(agent_id: str = "agent-a", **options: Any) -> ProtocolAgent:
        agent = ProtocolAgent(clients.registry, agent_message(agent_id, **options))
        agents.append(agent)
        return await agent.join()

    yield join_one
    for agent in agents:
        await agent.vanish()


class Bench:
    """A cell with a clock in the test's hand."""

    def __init__(self, policy: Policy | None = None) -> None:
        self.now = 100.0
        self.tickets: Counter[str] = Counter()
        self.judgements: list[Judgement] = []
        self.hints: list[str] = []
        self.past_targets = 0
        self.cell = Cell((CellKey(7, b"k" * 32),), policy or Policy(), self, clock=lambda: self.now, rng=Random(5))
        self.members: dict[str, Member] = {}

    def ticket(self, result: str) -> None:
        self.tickets[result] += 1

    def waited(self, priority: Priority, seconds: float) -> None:
        pass

    def quoted(self, priority: Priority, quote: Quote, policy: Policy) -> None:
        pass

    def judged(self, judgements: Sequence[Judgement]) -> None:
        self.judgements.extend(judgements)

    def hinted(self, outcome: str) -> None:
        self.hints.append(outcome)

    def join(self, agent_id: str = "a", epoch: int = 1, **options: Any) -> Member:
        """A serving agent."""
        spec = agent_spec(agent_message(agent_id, **options))
        self.members[agent_id] = self.cell.register(spec, epoch, 1000)
        self.beat(agent_id)
        return self.members[agent_id]

    def beat(self, agent_id: str = "a", load: Load | None = None, **fields: Any) -> None:
        """One beat."""
        state = fields.pop("state", AgentState.SERVING)
        self.cell.beat(self.members[agent_id], state, load or Load(), int(self.now * 1000), **fields)

    def pass_time(self, seconds: float, beating: Sequence[str] = ()) -> None:
        """Lets time pass in steps of a tenth of a second; `beating` agents stay alive with the load they have."""
        end = self.now + seconds
        while self.now < end - 1e-9:
            self.now += 0.1
            for agent_id in beating:
                self.beat(agent_id, self.members[agent_id].load)
            self.cell.tick()

    def ask(self, request_id: str = "", **fields: Any) -> list[Answer]:
        """Submits a request; the list grows as answers come."""
        answers: list[Answer] = []
        self.cell.admission.submit(self.request(request_id, **fields), answers.append)
        return answers

    def request(self, request_id: str = "", **fields: Any) -> AdmissionRequest:
        """A request that is good but for what is given."""
        defaults: dict[str, Any] = {
            "request_id": request_id or secrets.token_hex(8),
            "model": "tiny",
            "prompt_tokens": 100,
            "prompt_bytes": 0,
            "prompt_digest": b"p" * 32,
            "max_output_tokens": 50,
        }
        return AdmissionRequest(**{**defaults, **fields})


@pytest.fixture
def bench() -> Bench:
    """A cell without agents."""
    return Bench()


@pytest.fixture
def bench_of() -> type[Bench]:
    """Makes a cell under a policy."""
    return Bench


@pytest.fixture
def agent_messages() -> Callable[..., agent_pb2.Agent]:
    """Makes agents as they register."""
    return agent_message
