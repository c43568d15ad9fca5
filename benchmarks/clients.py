"""CPU time that each client library spends on a token at 64 streams, beside a bare grpc.aio client in the same round.

    python -m benchmarks.clients [--language go] [--streams 64] [--tokens 400] [--rounds 5] [--record]

Starts a real open agent on the null device whose steps take about 20 ms, so that every client keeps up and each token comes in
a message of its own. Each runner of clients/conformance reads a short round to warm up, then the one that counts, and reports
its own user + system CPU time; the bare client does the same in its own process. Every client has the last core to itself and
the agent the others: what is compared is the work a token needs, not how well a runtime spreads it over cores that are taken.
--spread leaves that to the operating system.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.record import Record, make_record, save
from clients.conformance.language import Language, built, load_languages
from clients.conformance.processes import start_agent
from clients.conformance.runner import Runner

# 1 is a step of about a millisecond: faster than any client reads 64 streams on a shared core.
NULL_SPEED = "20"
# The most a client may spend, as a multiple of the bare grpc.aio client.
BARS = {"python": 3.0, "typescript": 3.0, "go": 0.3, "rust": 0.3, "java": 0.3}
PREDICTED = {"python": 1.4, "typescript": 0.8, "go": 0.2, "rust": 0.1, "java": 0.3}
ROUND_SECONDS = 180.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One round of one client. CPU microseconds a token, and tokens a stream item."""

    microseconds: float
    tokens_per_item: float


def sample_of(value: dict[str, Any], num_tokens: int) -> Sample:
    """The figures of a round. Raises ValueError when tokens are missing."""
    if value["tokens"] != num_tokens:
        raise ValueError(f"{value['tokens']} of {num_tokens} tokens came")
    return Sample(value["cpu_seconds"] / num_tokens * 1e6, num_tokens / value.get("items", num_tokens))


def bare(address: str, num_streams: int, num_tokens: int) -> Sample:
    """The bare client in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.bare_client", address, str(num_streams), str(num_tokens)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=ROUND_SECONDS, check=True)
    return sample_of(json.loads(done.stdout), num_streams * num_tokens)


async def library(runner: Runner, address: str, num_streams: int, num_tokens: int) -> Sample:
    """A client library in its runner, warmed up."""

    def call(tokens: int) -> dict[str, Any]:
        options = {"model": "null", "max_output_tokens": tokens, "ignore_eos": True}
        return {"do": "load_streams", "prompt": {"text": "prompt"}, "options": options, "streams": num_streams}

    instruction = {
        "id": "load", "agent": address, "tenant": "", "retry": {}, "calls": [call(num_tokens // 4), call(num_tokens)],
    }  # fmt: skip
    lines = await runner.run(instruction, ROUND_SECONDS, lambda _line: None)
    ends = [line for line in lines if line["call"] == 1]
    if len(ends) != 1 or ends[0]["event"] != "value":
        raise ValueError(f"the runner answered {ends or lines}")
    return sample_of(ends[0]["value"], num_streams * num_tokens)


def pin(cores: set[int]) -> None:
    """Keeps this thread, and the processes it starts from now on, to some cores."""
    if cores:
        os.sched_setaffinity(0, cores)


async def measure(
    languages: list[Language], num_streams: int, num_tokens: int, num_rounds: int, spread: bool
) -> dict[str, list[Sample]]:
    """Samples by language; "bare" is the bare client. All take their turn in each round, so that a busy minute hits all."""
    samples: dict[str, list[Sample]] = {"bare": [], **{language.name: [] for language in languages}}
    runners = {language.name: language.command(built(language)) for language in languages}
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") and not spread else set()
    last = {max(cores)} if len(cores) > 1 else set()
    with tempfile.TemporaryDirectory() as folder:
        pin(cores - last if last else set())
        agent = start_agent(Path(folder), "--open", "--null-speed", NULL_SPEED, "--log-level", "error")
        pin(last)
        try:
            for _ in range(num_rounds):
                samples["bare"].append(bare(agent.address, num_streams, num_tokens))
                for language in languages:
                    log = Path(folder) / f"{language.name}.log"
                    runner = Runner(runners[language.name], language.folder, log)
                    try:
                        samples[language.name].append(await library(runner, agent.address, num_streams, num_tokens))
                    finally:
                        await runner.stop()
        finally:
            pin(cores)
            agent.stop()
    return samples


def records(samples: dict[str, list[Sample]], command: str) -> list[Record]:
    """One ratio a language, and the microseconds behind it in the note."""
    made = []
    for name, own in samples.items():
        if name == "bare":
            continue
        pairs = list(zip(own, samples["bare"], strict=True))
        made.append(
            make_record(
                bench="token_cpu",
                case=name,
                metric="ratio_to_python",
                unit="ratio",
                samples=[one.microseconds / base.microseconds for one, base in pairs],
                predicted=PREDICTED.get(name),
                command=command,
                packages=("grpcio", "protobuf"),
                peer={"name": "bare grpc.aio client in Python, same round", "value": 1.0},
                note=f"{statistics.median(one.microseconds for one, _ in pairs):.1f} us a token, bare "
                f"{statistics.median(base.microseconds for _, base in pairs):.1f} us; "
                f"{statistics.median(one.tokens_per_item for one, _ in pairs):.2f} tokens an item; bar {BARS[name]:g}x",
            )
        )
    return made


def main() -> int:
    """Print the table; with --record keep it. Exit 1 when a client is over its bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = load_languages()
    parser.add_argument("--language", action="append", choices=known)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--spread", action="store_true", help="pin nothing to a core")
    parser.add_argument("--record", action="store_true")
    arguments = parser.parse_args()
    languages = [known[name] for name in arguments.language or known if not known[name].missing()]
    samples = asyncio.run(measure(languages, arguments.streams, arguments.tokens, arguments.rounds, arguments.spread))
    over = 0
    base = statistics.median(sample.microseconds for sample in samples["bare"])
    print(f"bare grpc.aio  {base:7.1f} us a token, {samples['bare'][0].tokens_per_item:.2f} tokens a message")
    for name, own in samples.items():
        if name == "bare":
            continue
        ratios = [a.microseconds / b.microseconds for a, b in zip(own, samples["bare"], strict=True)]
        ratio, microseconds = statistics.median(ratios), statistics.median(sample.microseconds for sample in own)
        over += ratio > BARS[name]
        print(f"{name:13}  {microseconds:7.1f} us a token, {ratio:5.2f}x (bar {BARS[name]:g}x)")
    if arguments.record:
        save("clients", records(samples, "python -m benchmarks.clients --record"))
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
