"""How good the quotes are: real controller, real agents, a mixed load through the Python client.

    python -m benchmarks.quote [--device cpu] [--model embedded] [--agents 1] [--users 4] [--requests 400] [--record]
    python -m benchmarks.quote --device cuda [--out FILE]      about two minutes on an H200; benchmarks.record_gpu records FILE
    python -m benchmarks.quote --device null --like h200       its stand-in: the load of a GPU and its steps, four times slower
    python -m benchmarks.quote --device null --like h200-graphs    the same where a step of up to 512 prompt tokens is a graph;
                                                                   h200-graphs-2048: up to 2,048

Each user sends one request after the other with exponential pauses: chats that share a beginning, long prompts with short
answers, short prompts with long answers, and plain texts whose length in tokens only the agent learns. A request is held
against the quote that came with its ticket. What is counted are the agent's own times from acceptance, which is what
a quote is about; requests of the first quarter teach and are not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cell import Cell
from benchmarks.record import make_record, save

from dragoman import AsyncClient
from dragoman.results import Estimate, GenerationResult

QUANTITIES = ("time_to_first_token", "time_per_output_token", "finish")
KINDS = ("shared beginning", "long prompt", "long answer", "text")
PREDICTED_ERROR, PREDICTED_INSIDE = 0.10, 0.80
NUM_PARTS = 4
MIN_VOCABULARY = 250  # ids below this are in any vocabulary
START_SECONDS = 240.0  # of an agent that measures its card and compiles its kernels first
LIKE = ("h200", "h200-graphs", "h200-graphs-2048")
# What a device is asked for unless options say otherwise.
DEFAULTS: dict[str, dict[str, Any]] = {
    "cuda": {"model": "random:qwen3-0.6b", "users": 64, "requests": 100_000, "seconds": 75.0, "longest_prompt": 1024, "clients": 4},
    "h200": {"users": 64, "requests": 100_000, "seconds": 90.0, "longest_prompt": 1024, "clients": 2, "null_speed": 4.0, "pause": 2.0},
    "": {"null_speed": 20.0, "pause": 0.5, "model": "embedded", "users": 4, "requests": 400, "seconds": 3600.0, "longest_prompt": 256, "clients": 1},
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Verdict:
    """One quoted quantity beside what came."""

    quantity: str
    kind: str
    error: float
    inside: bool
    ended: float  # time.monotonic, the same clock in every process


def make_prompt(rng: random.Random, shared: Sequence[Sequence[int]], longest: int) -> tuple[str, Any, int]:
    """Its kind, a prompt (ids or text), and how many tokens to generate."""

    def ids(low: int, high: int) -> list[int]:
        return [rng.randrange(3, MIN_VOCABULARY) for _ in range(rng.randrange(low, high))]

    kind = rng.random()
    if kind < 0.4:
        return KINDS[0], [*rng.choice(shared), *ids(16, 96)], rng.randrange(24, 96)
    if kind < 0.6:
        return KINDS[1], ids(longest // 4, longest), rng.randrange(8, 24)
    if kind < 0.8:
        return KINDS[2], ids(8, 48), rng.randrange(64, 192)
    words = ("light", "a", "house", "of", "many", "and", "river", "the", "small")
    return KINDS[3], " ".join(rng.choice(words) for _ in range(rng.randrange(8, 80))), rng.randrange(16, 64)


async def user(
    client: AsyncClient,
    rng: random.Random,
    work: list[int],
    end: float,
    options: argparse.Namespace,
    done: list[Verdict],
) -> None:
    """Takes requests off `work` until there are none or the time is over."""
    shared = [[random.Random(seed).randrange(3, MIN_VOCABULARY) for _ in range(256)] for seed in range(4)]
    while work and time.monotonic() < end:
        work.pop()
        kind, prompt, num_tokens = make_prompt(rng, shared, options.longest_prompt)
        result = await client.complete(prompt, max_output_tokens=num_tokens, ignore_eos=True, temperature=0.0)
        assert result.usage.output_tokens == num_tokens, result.usage
        done.extend(judge(kind, result))
        await asyncio.sleep(rng.expovariate(1.0 / options.pause))


def judge(kind: str, result: GenerationResult) -> list[Verdict]:
    """The quantities of one request."""
    quote, timings, ended = result.quote, result.timings, time.monotonic()
    ttft, total = timings.time_to_first_token_seconds, timings.total_seconds
    assert quote is not None and ttft is not None and total is not None
    observed = ttft, (total - ttft) / (result.usage.output_tokens - 1), total
    promised = quote.time_to_first_token, quote.time_per_output_token, quote.finish
    return [
        Verdict(name, kind, _error(estimate, seconds), estimate.p10_seconds <= seconds <= estimate.p90_seconds, ended)
        for name, estimate, seconds in zip(QUANTITIES, promised, observed, strict=True)
    ]


def _error(estimate: Estimate, seconds: float) -> float:
    return abs(seconds - estimate.expected_seconds) / estimate.expected_seconds


def client_process(address: str, options: argparse.Namespace, number: int) -> list[Verdict]:
    """The share of the load that client process `number` of `options.clients` runs."""

    async def run() -> list[Verdict]:
        work = list(range(options.requests // options.clients))
        done: list[Verdict] = []
        end = time.monotonic() + options.seconds
        async with AsyncClient(address) as client:
            seeds, first = range(number, options.users, options.clients), options.seed * options.users
            await asyncio.gather(
                *(user(client, random.Random(first + seed), work, end, options, done) for seed in seeds)
            )
        return done

    return asyncio.run(run())


def run_load(address: str, options: argparse.Namespace) -> list[Verdict]:
    """Runs the load; the verdicts on all but the first quarter of the requests, in the order in which they ended.

    Several client processes share a large load, so that no client is what is waited for.
    """
    if options.clients == 1:
        done = client_process(address, options, 0)
    else:
        spawned = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(options.clients, mp_context=spawned) as pool:
            shares = [pool.submit(client_process, address, options, number) for number in range(options.clients)]
            done = [verdict for share in shares for verdict in share.result()]
    done.sort(key=lambda verdict: verdict.ended)
    return done[len(done) // 4 :]


def summary(verdicts: list[Verdict]) -> tuple[list[float], list[float]]:
    """Median error and share inside the interval, of each part of the run."""
    size = -(-len(verdicts) // NUM_PARTS)
    parts = [verdicts[start : start + size] for start in range(0, len(verdicts), size)]
    errors = [statistics.median(verdict.error for verdict in part) for part in parts]
    return errors, [statistics.mean(verdict.inside for verdict in part) for part in parts]


def show(verdicts: list[Verdict]) -> None:
    """A line a quantity and kind of request, and of all."""
    groups = {name: [one for one in verdicts if one.quantity == name] for name in QUANTITIES}
    groups |= {kind: [one for one in verdicts if one.kind == kind] for kind in KINDS} | {"all": verdicts}
    for name, group in groups.items():
        if group:
            error, inside = statistics.median(one.error for one in group), statistics.mean(one.inside for one in group)
            print(f"{name:22s} median error {error:6.1%}  inside p10-p90 {inside:6.1%}  ({len(group)})", flush=True)


def results_of(verdicts: list[Verdict], case: str, note: str) -> list[dict[str, Any]]:
    """As the recorders take them."""
    errors, inside = summary(verdicts)
    return [
        {"bench": "quote", "case": case, "metric": metric, "samples": samples, "predicted": predicted, "note": note}
        for metric, samples, predicted in (
            ("median_error", errors, PREDICTED_ERROR), ("inside_p10_p90", inside, PREDICTED_INSIDE),
        )
    ]  # fmt: skip


def options_of() -> argparse.Namespace:
    """The command line, with what its device is usually asked for."""
    parser = argparse.ArgumentParser(description="error and coverage of quotes under a mixed load")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or null")
    parser.add_argument("--null-speed", type=float, help="step times of the null device, as its own option")
    parser.add_argument("--like", choices=LIKE, help="the null device with the steps of another, see like_h200.py")
    parser.add_argument(
        "--noise",
        type=float,
        default=0.25,
        help="of single steps of --like, as the standard deviation of their logarithm",
    )
    parser.add_argument("--model")
    parser.add_argument("--agents", type=int, default=1)
    parser.add_argument("--users", type=int)
    parser.add_argument("--requests", type=int)
    parser.add_argument("--seconds", type=float, help="no request begins after it")
    parser.add_argument("--clients", type=int, help="processes that share the users")
    parser.add_argument("--pause", type=float, help="mean pause of a user in seconds")
    parser.add_argument("--longest-prompt", type=int)
    parser.add_argument("--seed", type=int, default=0, help="another one draws other requests and pauses")
    parser.add_argument("--case", default="", help="name of the record; unset takes the device")
    parser.add_argument(
        "--out", type=Path, help="raw results for benchmarks.record_gpu, on a machine without the history"
    )
    parser.add_argument("--record", action="store_true", help="record in results/control.json")
    options = parser.parse_args()
    if options.like and options.device != "null":
        parser.error("--like is about --device null: a real device takes the time that it takes")
    for name, value in (DEFAULTS[""] | DEFAULTS.get("h200" if options.like else options.device, {})).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    like = f"null-like-{options.like}" if options.like else options.device
    options.case = options.case or {"cuda": "h200"}.get(options.device, like)
    return options


def main() -> None:
    """Measures, prints, and with --record records."""
    options = options_of()
    cell = Cell()
    try:
        flags = ("--device", options.device, "--model", options.model)
        if options.device == "null":
            flags = ("--device", "null", "--null-speed", str(options.null_speed))
        stand_in: dict[str, Any] = {}
        if options.like:
            from benchmarks import like_h200  # not where the agent's packages are another environment's

            environ = {"PYTHONPATH": ".", like_h200.NOISE: str(options.noise)}
            environ[like_h200.GRAPHS] = str(like_h200.NUM_GRAPH_TOKENS[options.like])
            stand_in = {"module": like_h200.MODULE, "environ": environ}
        started = time.monotonic()
        for number in range(options.agents):
            cell.start_agent(f"agent-{number}", *flags, wait=False, **stand_in)
        for agent_id in list(cell.agents):
            cell.wait_agent(agent_id, START_SECONDS)
        print(f"{options.agents} agents ready after {time.monotonic() - started:.1f} s", flush=True)
        started = time.monotonic()
        verdicts = run_load(cell.controller_address, options)
        print(f"{len(verdicts) * 4 // 9} requests in {time.monotonic() - started:.0f} s", flush=True)
    finally:
        cell.close()
    show(verdicts)
    note = f"{options.agents} agents, {options.users} users, {len(verdicts) // 3} requests counted after a quarter uncounted"
    results = results_of(verdicts, options.case, note)
    command = f"python -m benchmarks.quote --device {options.device} --model {options.model}"
    if options.out:
        write_raw(options, results)
    if options.record:
        records = [
            make_record(
                bench="quote", case=options.case, metric=result["metric"], unit="share", samples=result["samples"],
                predicted=result["predicted"], command=command, packages=("grpcio", "numpy"), note=note,
            )
            for result in results
        ]  # fmt: skip
        save("control", records)


def write_raw(options: argparse.Namespace, results: list[dict[str, Any]]) -> None:
    """For `benchmarks.record_gpu`, with what only a GPU machine can tell."""
    from benchmarks.card import environment

    body: dict[str, Any] = {"model": options.model.removeprefix("random:"), "device": "", "results": results}
    if options.device == "cuda":
        body |= environment(0)
    options.out.write_text(json.dumps(body, indent=1) + "\n")


if __name__ == "__main__":
    main()
