"""Time to first token of a request that waited while its prefix lay on another agent: with prefetch hints and without.

Two agents on the CPU with the embedded model, one slot each. One holds a prefix and is busy for long, the other is busy for a
little while; the request that waits goes to the other one, which by then has fetched the prefix, or has to compute it.
Prediction: what computing the prefix takes at the agent's own prefill rate, against a fetch of its bytes, less what is hidden
in the wait: at 300 prompt tokens a second and 23 KB a token, 640 tokens are 2.1 s of prefill or 15 MB.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from benchmarks.cell import CellProcess, metric_sum
from benchmarks.record import Record, make_record, save

from dragoman.channel import channel_options
from dragoman.durations import seconds_of
from dragoman.prefix_hash import prefix_hashes, prompt_digest_of_ids, root_hash, wire_hash
from dragoman.v1 import (
    admission_service_pb2,
    admission_service_pb2_grpc,
    fleet_service_pb2,
    fleet_service_pb2_grpc,
    generation_service_pb2,
    generation_service_pb2_grpc,
)

COMMAND = "python -m benchmarks.prefetch --record"
NUM_UNITS, NUM_TAIL_TOKENS = 10, 8
SHORT_TOKENS, LONG_TOKENS = 60, 600
PREDICTED = {"with": 0.15, "without": 2.2}


@dataclass(frozen=True, slots=True)
class Sample:
    """One request that waited: seconds from its acceptance at the agent, prefix tokens found there."""

    time_to_first_token: float
    cached_tokens: int


class Bench:
    """A controller with two agents, and how to ask them."""

    def __init__(self, controller: grpc.aio.Channel, metrics: str, seed: int) -> None:
        self._admission = admission_service_pb2_grpc.AdmissionServiceStub(controller)
        self._fleet = fleet_service_pb2_grpc.FleetServiceStub(controller)
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._rng = random.Random(seed)
        self.metrics = metrics
        self.digest = b""
        self.model = ""

    async def wait_for_agents(self, num_agents: int = 2) -> None:
        """Until so many serve, and no other is known."""
        while True:
            members = (await self._fleet.ListAgents(fleet_service_pb2.ListAgentsRequest())).members
            if [member.state for member in members] == [2] * num_agents:
                break
            await asyncio.sleep(0.1)
        self.model, self.digest = members[0].agent.models[0].model, members[0].agent.models[0].model_digest

    def prompt(self, num_tokens: int) -> list[int]:
        """Token ids that nobody has seen."""
        return [self._rng.randrange(1000, 40_000) for _ in range(num_tokens)]

    async def run(self, prompt: list[int], num_tokens: int) -> tuple[str, Any]:
        """One request to its end: the agent, and how it finished."""
        request = admission_service_pb2.AcquireTicketRequest(
            request_id=str(uuid.uuid4()), model=self.model, prompt_tokens=len(prompt), max_output_tokens=num_tokens,
            prompt_digest=prompt_digest_of_ids(prompt),
            block_hashes=[wire_hash(unit) for unit in prefix_hashes(root_hash(self.digest), prompt)],
        )  # fmt: skip
        ticket = (await self._admission.AcquireTicket(request, timeout=120)).ticket
        message = generation_service_pb2.GenerateRequest(request_id=request.request_id, ticket_token=ticket.token)
        message.token_ids.ids.extend(prompt)
        message.stop.max_output_tokens, message.stop.ignore_eos = num_tokens, True
        channel = self._channels.get(ticket.data_address)
        if channel is None:
            channel = grpc.aio.insecure_channel(ticket.data_address, options=channel_options())
            self._channels[ticket.data_address] = channel
        stub = generation_service_pb2_grpc.GenerationServiceStub(channel)
        events = [event async for event in stub.Generate(message)]
        return ticket.agent_id, events[-1].finished

    async def sample(self) -> Sample | None:
        """One round; None when the request went to the agent that held the prefix."""
        prefix = self.prompt(64 * NUM_UNITS)
        holder, _ = await self.run(prefix + self.prompt(NUM_TAIL_TOKENS), 1)
        await asyncio.sleep(0.5)  # the controller hears of the prefix, and of the request's end
        long = asyncio.create_task(self.run(prefix + self.prompt(NUM_TAIL_TOKENS), LONG_TOKENS))
        await asyncio.sleep(0.1)
        short = asyncio.create_task(self.run(self.prompt(NUM_TAIL_TOKENS), SHORT_TOKENS))
        await asyncio.sleep(0.1)
        agent, finished = await self.run(prefix + self.prompt(NUM_TAIL_TOKENS), 1)
        await short
        long.cancel()
        await asyncio.gather(long, return_exceptions=True)
        await asyncio.sleep(0.5)
        if agent == holder:
            return None
        return Sample(seconds_of(finished.time_to_first_token), finished.usage.cached_tokens)

    async def close(self) -> None:
        """Close the channels to the agents."""
        for channel in self._channels.values():
            await channel.close()


@asynccontextmanager
async def running(prefetch: bool, seed: int) -> AsyncIterator[Bench]:
    """A cell with hints for the queue, or without."""
    flags = ("--port", "0", "--metrics-port", "0", "--log-level", "warning")
    controller = CellProcess("dragoman_controller.main", *flags, "--prefetch" if prefetch else "--no-prefetch")
    agents: list[CellProcess] = []
    try:
        serving = controller.wait_for("serving")
        for name in ("a", "b"):
            agent = CellProcess(
                "dragoman_agent.main", *flags, "--device", "cpu", "--threads", "1", "--max-num-seqs", "1",
                "--max-num-waiting", "0", "--max-context", "2048", "--agent-id", name, "--controllers", serving["grpc"],
            )  # fmt: skip
            agents.append(agent)
            await asyncio.to_thread(agent.wait_for, "ready")
        async with grpc.aio.insecure_channel(serving["grpc"], options=channel_options()) as channel:
            bench = Bench(channel, serving["metrics"], seed)
            await bench.wait_for_agents()
            yield bench
            await bench.close()
    finally:
        for process in (*agents, controller):
            await asyncio.to_thread(process.close)


async def measure(prefetch: bool, num_rounds: int, seed: int) -> list[Sample]:
    """So many rounds; the first, which learns the rate of a fetch, is left out."""
    samples: list[Sample] = []
    async with running(prefetch, seed) as bench:
        for number in range(3 * num_rounds):
            sample = await bench.sample()
            print(f"prefetch {'on' if prefetch else 'off'} round {number}: {sample}", flush=True)
            if sample is not None and number:
                samples.append(sample)
            if len(samples) == num_rounds:
                break
        outcomes = {
            outcome: metric_sum(bench.metrics, "dragoman_hints_total", outcome=outcome)
            for outcome in ("used", "late", "clipped", "refused", "unused")
        }
    print(f"hints: {outcomes}")
    if len(samples) < num_rounds:
        raise RuntimeError(f"only {len(samples)} of {num_rounds} requests went to the agent without the prefix")
    return samples


def records(samples: dict[str, list[Sample]]) -> list[Record]:
    """The two figures, the one without hints as the other's peer."""
    without = statistics.median(sample.time_to_first_token for sample in samples["without"])
    return [
        make_record(
            bench="prefetch", case=f"{64 * NUM_UNITS}-tokens-cpu-{case}-hints", metric="time_to_first_token", unit="s",
            samples=[sample.time_to_first_token for sample in samples[case]], predicted=PREDICTED[case],
            command=COMMAND, packages=("grpcio", "numpy"), device="cpu",
            peer={"name": "without hints", "value": without} if case == "with" else None,
            note=f"cached tokens {[sample.cached_tokens for sample in samples[case]]}; two agents of one thread each",
        )
        for case in ("with", "without")
    ]  # fmt: skip


def main() -> None:
    """Run and print; `--record` saves."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    samples = {
        name: asyncio.run(measure(prefetch, options.rounds, options.seed))
        for name, prefetch in (("without", False), ("with", True))
    }
    for name, taken in samples.items():
        print(
            f"{name} hints: median {statistics.median(s.time_to_first_token for s in taken):.3f} s to the first token"
        )
    if options.record:
        print(save("control", records(samples)))


if __name__ == "__main__":
    main()
