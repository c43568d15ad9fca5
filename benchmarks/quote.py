"""How good the quotes are: real controller, real agents, a mixed load through the Python client.

    python -m benchmarks.quote [--device cpu] [--model embedded] [--agents 1] [--users 4] [--requests 400] [--record]
    python -m benchmarks.quote --device cuda --model Qwen/Qwen3-0.6B --users 64 --requests 3000 --record

Each user sends one request after the other with exponential pauses: chats that share a beginning, long prompts with short
answers, short prompts with long answers, and plain texts whose length in tokens only the agent learns. A request is held
against the quote that came with its ticket. What is counted are the agent's own times from acceptance, which is what
a quote is about; requests of the first quarter teach and are not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.cell import Cell
from benchmarks.record import make_record, save

from dragoman import AsyncClient
from dragoman.results import Estimate, GenerationResult

QUANTITIES = ("time_to_first_token", "time_per_output_token", "finish")
PREDICTED_ERROR, PREDICTED_INSIDE = 0.10, 0.80
NUM_PARTS = 4
MIN_VOCABULARY = 250  # ids below this are in any vocabulary


@dataclass(frozen=True, slots=True)
class Verdict:
    """One quoted quantity beside what came."""

    quantity: str
    error: float
    inside: bool
    part: int


def make_prompt(rng: random.Random, shared: Sequence[Sequence[int]], longest: int) -> tuple[Any, int]:
    """A prompt, ids or text, and how many tokens to generate."""

    def ids(low: int, high: int) -> list[int]:
        return [rng.randrange(3, MIN_VOCABULARY) for _ in range(rng.randrange(low, high))]

    kind = rng.random()
    if kind < 0.4:
        return [*rng.choice(shared), *ids(16, 96)], rng.randrange(24, 96)
    if kind < 0.6:
        return ids(longest // 4, longest), rng.randrange(8, 24)
    if kind < 0.8:
        return ids(8, 48), rng.randrange(64, 192)
    words = ("light", "a", "house", "of", "many", "and", "river", "the", "small")
    return " ".join(rng.choice(words) for _ in range(rng.randrange(8, 80))), rng.randrange(16, 64)


async def user(
    client: AsyncClient, rng: random.Random, work: list[int], options: argparse.Namespace, done: list[Any]
) -> None:
    """Takes requests off `work` until there are none."""
    shared = [[random.Random(seed).randrange(3, MIN_VOCABULARY) for _ in range(256)] for seed in range(4)]
    while work:
        number = work.pop()
        prompt, num_tokens = make_prompt(rng, shared, options.longest_prompt)
        result = await client.complete(prompt, max_output_tokens=num_tokens, ignore_eos=True, temperature=0.0)
        assert result.usage.output_tokens == num_tokens, result.usage
        done.append((number, result))
        await asyncio.sleep(rng.expovariate(1.0 / options.pause))


def judge(result: GenerationResult, part: int) -> list[Verdict]:
    """The quantities of one request."""
    quote, timings = result.quote, result.timings
    ttft, total = timings.time_to_first_token_seconds, timings.total_seconds
    assert quote is not None and ttft is not None and total is not None
    observed = ttft, (total - ttft) / (result.usage.output_tokens - 1), total
    promised = quote.time_to_first_token, quote.time_per_output_token, quote.finish
    return [
        Verdict(name, _error(estimate, seconds), estimate.p10_seconds <= seconds <= estimate.p90_seconds, part)
        for name, estimate, seconds in zip(QUANTITIES, promised, observed, strict=True)
    ]


def _error(estimate: Estimate, seconds: float) -> float:
    return abs(seconds - estimate.expected_seconds) / estimate.expected_seconds


async def run_load(address: str, options: argparse.Namespace) -> list[Verdict]:
    """Runs the load; the verdicts on all but the first quarter of the requests."""
    work = list(range(options.requests, 0, -1))
    done: list[tuple[int, GenerationResult]] = []
    async with AsyncClient(address) as client:
        users = (user(client, random.Random(seed), work, options, done) for seed in range(options.users))
        await asyncio.gather(*users)
    counted = [result for _, result in sorted(done, key=lambda one: one[0])][options.requests // 4 :]
    size = -(-len(counted) // NUM_PARTS)
    return [verdict for index, result in enumerate(counted) for verdict in judge(result, index // size)]


def summary(verdicts: list[Verdict]) -> tuple[list[float], list[float]]:
    """Median error and share inside the interval, of each part of the run."""
    parts = [[verdict for verdict in verdicts if verdict.part == part] for part in range(NUM_PARTS)]
    errors = [statistics.median(verdict.error for verdict in part) for part in parts]
    return errors, [statistics.mean(verdict.inside for verdict in part) for part in parts]


def main() -> None:
    """Measures, prints, and with --record records."""
    parser = argparse.ArgumentParser(description="error and coverage of quotes under a mixed load")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or null")
    parser.add_argument(
        "--null-speed", type=float, default=20.0, help="step times of the null device, as its own option"
    )
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--agents", type=int, default=1)
    parser.add_argument("--users", type=int, default=4)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--pause", type=float, default=0.5, help="mean pause of a user in seconds")
    parser.add_argument("--longest-prompt", type=int, default=256)
    parser.add_argument("--case", default="", help="name of the record; unset takes the device")
    parser.add_argument("--record", action="store_true", help="record in results/control.json")
    options = parser.parse_args()
    cell = Cell()
    try:
        for number in range(options.agents):
            flags = ("--device", options.device, "--model", options.model)
            if options.device == "null":
                flags = ("--device", "null", "--null-speed", str(options.null_speed))
            cell.start_agent(f"agent-{number}", *flags)
        started = time.monotonic()
        verdicts = asyncio.run(run_load(cell.controller_address, options))
        print(f"{options.requests} requests in {time.monotonic() - started:.0f} s")
    finally:
        cell.close()
    for name in QUANTITIES:
        errors, inside = summary([verdict for verdict in verdicts if verdict.quantity == name])
        print(
            f"{name:22s} median error {statistics.median(errors):6.1%}  inside p10-p90 {statistics.mean(inside):6.1%}"
        )
    errors, inside = summary(verdicts)
    print(f"{'all':22s} median error {statistics.median(errors):6.1%}  inside p10-p90 {statistics.mean(inside):6.1%}")
    if options.record:
        case = options.case or {"cuda": "h200"}.get(options.device, options.device)
        command = f"python -m benchmarks.quote --device {options.device} --model {options.model}"
        note = (
            f"{options.agents} agents, {options.users} users, {options.requests} requests, the first quarter uncounted"
        )
        records = [
            make_record(
                bench="quote", case=case, metric=metric, unit="share", samples=samples, predicted=predicted,
                command=command, packages=("grpcio", "numpy"), note=note,
            )
            for metric, samples, predicted in (
                ("median_error", errors, PREDICTED_ERROR),
                ("inside_p10_p90", inside, PREDICTED_INSIDE),
            )
        ]  # fmt: skip
        save("control", records)


if __name__ == "__main__":
    main()
