"""Admission decisions a second on one core: batches of 32 on one Admit stream, and unary AcquireTicket, over 256 agents.

    python -m benchmarks.admission [--agents 256] [--batches 250] [--calls 600] [--rounds 5] [--equal] [--record]

Starts a real controller. Agents register, beat at 5 Hz and report the outcome of each request with their next beat. What is
counted is CPU time of the controller process, less what the beats alone cost it in as much wall time, read from the
operating system; so the figure is that of one core whatever else the machine does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any

import grpc
import psutil
from benchmarks.record import make_record, save

from dragoman.channel import channel_options
from dragoman.step_model import StepModel
from dragoman.v1 import (
    admission_service_pb2,
    admission_service_pb2_grpc,
    agent_pb2,
    agent_registry_service_pb2,
    agent_registry_service_pb2_grpc,
    ticket_pb2,
)

BATCH_SIZE = 32
BEAT_SECONDS = 0.2
SETTLE_SECONDS = 2.0
PREDICTED_BATCHED = 24_000.0  # 36-41 us a decision seen in a bare prototype
PREDICTED_UNARY = 2_000.0  # 465-540 us a unary call of grpc.aio
MODEL = "bench"

Outcomes = dict[str, list[agent_registry_service_pb2.RequestOutcome]]


def agent_message(number: int, rng: random.Random, are_equal: bool = False) -> agent_pb2.Agent:
    """An agent whose device is up to twice as slow or as fast as the next, or equal to all others."""
    pace = 1.0 if are_equal else rng.uniform(0.5, 2.0)
    grid = (0.004, 0.005, 0.008, 0.006, 0.01, 0.05, 0.012, 0.03, 0.2)
    steps = StepModel((1, 64, 256), (0, 1024, 8192), tuple(pace * seconds for seconds in grid), 50_000 / pace, 0.005)
    return agent_pb2.Agent(
        agent_id=f"agent-{number:03d}",
        data_address=f"10.0.0.{number % 256}:50051",
        models=[
            agent_pb2.ServedModel(
                model=MODEL,
                model_digest=bytes(32),
                max_context_tokens=8192,
                max_running_requests=256,
                max_waiting_requests=1024,
                step_model=steps.to_proto(),
            )
        ],
    )


async def be_an_agent(stub: Any, message: agent_pb2.Agent, outcomes: Outcomes) -> None:
    """Registers and beats until cancelled."""
    epoch = random.getrandbits(63) | 1
    registration = await stub.RegisterAgent(agent_registry_service_pb2.RegisterAgentRequest(agent=message, epoch=epoch))

    async def beats() -> AsyncIterator[agent_registry_service_pb2.HeartbeatRequest]:
        while True:
            yield agent_registry_service_pb2.HeartbeatRequest(
                lease_id=registration.lease_id,
                epoch=epoch,
                state=agent_pb2.AGENT_STATE_SERVING,
                load=agent_pb2.AgentLoad(),
                agent_monotonic_ms=time.monotonic_ns() // 1_000_000,
                outcomes=outcomes.pop(message.agent_id, ()),
            )
            await asyncio.sleep(BEAT_SECONDS)

    async for _ in stub.Heartbeat(beats()):
        pass


def request(rng: random.Random) -> admission_service_pb2.AcquireTicketRequest:
    """A request of 50 to 4,000 prompt tokens with its block hashes."""
    prompt_tokens = rng.randrange(50, 4000)
    return admission_service_pb2.AcquireTicketRequest(
        request_id=str(uuid.uuid4()),
        model=MODEL,
        prompt_tokens=prompt_tokens,
        max_output_tokens=rng.randrange(20, 1000),
        prompt_digest=rng.randbytes(32),
        block_hashes=[rng.getrandbits(64) for _ in range(prompt_tokens // 64)],
    )


def report(outcomes: Outcomes, granted: admission_service_pb2.AcquireTicketResponse) -> None:
    """The request ends at once; its agent says so with its next beat."""
    claims = ticket_pb2.TicketClaims.FromString(ticket_pb2.SignedTicket.FromString(granted.ticket.token).claims)
    outcome = agent_registry_service_pb2.RequestOutcome(jti=claims.jti, output_tokens=1, incomplete=True)
    outcomes[granted.ticket.agent_id].append(outcome)


async def batched(stub: Any, outcomes: Outcomes, requests: list[admission_service_pb2.AcquireTicketRequest]) -> None:
    """Sends batches, two in flight. The answers are read afterwards: the client's work must not make the controller wait."""
    call = stub.Admit()
    in_flight = asyncio.Semaphore(2)

    async def write() -> None:
        for start in range(0, len(requests), BATCH_SIZE):
            await in_flight.acquire()
            await call.write(admission_service_pb2.AdmitRequest(requests=requests[start : start + BATCH_SIZE]))

    writer = asyncio.create_task(write())
    admissions: list[admission_service_pb2.Admission] = []
    while len(admissions) < len(requests):
        before = len(admissions) // BATCH_SIZE
        admissions += (await call.read()).admissions
        for _ in range(len(admissions) // BATCH_SIZE - before):
            in_flight.release()
    await writer
    await call.done_writing()
    for admission in admissions:
        assert admission.HasField("granted"), admission
        report(outcomes, admission.granted)


async def unary(stub: Any, outcomes: Outcomes, requests: list[admission_service_pb2.AcquireTicketRequest]) -> None:
    """Sixteen callers at once."""

    async def caller(own: list[admission_service_pb2.AcquireTicketRequest]) -> None:
        for one in own:
            report(outcomes, await stub.AcquireTicket(one, timeout=30))

    await asyncio.gather(*(caller(requests[number::16]) for number in range(16)))


def cpu_seconds(process: psutil.Process) -> float:
    """CPU seconds the process has used."""
    times = process.cpu_times()
    return float(times.user + times.system)


async def measure(address: str, process: psutil.Process, options: argparse.Namespace) -> dict[str, list[float]]:
    """Decisions per CPU second of each kind, one a round."""
    rng = random.Random(1)
    outcomes: Outcomes = defaultdict(list)
    rates: dict[str, list[float]] = {"admit_batched": [], "admit_unary": []}
    async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
        registry = agent_registry_service_pb2_grpc.AgentRegistryServiceStub(channel)
        admission = admission_service_pb2_grpc.AdmissionServiceStub(channel)
        agents = [
            asyncio.create_task(be_an_agent(registry, agent_message(number, rng, options.equal), outcomes))
            for number in range(options.agents)
        ]
        await asyncio.sleep(SETTLE_SECONDS)
        started, used = time.monotonic(), cpu_seconds(process)
        await asyncio.sleep(SETTLE_SECONDS)
        beats_share = (cpu_seconds(process) - used) / (time.monotonic() - started)
        for _ in range(options.rounds):
            for name, work, count in (
                ("admit_batched", batched, options.batches * BATCH_SIZE),
                ("admit_unary", unary, options.calls),
            ):
                requests = [request(rng) for _ in range(count)]
                started, used = time.monotonic(), cpu_seconds(process)
                await work(admission, outcomes, requests)
                await asyncio.sleep(2 * BEAT_SECONDS)  # the outcomes are a part of the work
                wall = time.monotonic() - started
                rates[name].append(count / (cpu_seconds(process) - used - beats_share * wall))
        for agent in agents:
            agent.cancel()
        await asyncio.gather(*agents, return_exceptions=True)
    print(f"beats of {options.agents} agents alone: {beats_share:.1%} of a core")
    return rates


def main() -> None:
    """Measures, prints, and with --record records."""
    parser = argparse.ArgumentParser(description="admission decisions a second on one core")
    parser.add_argument("--agents", type=int, default=256)
    parser.add_argument("--batches", type=int, default=250)
    parser.add_argument("--calls", type=int, default=608)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--equal", action="store_true", help="agents of one kind, instead of 256 paces")
    parser.add_argument("--record", action="store_true", help="record in results/control.json")
    options = parser.parse_args()
    command = ["dragoman-controller", "--port", "0", "--metrics-port", "0", "--announce", "--log-level", "warning"]
    program = [sys.executable, "-P", "-c", "from dragoman_controller.main import main; main()", *command[1:]]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as controller:
        assert controller.stdout is not None
        try:
            address = json.loads(controller.stdout.readline())["grpc"]
            rates = asyncio.run(measure(address, psutil.Process(controller.pid), options))
        finally:
            controller.terminate()
    kind = "-equal" if options.equal else ""
    cases = {"admit_batched": f"{BATCH_SIZE}x{options.agents}{kind}", "admit_unary": f"1x{options.agents}{kind}"}
    predicted = {"admit_batched": PREDICTED_BATCHED, "admit_unary": PREDICTED_UNARY}
    for name, samples in rates.items():
        print(
            f"{name} {cases[name]}: {statistics.median(samples):,.0f} decisions/s of one core ({len(samples)} rounds)"
        )
    if options.record:
        records = [
            make_record(
                bench=name,
                case=cases[name],
                metric="decisions_per_second",
                unit="1/s",
                samples=samples,
                predicted=predicted[name],
                command="python -m benchmarks.admission",
                packages=("grpcio", "protobuf", "cryptography"),
                note="per CPU second of the controller process, less the beats",
            )
            for name, samples in rates.items()
        ]
        save("control", records)


if __name__ == "__main__":
    main()
